"""The contract of every `Worker`, told to vLLM: the same stories as for our own engines.

vLLM's arithmetic depends on the batch, so here answers are greedy, and log-probabilities equal to a few decimals. What
the stories take for granted of random numbers does not hold: a turn that goes on elsewhere draws new ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.contract import test_worker as contract
from tests.contract.kinds import CONTEXT_TOKENS, Output, ask
from tests.contract.test_worker import *  # noqa: F403 - the stories are collected here, with the `kind` below
from tests.contract.workers import START_VERSION, Story
from tests.vllm.engines import rollout_engine

from rose.clock import RealClock
from rose.engines.vllm.process import EngineProcess
from rose.engines.vllm.worker import VllmWorker

STORY_S = 120


class VllmWorkers:
    """One engine for all stories: see conftest.py for their order."""

    name = "vllm"

    def __init__(self, folder: Path, other_folder: Path) -> None:
        self.weights, self.bad_weights = str(other_folder), str(folder / "nowhere")
        self._folder = folder
        self._runner = asyncio.Runner()
        self._engine: EngineProcess | None = None

    def tell(self, story: Story) -> None:
        self._runner.run(self._tell(story, is_reset=True))

    def tell_once(self, story: Story) -> None:
        self._runner.run(self._tell(story, is_reset=self._engine is not None))

    async def kill(self, worker: Any) -> None:
        assert self._engine is not None
        os.killpg(self._engine.process_id, signal.SIGKILL)

    def close(self) -> None:
        if self._engine is not None:
            self._runner.run(self._engine.close())
        self._runner.close()

    async def _tell(self, story: Story, *, is_reset: bool) -> None:
        engine = self._engine = self._engine or await self._start()
        try:
            async with asyncio.timeout(STORY_S):
                if is_reset:
                    await self._reset(engine.worker)
                await story(engine.worker, RealClock())
        finally:
            await self._leave(engine)

    async def _reset(self, worker: VllmWorker) -> None:
        await worker.grant(0, 0, 0.0)
        await worker.kv_budget(1 << 30)
        await worker.stage(START_VERSION, str(self._folder))
        await worker.commit(START_VERSION)

    async def _leave(self, engine: EngineProcess) -> None:
        """With a worker that can be used, if the engine lives."""
        if not engine.is_running:
            await engine.close()
            self._engine = None
        elif engine.worker._is_closed:
            control = engine.worker._sheet
            engine.worker = await VllmWorker.attach(engine.socket, engine.folder, control, lambda: engine.is_running)
            engine.worker.is_seeded = False

    async def _start(self) -> EngineProcess:
        sizes = {"max_context_tokens": CONTEXT_TOKENS, "max_sequences": 64, "step_tokens": 512}
        process = EngineProcess(rollout_engine(self._folder, **sizes))
        await process.start()
        return process


@pytest.fixture(scope="module")
def kind(model_folders: list[Path]) -> Iterator[VllmWorkers]:
    workers = VllmWorkers(*model_folders)
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(one: Output, other: Output) -> bool:
        whole = (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        return whole and one.logprobs == pytest.approx(other.logprobs, abs=1e-3)

    monkeypatch.setattr(contract, "ask", lambda *words, **more: ask(*words, **{"temperature": 0.0, **more}))
    monkeypatch.setattr(Output, "same_as", same)


def test_a_kv_budget_evicts_what_no_longer_fits(kind: VllmWorkers) -> None:
    """The same story with budgets for blocks of 32 tokens, the smallest that vLLM has on a CPU."""

    async def story(worker: Any, clock: Any) -> None:
        first, events, output = await contract.caught(worker, clock, max_tokens=100)
        second = contract.new(80, prompt=1, max_tokens=100)
        other = contract.started(worker, second)
        while (await worker.facts()).engine.waiting < 1:
            await clock.sleep_s(0.001)
        facts = (await worker.facts()).engine
        await worker.kv_budget(5 * facts.block_bytes)  # enough for the first alone, never for the second
        assert (await other).finish_reason == "abort"
        await worker.kv_budget((facts.kv_blocks_used - 1) * facts.block_bytes)
        after = (await worker.facts()).engine
        assert (after.kv_blocks_used, after.kv_blocks_limit) == (0, facts.kv_blocks_used - 1)
        assert (await contract.read(events, output)).finish_reason == "abort"
        await worker.kv_budget(1 << 30)
        await contract.open_gate(worker, clock)
        later = await contract.whole(worker, msgspec.structs.replace(first, partial=output.partial()))
        assert output.then(later).same_as(await contract.whole(worker, first))
        assert (await contract.whole(worker, second)).finish_reason == "length"

    kind.tell(story)
