"""The contract of every `EngineClient` on vLLM: the same stories as for our own engines.

vLLM's arithmetic depends on the batch, so here answers are greedy, and log-probabilities equal to a few decimals. What
the stories take for granted of random numbers does not hold: a turn that goes on elsewhere draws new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract import test_engine_client as contract
from tests.contract.engine_clients import START_VERSION, ClientKind, Story
from tests.contract.kinds import CONTEXT_TOKENS, Output, ask
from tests.contract.test_engine_client import *  # noqa: F403 - the stories are collected here, with the `kind` below
from tests.vllm.engines import rollout_engine

from rose.vllm.vllm_agent import VllmEngineClient, VllmLending


class VllmClients(ClientKind):
    """One engine for all stories that leave it whole: see conftest.py for their order."""

    name = "vllm"

    def __init__(self, folder: Path, other_folder: Path) -> None:
        self.weights, self.bad_weights = str(other_folder), str(folder / "nowhere")
        self._folder = folder
        self._runner = asyncio.Runner()
        self._shared: VllmEngineClient | None = None

    def tell(self, story: Story) -> None:
        self._runner.run(self._tell(story))

    def tell_once(self, story: Story) -> None:
        self.close_shared()
        self._runner.run(self._tell_once(story))

    def kill(self, client: Any) -> None:
        client._process.kill()

    def close_shared(self) -> None:
        """End the shared engine: one core has no room for two."""
        if self._shared is not None:
            self._runner.run(self._shared.close())
            self._shared = None

    def close(self) -> None:
        self.close_shared()
        self._runner.close()

    async def _tell(self, story: Story) -> None:
        client = self._shared = self._shared or await self._start()
        async with asyncio.timeout(120):
            await client.stage(START_VERSION, str(self._folder))
            await client.commit(START_VERSION)
            await story(client)

    async def _tell_once(self, story: Story) -> None:
        client = await self._start()
        try:
            async with asyncio.timeout(120):
                await story(client)
        finally:
            await client.close()

    async def _start(self) -> VllmEngineClient:
        sizes = {"max_context_tokens": CONTEXT_TOKENS, "max_sequences": 64, "step_tokens": 512}
        client = VllmEngineClient(VllmLending(rollout_engine(self._folder, **sizes)))
        await client.start()
        return client


@pytest.fixture(scope="module", params=["vllm"])
def kind(model_folders: list[Path]) -> Iterator[VllmClients]:
    clients = VllmClients(*model_folders)
    yield clients
    clients.close()


@pytest.fixture(autouse=True)
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(one: Output, other: Output) -> bool:
        whole = (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        return whole and one.logprobs == pytest.approx(other.logprobs, abs=1e-3)

    monkeypatch.setattr(contract, "ask", lambda *words, **more: ask(*words, **{"temperature": 0.0, **more}))
    monkeypatch.setattr(Output, "same_as", same)
