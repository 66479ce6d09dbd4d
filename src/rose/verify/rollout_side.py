"""Rollouts beside a serving engine: the engine client that `rose lend vllm` keeps, and turns that never run out."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rose.core.admission import Mode
from rose.core.slo import Budgets
from rose.engines.base import Request, Sampling
from rose.engines.token_stream import TokenStream
from rose.errors import RoseError, Unavailable
from rose.verify.kit_results import KitSettings
from rose.vllm.control_segment import Status
from rose.vllm.engine_process import RolloutEngineSettings
from rose.vllm.vllm_agent import VllmEngineClient, VllmLending

TURNS = 6  # at once
PROMPT_TOKENS, ANSWER_TOKENS = 40, 64
VOCABULARY = 250  # ids below this exist in every model
RETRY_S, POLL_S = 0.2, 0.02
ANSWER_S = 60.0  # as in `rose lend vllm`
ON_CPU: dict[str, Any] = {"max_context_tokens": 1024, "max_sequences": 8, "step_tokens": 128, "kv_memory_mb": 64}
ON_GPU: dict[str, Any] = {"max_context_tokens": 4096, "max_sequences": 16, "step_tokens": 256, "kv_memory_mb": 1024}


def rollout_engine(
    settings: KitSettings, model: Path, environment: dict[str, str] | None = None
) -> RolloutEngineSettings:
    """Return the settings of the kit's rollout engine."""
    sizes = ON_CPU if settings.is_cpu else ON_GPU
    return RolloutEngineSettings(
        model, settings.device, python=settings.vllm_python, environment=environment or {}, **sizes
    )


def lending_of(settings: KitSettings, engine: RolloutEngineSettings, serving_url: str, mode: Mode) -> VllmLending:
    """Return what is lent; without a serving address rollouts run whenever the device lets them."""
    budgets = Budgets(settings.ttft_ms / 1e3, settings.tpot_ms / 1e3, answer_s=ANSWER_S)
    return VllmLending(engine, serving_url, mode, budgets)


class RolloutSide:
    """One engine client and the turns that it runs."""

    def __init__(self, client: VllmEngineClient) -> None:
        self.client = client
        self._number = 0

    @property
    def status(self) -> Status:
        """Return the rollout engine's status. Raises Unavailable without an engine."""
        status = self.client.status
        if status is None:
            trouble = self.client.trouble
            raise Unavailable(trouble.what if trouble is not None else "there is no rollout engine")
        return status

    @property
    def group(self) -> int:
        """Return the process group of the rollout engine, which has all its processes."""
        return os.getpgid(self.status.process_id)

    async def set_mode(self, mode: Mode) -> None:
        """Lend in another mode from the next grant on."""
        self.client.lending = dataclasses.replace(self.client.lending, mode=mode)
        await self.client.adopt(self.client.desired)

    @asynccontextmanager
    async def turning(
        self, count: int = TURNS, prompt_tokens: int = PROMPT_TOKENS, tokens: int = ANSWER_TOKENS
    ) -> AsyncIterator[None]:
        """Keep so many turns under way, each followed by another."""
        tasks = [asyncio.create_task(self._turns(number, prompt_tokens, tokens)) for number in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _turns(self, place: int, prompt_tokens: int, tokens: int) -> None:
        while True:
            self._number += 1
            prompt = [(place * 7 + self._number + token) % VOCABULARY for token in range(prompt_tokens)]
            try:
                await self.answer(prompt, tokens, temperature=1.0)
            except RoseError:
                await asyncio.sleep(RETRY_S)

    async def answer(self, prompt: Sequence[int], tokens: int, temperature: float = 0.0) -> list[int]:
        """Return the tokens of one turn. Raises RoseError."""
        self._number += 1
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=self._number)
        request, stream = Request(f"turn-{self._number}", tuple(prompt), sampling), TokenStream()
        self.client.submit([request], stream)
        answer: list[int] = []
        try:
            while True:
                for event in await stream.take():
                    answer += event.token_ids
                    if event.finish_reason is not None:
                        return answer
        finally:
            self.client.cancel([request.request_id])

    async def until(self, is_so: Callable[[Status], bool], seconds_max: float, what: str) -> float:
        """Wait for a state of the engine and return how long it took. Raises Unavailable with the engine's reason."""
        began_s = time.monotonic()
        while True:
            status = self.client.status
            if status is not None and is_so(status):
                return time.monotonic() - began_s
            if time.monotonic() - began_s > seconds_max:
                trouble = self.client.trouble
                why = status.why if status is not None else trouble.what if trouble is not None else "no engine"
                raise Unavailable(f"{what} did not come within {seconds_max:g} s: {why}")
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        await self.client.close()
