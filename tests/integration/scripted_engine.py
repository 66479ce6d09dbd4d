"""An engine for tests of everything around the engine: real batching and queues, tokens by arithmetic, faults on order.

The token at position p is `(previous + p) % vocabulary` unless the prompt starts with one of the orders below.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose.config.server_settings import EngineSettings
from rose.engines.base import Budget, EngineFacts, Partial, Request, StepPlan, TokenEvent
from rose.engines.batch_scheduler import BatchScheduler, SchedulerLimits
from rose.engines.blocks import BlockPool
from rose.engines.live_request import Sampled
from rose.errors import ModelError

VOCABULARY = 264
CONTEXT_TOKENS = 4096
BLOCK_TOKENS = 16
CRASH = 201  # the first step with such a prompt raises
SLOW = 202  # every step with such a prompt takes this long
SLOW_STEP_S = 0.02
HANG = 203  # the first step with such a prompt never ends


class ScriptedEngine:
    def __init__(self, settings: EngineSettings) -> None:
        limits = SchedulerLimits(
            block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_TOKENS * 64,
            max_context_tokens=CONTEXT_TOKENS,
            max_sequences=settings.max_sequences,
            max_waiting=settings.max_waiting,
            vocabulary=VOCABULARY,
        )
        self._scheduler = BatchScheduler(limits, BlockPool(CONTEXT_TOKENS // BLOCK_TOKENS * 4), "v0")

    @classmethod
    def load(cls, folder: Path, *, settings: EngineSettings, device: str) -> ScriptedEngine:
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder", hint="make one with `rose model new`")
        return cls(settings)

    def add(self, request: Request) -> None:
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> bool:
        return self._scheduler.cancel(request_id)

    def evict(self, request_id: str) -> Partial:
        return self._scheduler.evict(request_id)

    def plan(self, budget: Budget) -> StepPlan | None:
        return self._scheduler.plan(budget)

    def step(self, plan: StepPlan) -> Sequence[TokenEvent]:
        rows = self._scheduler.begin(plan)
        orders = {row.request.prompt_ids[0] for row, _ in rows}
        if CRASH in orders:
            raise RuntimeError("ordered to crash")
        if orders & {SLOW, HANG}:
            time.sleep(3600 if HANG in orders else SLOW_STEP_S)
        for row, new in rows:
            if row.scores_prompt:
                following = row.token_ids[row.computed + 1 : row.computed + 1 + new]
                row.prompt_logprobs += [(-1.0, 1, _best(row.request.sampling.prompt_logprobs)) for _ in following]
        return self._scheduler.complete(plan, {row.request.request_id: _sample(row) for row, _ in rows})

    def stage(self, version: str, source: str) -> str:
        if not Path(source).is_dir():
            raise ModelError(f"{source} is not a folder")
        return version

    def swap(self, staged: str) -> None:
        self._scheduler.swap(staged)

    def limit_kv(self, blocks: int) -> Sequence[TokenEvent]:
        return self._scheduler.limit_kv(blocks)

    def facts(self) -> EngineFacts:
        return self._scheduler.facts()


def _sample(row: Any) -> Sampled:
    token_id = (row.token_ids[-1] + len(row.token_ids)) % VOCABULARY
    alternatives = tuple(
        ((token_id + rank) % VOCABULARY, -float(rank + 1)) for rank in range(row.request.sampling.top_logprobs)
    )
    return Sampled(token_id, -1.0, alternatives)


def _best(count: int) -> tuple[tuple[int, float], ...]:
    return tuple((token_id, -1.0 - token_id) for token_id in range(count))
