"""The two seams behind which every engine stands.

`StepEngine` is for engines whose loop we own (embedded, simulated): somebody plans a step, may look at the
plan and its features before running it, and then runs it. Between two steps anything may happen: requests
come, go, are evicted, weights change.

`Worker` is what the rest of ROSE talks to, whatever runs behind it (embedded, simulated, vLLM). It is
asynchronous and speaks of requests and tokens, never of steps; its compute is bounded from outside by
grants that expire, its memory by a KV budget.

Both speak the same frozen values; structs, since every turn makes, sends and reads some. A request that was
evicted leaves a `Partial` behind; the same request with that partial, given to any other engine of the same
weights, goes on where it stopped: random numbers are keyed by (seed, position in the sequence), so neither
the batch nor the place can change them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from rose.bounds import (
    Count,
    Finite,
    Label,
    LogProbabilities,
    NonNegative,
    Priority,
    Serial,
    Share,
    Text,
    TokenId,
    TokenIds,
    VersionName,
)
from rose.core.facts import StepFeatures

STOP_TOKEN_IDS_MAX = 4096  # a request names a few; some clients send all control tokens of a vocabulary
SPANS_MAX = 4096  # versions that one answer can go through

FinishReason = Literal["stop", "length", "abort"]


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is drawn. `temperature` 0 is greedy; `top_k` 0 means off."""

    temperature: NonNegative = 1.0
    top_p: Share = 1.0
    top_k: Count = 0
    min_p: Share = 0.0
    repetition_penalty: NonNegative = 1.0
    max_tokens: Count = 16  # of the whole answer, what an earlier engine produced included
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=STOP_TOKEN_IDS_MAX)] = ()
    seed: Serial = 0
    top_logprobs: Count = 0  # alternatives reported beside the sampled token


class Span(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled under these weights."""

    version: VersionName
    start: Count
    end: Count


class Partial(msgspec.Struct, frozen=True):
    """What a request has produced so far, on this engine and before; enough to go on elsewhere."""

    token_ids: TokenIds = ()
    logprobs: LogProbabilities = ()
    spans: Annotated[tuple[Span, ...], Meta(max_length=SPANS_MAX)] = ()


class Request(msgspec.Struct, frozen=True):
    """One completion of one prompt. `partial` is what an earlier engine already produced of it."""

    request_id: Text
    prompt_ids: TokenIds
    sampling: Sampling = Sampling()
    tenant: Label = ""  # salt of the prefix cache: tenants never share blocks
    priority: Priority = 0  # lower runs first
    arrival_s: Finite = 0.0
    partial: Partial = Partial()

    def named(self, request_id: str, partial: Partial | None = None) -> Request:
        """The same under another name, going on from there."""
        went_on = partial if partial is not None else self.partial
        return Request(request_id, self.prompt_ids, self.sampling, self.tenant, self.priority, self.arrival_s, went_on)


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one request; the last event of a request carries its finish reason.

    `cached_tokens` is set on the first event only. A stop token is delivered, as the last one. On "abort" the
    tokens of all events so far are valid. A struct, since one is made, sent and read per token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    finish_reason: FinishReason | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached_tokens: int | None = None
    workers: tuple[str, ...] = ()  # of a pool, those that made these tokens; one engine does not say


@dataclass(frozen=True, slots=True)
class Budget:
    """The most one step may do."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`context_tokens` are in the KV cache before the step; `samples` if the step ends in a new token."""

    request_id: str
    new_tokens: int
    context_tokens: int
    samples: bool


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
            new += item.new_tokens
            kv_read += item.context_tokens + item.new_tokens
            new_by_context += item.new_tokens * item.context_tokens + item.new_tokens * (item.new_tokens + 1) // 2
        return StepFeatures(new, kv_read, new_by_context, len(self.items))


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """A snapshot of one engine; counters only grow."""

    version: str
    running: int
    waiting: int
    kv_blocks_limit: int
    kv_blocks_used: int  # referenced by requests
    kv_blocks_cached: int  # not referenced, kept for prefix hits
    block_tokens: int
    block_bytes: int
    max_context_tokens: int
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    batch_invariant: bool = True  # tokens do not depend on batching, chunking, prefix hits or preemption


@runtime_checkable
class StepEngine(Protocol):
    """An engine that does nothing by itself. Not thread-safe: one loop owns it."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused (ContextTooLong, QueueFull); a known id is refused."""

    def cancel(self, request_id: str) -> bool:
        """Forget a request at once; False if it is not here."""

    def evict(self, request_id: str) -> Partial:
        """Take a request out and hand back what it produced. KeyError if it is not here."""

    def plan(self, budget: Budget) -> StepPlan | None:
        """The next step within the budget, or None if there is nothing to run. May preempt, never loses."""

    def step(self, plan: StepPlan) -> Sequence[TokenEvent]:
        """Run the newest plan. A stale plan is a bug (assert)."""

    def stage(self, version: str, source: Any) -> Any:
        """Prepare weights while steps go on; the result is for `swap`. Raises ModelError."""

    def swap(self, staged: Any) -> None:
        """Make staged weights current, between two steps. Requests in flight go on under them."""

    def limit_kv(self, blocks: int) -> Sequence[TokenEvent]:
        """Hold at most this many blocks from now on; what no longer fits is evicted ("abort" events)."""

    def facts(self) -> EngineFacts:
        """A snapshot; cheap."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker reports in a heartbeat."""

    engine: EngineFacts
    gate_open: bool
    staged_version: str | None = None


@runtime_checkable
class Worker(Protocol):
    """One engine as the rest of ROSE sees it. The gate is closed until the first grant."""

    def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Events of one request, in order, the last with a finish reason; queued at the first iteration.

        Closing the iterator cancels.
        """

    async def evict(self, request_id: str) -> None:
        """End a request with "abort"; its iterator still yields everything produced so far."""

    async def cancel(self, request_id: str) -> None:
        """Forget a request; its iterator ends without another event."""

    async def grant(self, tokens: int, sequences: int, until_s: float) -> None:
        """Allow steps of this size until then, by the worker's clock; replaces the last grant. 0 tokens closes."""

    async def kv_budget(self, budget_bytes: int) -> None:
        """Hold at most this much KV memory; what no longer fits is evicted."""

    async def stage(self, version: str, source: str) -> None:
        """Load and verify weights from a folder beside the running ones. On failure nothing changes."""

    async def commit(self, version: str) -> None:
        """Swap to the staged version between two steps. Raises RequestRefused if it is not staged."""

    async def facts(self) -> WorkerFacts: ...

    async def close(self) -> None: ...
