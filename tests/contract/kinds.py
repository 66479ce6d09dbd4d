"""The engines that the contract suites run on, and the few words the suites are written in.

To put another engine under contract, add its kind here; nothing in the suites names an engine.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rose.api.requests import VersionSpan
from rose.engines.base import Budget, Partial, Request, Sampling, StepEngine, StepPlan, TokenEvent
from rose.engines.blocks import BlockPool
from rose.engines.profiles import StepProfile
from rose.engines.simulated import SimulatedEngine

WIDE = Budget(512, 64)
VOCABULARY = 264
EOS_TOKEN_ID = 256
CONTEXT_TOKENS = 1024
KV_BYTES = 16 << 20
PAGE_BLOCKS = 4

MILLISECONDS = StepProfile(
    name="milliseconds",
    what="about what a tiny model takes on a core",
    shape="sum",
    fixed_s=1e-3,
    per_new_token_s=1e-4,
    per_kv_read_token_s=1e-6,
    per_new_by_context_s=1e-8,
    per_sequence_s=1e-5,
    kv_bytes_per_token=4096,
    kv_memory_bytes=KV_BYTES,
    block_tokens=16,
    max_context_tokens=CONTEXT_TOKENS,
    source={"all": "made up for tests"},
)


@dataclass(frozen=True)
class EngineKind:
    """How to get a fresh engine, and weights for it."""

    name: str
    make: Callable[..., StepEngine]  # (max_sequences=, max_waiting=)
    weights: str
    bad_weights: str

    def fresh(self, *, kv_blocks: int | None = None, max_sequences: int = 16, max_waiting: int = 64) -> StepEngine:
        engine = self.make(max_sequences=max_sequences, max_waiting=max_waiting)
        if kv_blocks is not None:
            assert not engine.limit_kv(kv_blocks)
        return engine

    def swap(self, engine: StepEngine, version: str) -> None:
        engine.swap(engine.stage(version, self.weights))

    def alone(self, request: Request) -> Output:
        """What an undisturbed engine makes of this request."""
        return self._alone(replace(request, request_id="alone", tenant="", priority=0, partial=Partial()))

    @functools.cache  # noqa: B019 - a kind lives as long as the session
    def _alone(self, request: Request) -> Output:
        engine = self.fresh()
        engine.add(request)
        return run(engine)[request.request_id]


def simulated_kind() -> EngineKind:
    def make(*, max_sequences: int, max_waiting: int) -> StepEngine:
        return SimulatedEngine(
            MILLISECONDS,
            pool=BlockPool(MILLISECONDS.kv_blocks, blocks_per_page=PAGE_BLOCKS),
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            vocabulary=VOCABULARY,
            eos_token_ids=[EOS_TOKEN_ID],
        )

    return EngineKind("simulated", make, "anywhere", "")


@dataclass(eq=False)
class Output:
    """Everything one request has said so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # of each token
    finish_reason: str | None = None
    cached_tokens: int | None = None
    begun: bool = False  # on the engine it is on now

    def take(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, "an event after the last one"
        assert len(event.token_ids) == len(event.logprobs)
        assert (event.cached_tokens is None) == (self.begun or not event.token_ids)
        if event.cached_tokens is not None:
            self.cached_tokens, self.begun = event.cached_tokens, True
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.versions += [event.version] * len(event.token_ids)
        self.finish_reason = event.finish_reason

    def partial(self) -> Partial:
        """What a client can hand to another engine."""
        spans: list[VersionSpan] = []
        for index, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = replace(spans[-1], end=index + 1)
            else:
                spans.append(VersionSpan(version, index, index + 1))
        return Partial(tuple(self.token_ids), tuple(self.logprobs), tuple(spans))

    def goes_on(self) -> None:
        """Another engine takes over, or the same one again."""
        self.finish_reason, self.begun = None, False

    def then(self, later: Output) -> Output:
        """This, cut short, and what came of it elsewhere."""
        return Output(
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            self.versions + later.versions,
            later.finish_reason,
            self.cached_tokens,
        )

    def same_as(self, other: Output) -> bool:
        return (self.token_ids, self.logprobs, self.finish_reason) == (
            other.token_ids,
            other.logprobs,
            other.finish_reason,
        )


def ask(
    request_id: str = "a",
    prompt_tokens: int = 24,
    *,
    prompt: int = 0,
    tenant: str = "",
    priority: int = 0,
    max_tokens: int = 12,
    **sampling: Any,
) -> Request:
    """A request for a prompt of this length; equal `prompt` numbers begin alike."""
    ids = random.Random(prompt).choices(range(3, 90), k=prompt_tokens)
    settings = Sampling(**{"seed": 7, "ignore_eos": True, "max_tokens": max_tokens, **sampling})
    return Request(request_id, tuple(ids), settings, tenant=tenant, priority=priority)


def many(count: int, prompt_tokens: int = 24, max_tokens: int = 12) -> list[Request]:
    """Requests of different prompts, lengths and seeds."""
    return [
        ask(f"r{i}", prompt_tokens + 5 * i, prompt=i, max_tokens=max_tokens + 3 * (i % 4), seed=i) for i in range(count)
    ]


def collect(outputs: dict[str, Output], events: Iterable[TokenEvent]) -> None:
    for event in events:
        outputs.setdefault(event.request_id, Output()).take(event)


def step_once(engine: StepEngine, outputs: dict[str, Output], budget: Budget = WIDE) -> StepPlan | None:
    plan = engine.plan(budget)
    if plan is not None:
        collect(outputs, engine.step(plan))
    return plan


def run(
    engine: StepEngine, budget: Budget = WIDE, *, steps: int = 10_000, outputs: dict[str, Output] | None = None
) -> dict[str, Output]:
    """Step until there is nothing to run, or so many times; returns what was said."""
    outputs = {} if outputs is None else outputs
    while steps > 0 and step_once(engine, outputs, budget) is not None:
        steps -= 1
    return outputs


def embedded_kind(folder: Path, other_folder: Path) -> EngineKind:
    from rose.config.server_settings import EngineSettings
    from rose.engines.embedded.engine import MIB, EmbeddedEngine
    from rose.engines.embedded.runner import KvMemory, own_memory
    from rose.models.model_folder import served_spec

    def make(*, max_sequences: int, max_waiting: int) -> StepEngine:
        settings = EngineSettings(
            kv_memory_mb=KV_BYTES // MIB,
            max_context_tokens=CONTEXT_TOKENS,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
        )
        plain = own_memory(served_spec(folder), KV_BYTES)
        memory = KvMemory(plain.floats, BlockPool(plain.pool.capacity, blocks_per_page=PAGE_BLOCKS))
        return EmbeddedEngine.load(folder, settings, device=first_core(), memory=memory)

    return EngineKind("embedded", make, str(other_folder), str(folder / "nowhere"))


def gather(engine: Any, pages: int, blocks_max: int) -> int:
    """Move blocks together, and what is in them, between two steps; how many."""
    moves = engine.scheduler.gather(pages, blocks_max)
    if hasattr(engine, "_kv"):
        from rose.engines.embedded.runner import KvMemory

        KvMemory(engine._kv, engine.scheduler.pool).copy(moves)
    return len(moves)


def first_core() -> str:
    return f"cpu:{min(os.sched_getaffinity(0))}"
