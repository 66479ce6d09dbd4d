"""The two contracts of an engine; `tests/contract` holds a suite for each.

`StepEngine` is for engines whose loop we own (embedded, simulated): the loop plans a step, may look at the plan, and
runs it. Between two steps requests come, go or are evicted, and weights change. `EngineClient` is what the agent, a
device's servers and the gateway call, whatever runs behind it. An observer subscribes to its `events`.

An evicted request leaves a `Partial`. The same request with that partial continues where it stopped, on any engine of
the same weights: random numbers are keyed by (seed, position in the sequence), so the batch cannot change them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from rose.api.requests import STOP_TOKEN_IDS_MAX as STOP_TOKEN_IDS_MAX
from rose.api.requests import EngineFacts as EngineFacts
from rose.api.requests import FinishReason as FinishReason
from rose.api.requests import Partial as Partial
from rose.api.requests import Request as Request
from rose.api.requests import Sampling as Sampling
from rose.api.requests import TokenEvent as TokenEvent
from rose.core.facts import StepFeatures
from rose.core.history import ServingTimes
from rose.core.lending_state import LendingState, Residency
from rose.engines.token_stream import TokenSink
from rose.errors import Unavailable

Fact = TypeVar("Fact")


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one step."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request's part of a step: `context_tokens` are in the KV cache before; `samples` if it ends in a token.

    Of `scored_tokens` logits are computed too, for the log-probabilities of a prompt.
    """

    request_id: str
    new_tokens: int
    context_tokens: int
    samples: bool
    scored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, decided but not run. It may be dropped; any other call but `step` makes it stale."""

    number: int
    items: tuple[PlannedRequest, ...]
    preempted: tuple[str, ...] = ()

    @property
    def features(self) -> StepFeatures:
        new = kv_read = new_by_context = 0
        for item in self.items:
            new += item.new_tokens + item.scored_tokens  # a row of logits is about as much work as a token
            kv_read += item.context_tokens + item.new_tokens
            new_by_context += item.new_tokens * item.context_tokens + item.new_tokens * (item.new_tokens + 1) // 2
        return StepFeatures(new, kv_read, new_by_context, len(self.items))


@runtime_checkable
class StepEngine(Protocol):
    """An engine that runs only when called. Not thread-safe: one loop owns it."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused (ContextTooLong, QueueFull); a known id is refused."""

    def cancel(self, request_id: str) -> bool:
        """Forget a request at once; return whether it was here."""

    def evict(self, request_id: str) -> Partial:
        """Remove a request and return what it produced. Raises KeyError if it is not here."""

    def plan(self, budget: Budget) -> StepPlan | None:
        """Return the next step within the budget, or None if there is nothing to run. May preempt requests."""

    def step(self, plan: StepPlan) -> Sequence[TokenEvent]:
        """Run the newest plan. A stale plan is a bug (assert)."""

    def stage(self, version: str, source: Any) -> Any:
        """Prepare weights while steps go on, and return them for `swap`. Raises ModelError."""

    def swap(self, staged: Any) -> None:
        """Make staged weights current, between two steps. Requests in flight continue under them."""

    def limit_kv(self, blocks: int) -> Sequence[TokenEvent]:
        """Limit the blocks held from now on; return "abort" events of what no longer fits."""

    def facts(self) -> EngineFacts:
        """Return a snapshot; cheap."""


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """The results of one step."""

    events: tuple[TokenEvent, ...]
    facts: EngineFacts
    step_tokens: int = 0  # 0 when events came without a step (evictions)
    step_s: float = 0.0
    started: tuple[str, ...] = ()  # the requests that had been waiting until this step


class DryRunStatus(msgspec.Struct, frozen=True):
    """The share that lending would have given to rollouts in this time."""

    seconds: float
    tokens: int
    lent_s: float


class LendingStatus(msgspec.Struct, frozen=True):
    """The state of lending on a device. Counters only grow while the engine lives."""

    state: LendingState
    why: str  # the reason of the last decision, or why nothing is lent
    mode: str
    model: Residency
    model_bytes: int
    activation_s: float | None  # duration of the last one
    parking_s: float | None
    running: int
    waiting: int
    lent_steps: int
    lent_tokens: int
    lent_s: float
    evictions: int
    evicted_tokens: int  # computed, and thrown away by evictions
    breaches: dict[str, int]
    breaker_trips: int
    page_bytes: int
    pages: int
    rollout_pages: int
    rollout_pages_max: int
    serving_pages: int
    headroom_pages: int
    memory_state: str
    lending_stretch: float
    memory_share: float
    compute_share: float
    dry_run: DryRunStatus | None = None
    slack_s: float | None = None  # time that serving can spare now, of its share of the budgets
    is_resting: bool = False  # the circuit breaker has stopped lending for a while
    serving: ServingTimes | None = None  # its latencies now, and what lending adds
    shut_s: float | None = None  # time since admission let a step through (`core.admission_stalls`)
    ttft_budget_s: float | None = None  # serving's declared or assumed budgets
    tpot_budget_s: float | None = None


class Subscribers(Generic[Fact]):
    """The callbacks for every fact of one type. They run in the publisher's call, in order."""

    def __init__(self) -> None:
        self._callbacks: tuple[Callable[[Fact], None], ...] = ()

    def subscribe(self, callback: Callable[[Fact], None]) -> Callable[[], None]:
        """Add a callback, and return the function that removes it."""
        self._callbacks += (callback,)

        def unsubscribe() -> None:
            self._callbacks = tuple(known for known in self._callbacks if known is not callback)

        return unsubscribe

    def publish(self, fact: Fact) -> None:
        for callback in self._callbacks:
            callback(fact)


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """The events of an engine client. Subscriptions outlive a restart of the engine."""

    steps: Subscribers[Stepped] = field(default_factory=Subscribers)  # after the sinks have the step's tokens
    lending: Subscribers[LendingStatus | None] = field(default_factory=Subscribers)  # at every new status


@runtime_checkable
class EngineClient(Protocol):
    """One engine, wherever its process is and however often it is restarted.

    Without an engine every call raises Unavailable with the reason, and every waiting sink fails with it.
    """

    gave_up: asyncio.Future[Unavailable]  # set when there will be no engine any more

    @property
    def events(self) -> EngineEvents:
        """Return the events to subscribe to."""

    @property
    def facts(self) -> EngineFacts:
        """Return the newest facts, with counters over all engines so far."""

    @property
    def trouble(self) -> Unavailable | None:
        """Return why requests cannot be taken now, or None."""

    @property
    def lending_status(self) -> LendingStatus | None:
        """Return the newest known status of lending; None on a device that is not lent."""

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        """Queue requests; their events, and a later refusal, go to the sink.

        Raises Unavailable without an engine, QueueFull above the limit, RequestRefused for an id in use.
        """

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests: their sink gets nothing more. Unknown ids are skipped."""

    async def evict(self, request_id: str) -> None:
        """End a request with "abort", after everything it produced. Unknown ids are skipped."""

    async def stage(self, version: str, folder: str) -> None:
        """Load and verify weights from a folder beside the running ones. On failure nothing changes."""

    async def commit(self, version: str) -> None:
        """Swap to the staged version between two steps. Raises RequestRefused if it is not staged."""

    async def set_wanted(self, is_wanted: bool) -> None:
        """Say whether there is work for the rollout model of a lent device; others ignore it."""

    async def query(self) -> EngineFacts:
        """Ask the engine itself for its facts; a lent device sends its lending status with them."""

    async def close(self) -> None:
        """Stop for good: requests under way end with Unavailable."""
