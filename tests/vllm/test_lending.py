"""Two vLLM servers on one core: rollouts run in what serving leaves, and serving outlives whatever befalls them.

The serving engine serves the second model, so that it can be asked what rollouts must say after a swap to it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import ServingEngine, cpu_s, memory_bytes, rollout_engine

from rose.engines.base import Request, Sampling
from rose.engines.vllm.desk import Status, Terms
from rose.engines.vllm.finding import board_of
from rose.engines.vllm.process import EngineProcess
from rose.engines.vllm.worker import VllmWorker
from rose.errors import Unavailable

ALL = 1 << 20
WAIT_S = 60.0  # for anything that should take moments
TTFT_S, TPOT_S = 10.0, 2.0  # that a busy machine keeps too: a circuit breaker would end these stories
PROMPT = [(7 * number) % 250 for number in range(40)]


class Pair:
    """A serving engine and a rollout engine beside it, with an agent's word that is renewed."""

    def __init__(self, runner: asyncio.Runner, serving: ServingEngine, process: EngineProcess) -> None:
        self.runner, self.serving, self.process = runner, serving, process
        self.worker: VllmWorker
        self.terms: Terms
        self.numbers = 0

    def tell(self, story: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
        self.runner.run(self._tell(story))

    async def _tell(self, story: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.timeout(300):
            keeper = asyncio.create_task(self._keep())
            try:
                await story(self)
            finally:
                keeper.cancel()

    async def _keep(self) -> None:
        self.find_board()
        while True:
            until_s = time.monotonic() + 3.0
            self.worker.wish(tokens=ALL, sequences=ALL, until_s=until_s, terms=self.terms, resumes=self.numbers)
            await asyncio.sleep(0.5)

    def find_board(self) -> None:
        self.terms = Terms(str(board_of(self.serving.url)), "idle", ttft_s=TTFT_S, tpot_s=TPOT_S)

    def request(self, max_tokens: int = 24, **sampling: Any) -> Request:
        self.numbers += 1
        settings = Sampling(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **sampling})
        return Request(f"turn-{self.numbers}", tuple(PROMPT), settings)

    async def rollout(self, request: Request) -> tuple[list[int], list[float], list[str], str | None]:
        tokens, logprobs, versions, reason = [], [], [], None
        async for event in self.worker.generate(request):
            tokens += event.token_ids
            logprobs += event.logprobs
            versions += [event.version] * len(event.token_ids)
            reason = event.finish_reason
        return tokens, logprobs, versions, reason

    async def until(self, holds: Callable[[Status], bool]) -> Status:
        deadline_s = time.monotonic() + WAIT_S
        while not holds(status := self.worker.status()):
            assert time.monotonic() < deadline_s, (status.state, status.why, status.running, status.waiting)
            await asyncio.sleep(0.01)
        return status

    async def served(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.serving.answer(PROMPT, 60)


@pytest.fixture(scope="module")
def pair(model_folders: list[Path], tmp_path_factory: pytest.TempPathFactory):
    runner = asyncio.Runner()
    serving = ServingEngine(model_folders[1], tmp_path_factory.mktemp("serving") / "log")
    process = EngineProcess(rollout_engine(model_folders[0]))
    made = Pair(runner, serving, process)
    try:
        made.worker = runner.run(process.start())
        runner.run(serving.ready())
        yield made
    finally:
        runner.run(process.close())
        serving.close()
        runner.close()


def test_nothing_is_lent_until_serving_is_known(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        turn = asyncio.create_task(pair.rollout(pair.request()))
        status = await pair.until(lambda status: status.waiting == 1 and "learning" in status.why)
        assert (status.steps, status.state, status.gate_open) == (0, "parked", False)
        for number in range(12):  # prompts of all lengths, and enough tokens
            await asyncio.gather(*(pair.serving.answer(PROMPT * (1 + number % 4), 12) for _ in range(2)))
        tokens, logprobs, _, reason = await turn
        assert (len(tokens), len(logprobs), reason) == (24, 24, "length")
        status = pair.worker.status()
        assert status.lent.missing == ""
        assert status.lent.steps == status.steps > 0
        assert status.lent.requests == 24

    pair.tell(story)


def test_rollouts_stand_still_while_serving_works_and_do_not_spin(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=300)))
        await pair.until(lambda status: status.running == 1)
        stop = asyncio.Event()
        users = [asyncio.create_task(pair.served(stop)) for _ in range(3)]
        try:
            await pair.until(lambda status: status.state == "parked" and "serving has" in status.why)
            before, cpu_before_s, began_s = pair.worker.status(), cpu_s(pair.process.process_id), time.monotonic()
            await asyncio.sleep(2.0)
            share = (cpu_s(pair.process.process_id) - cpu_before_s) / (time.monotonic() - began_s)
            after = pair.worker.status()
        finally:
            stop.set()
            await asyncio.gather(*users)
        assert after.steps == before.steps
        assert share < 0.2, "a polling engine takes half a core"
        assert (await turn)[3] == "length"

    pair.tell(story)


def test_a_turn_is_evicted_with_everything_so_far_and_memory_goes_back(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        whole = await pair.rollout(pair.request(max_tokens=200))
        memory = memory_bytes(pair.process.process_id)
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=200)))
        await pair.until(lambda status: any(made >= 5 for _, made in status.live.values()))
        await pair.worker.want(kv_bytes=0)
        tokens, logprobs, _, reason = await turn
        assert reason == "abort"
        assert tokens == whole[0][: len(tokens)]
        assert len(tokens) == len(logprobs) >= 5
        assert pair.worker.status().kv_blocks_limit == 0
        assert memory - memory_bytes(pair.process.process_id) > 32 << 20, "of 64 MiB"
        await pair.worker.want(kv_bytes=None)
        assert (await pair.rollout(pair.request(max_tokens=200)))[0] == whole[0]

    pair.tell(story)


def test_new_weights_in_the_middle_of_a_turn(pair: Pair, model_folders: list[Path]) -> None:
    async def story(pair: Pair) -> None:
        old = pair.worker.status().version
        before = await pair.rollout(pair.request(max_tokens=40))
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=400)))
        await pair.until(lambda status: any(made >= 5 for _, made in status.live.values()))
        await pair.worker.stage("next", str(model_folders[1]))
        await pair.worker.commit("next")
        tokens, _, versions, reason = await turn
        swapped_at = versions.index("next")
        assert (reason, len(tokens), set(versions[:swapped_at])) == ("length", 400, {old})
        assert tokens[: min(40, swapped_at)] == before[0][: min(40, swapped_at)]
        hits = pair.worker.status().prefix_hit_tokens
        after = await pair.rollout(pair.request(max_tokens=40))
        assert pair.worker.status().prefix_hit_tokens == hits, "nothing of the old weights is found"
        wanted, wanted_logprobs = await pair.serving.answer(PROMPT, 40)
        assert after[0] == wanted != before[0]
        assert after[1] == pytest.approx(wanted_logprobs, abs=1e-4)

    pair.tell(story)


def test_a_grant_that_nobody_renews_closes_the_gate(pair: Pair) -> None:
    async def story() -> None:
        pair.worker.wish(until_s=time.monotonic() + 0.05)
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=900)))
        status = await pair.until(lambda status: status.state == "parked" and "grant is over" in status.why)
        assert not status.gate_open
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await pair.until(lambda status: status.running + status.waiting == 0)

    pair.runner.run(story())


def test_a_killed_serving_engine_closes_the_gate(pair: Pair, model_folders: list[Path], tmp_path: Path) -> None:
    async def story(pair: Pair) -> None:
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=900)))
        await pair.until(lambda status: status.running == 1)
        pair.serving.kill()
        status = await pair.until(lambda status: status.state == "parked")
        assert status.why == "the serving engine is gone"
        pair.serving = ServingEngine(model_folders[1], tmp_path / "log", port=pair.serving.port)
        await pair.serving.ready()
        pair.find_board()
        status = await pair.until(lambda status: status.why != "the serving engine is gone")
        assert "learning" in status.why
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)

    pair.tell(story)


def test_serving_outlives_a_killed_rollout_engine(pair: Pair) -> None:
    async def story() -> None:
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=900)))
        await pair.until(lambda status: status.waiting + status.running == 1)
        answer = asyncio.create_task(pair.serving.answer(PROMPT, 200))
        os.killpg(pair.process.process_id, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await turn
        assert len((await answer)[0]) == 200
        with pytest.raises(Unavailable):
            pair.worker.status()

    pair.runner.run(story())
