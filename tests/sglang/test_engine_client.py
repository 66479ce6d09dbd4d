"""The contract of every `EngineClient` on SGLang: the same stories as for our own engines.

Answers are greedy and log-probabilities equal to a few decimals, as for vLLM and for the same reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.test_engine_client import *  # noqa: F403 - the stories are collected here, with the `kind` below
from tests.sglang.engines import CONTEXT_TOKENS, rollout_engine
from tests.vllm.test_engine_client import VllmClients
from tests.vllm.test_engine_client import greedy as greedy

from rose.sglang.sglang_agent import SglangEngineClient
from rose.vllm.vllm_agent import VllmLending


class SglangClients(VllmClients):
    name = "sglang"

    async def _start(self) -> SglangEngineClient:
        sizes = {"max_context_tokens": CONTEXT_TOKENS, "max_sequences": 64, "step_tokens": 512}
        client = SglangEngineClient(VllmLending(rollout_engine(self._folder, **sizes)))
        await client.start()
        return client


@pytest.fixture(scope="module", params=["sglang"])
def kind(model_folders: list[Path]) -> Iterator[SglangClients]:
    clients = SglangClients(*model_folders)
    yield clients
    clients.close()
