"""Continuous batching: everything a step engine decides, and nothing it computes.

Requests wait in order of arrival, run until they stop, and may be put back. A priority moves a request forwards or
backwards in that order, by a bounded number of places: a request that waits is overtaken only so often, and none
starves. A step takes one new token of every request that is decoding and fills what is left of the token budget with
pieces of prompts (chunked prefill), oldest first. If it holds fewer than run, those served longest ago go first.

A request is let in only when blocks for all its known tokens are there, and only if it could finish alone
within the KV limit; so when blocks run out while decoding, putting back the youngest always helps, and the
oldest always finishes. What is put back is recomputed later, from whatever the prefix cache still holds.

An engine calls `plan`, computes, and gives the sampled tokens to `complete`. All our engines share this class.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from rose.engines.base import (
    Budget,
    EngineFacts,
    FinishReason,
    Partial,
    PlannedRequest,
    Request,
    Span,
    StepPlan,
    TokenEvent,
)
from rose.engines.blocks import BlockPool, block_digest, root_digest
from rose.errors import ContextTooLong, QueueFull, RequestRefused, Unavailable

PRIORITY_PLACES = 64  # places in the queue that one level of priority is worth
PRIORITY_LEVELS = 128  # up and down; further ones count as the last, so at most 16,384 later requests go first
PRIORITY_TURNS = 8  # levels by which one running request goes before another that was served longer ago
GONE_KEPT = 64  # entries in the queue of requests that are gone: so many are cheaper to skip than to take out


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token an engine drew for one request in one step."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request and how far it has come. `computed` tokens are in the KV cache, in `blocks`."""

    request: Request
    order: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    findable: bool = True  # False while it holds KV of older weights
    running: bool = False
    reported_cached: bool = False
    cached_tokens: int = 0
    last_planned: int = 0
    slot: int = -1  # in [0, max_sequences) and its own while running
    prepared_blocks: int = 0  # for the engine: how many of `blocks` it has made ready
    has_moved: bool = False  # for the engine: some of those are others now, with the same content

    @property
    def key(self) -> tuple[int, int]:
        """Place in the queue: lower runs first."""
        return (self.order + PRIORITY_PLACES * _level(self.request.priority, PRIORITY_LEVELS), self.order)

    @property
    def turn(self) -> tuple[int, int]:
        """Place among the running requests if a step cannot hold all of them: lower runs first."""
        return (self.last_planned + _level(self.request.priority, PRIORITY_TURNS), self.order)

    @property
    def produced(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def most_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    def partial(self) -> Partial:
        return Partial(tuple(self.token_ids[len(self.request.prompt_ids) :]), tuple(self.logprobs), tuple(self.spans))


def _level(priority: int, most: int) -> int:
    return max(-most, min(most, priority))


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine can hold."""

    block_tokens: int
    block_bytes: int
    max_context_tokens: int
    max_sequences: int
    max_waiting: int
    vocabulary: int
    eos_token_ids: frozenset[int] = frozenset()


class BatchScheduler:
    """Owns the queues and the block pool of one engine. Not thread-safe."""

    def __init__(self, limits: Limits, pool: BlockPool, version: str) -> None:
        self.limits = limits
        self.pool = pool
        self.version = version
        self.running: list[LiveRequest] = []
        self.planned: list[tuple[LiveRequest, int]] = []  # of the newest plan, in its order
        self._free_slots = list(range(limits.max_sequences))
        self._sequences: dict[str, LiveRequest] = {}
        self._waiting: list[tuple[tuple[int, int], LiveRequest]] = []  # a heap; gone ones are skipped
        self._waiting_count = 0
        self._next_order = 0
        self._plan_number = 0
        self._plan_is_fresh = False
        self._preemptions = self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._prefix_query_tokens = self._prefix_hit_tokens = 0

    def add(self, request: Request) -> None:
        self._check(request)
        partial = request.partial
        sequence = LiveRequest(
            request,
            self._next_order,
            [*request.prompt_ids, *partial.token_ids],
            list(partial.logprobs),
            list(partial.spans),
        )
        self._next_order += 1
        self._sequences[request.request_id] = sequence
        self._enqueue(sequence)
        self._plan_is_fresh = False

    def cancel(self, request_id: str) -> bool:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def evict(self, request_id: str) -> Partial:
        sequence = self._sequences[request_id]
        self._remove(sequence)
        return sequence.partial()

    def swap(self, version: str) -> None:
        """Requests in flight keep their KV, but nothing that depends on it can be found any more."""
        self.version = version
        self.pool.forget_digests()
        for sequence in self.running:
            sequence.findable = False
        self._plan_is_fresh = False

    def limit_kv(self, blocks: int) -> list[TokenEvent]:
        """Least work lost first: the requests that hold the fewest computed tokens go first."""
        self.pool.set_limit(blocks)
        self._plan_is_fresh = False
        victims = [s for s in self._sequences.values() if self._blocks_for(s.most_tokens) > self.pool.limit]
        events = [self._abort(sequence) for sequence in victims]
        by_loss = sorted(self.running, key=lambda s: (s.computed, -s.order), reverse=True)
        while self.pool.used > self.pool.limit and by_loss:
            events.append(self._abort(by_loss.pop()))
        return events

    def gather(self, pages: int, blocks_max: int) -> dict[int, int]:
        """Move requests' blocks together so that this many pages hold none, if that takes no more moves than this.

        {from: to}. Whoever calls it copies these blocks before anything else happens. Plans stay good.
        """
        moves = self.pool.gather(pages, blocks_max)
        for sequence in self.running if moves else ():
            renamed = [moves.get(block, block) for block in sequence.blocks]
            sequence.has_moved |= renamed != sequence.blocks
            sequence.blocks = renamed
        return moves

    def plan(self, budget: Budget) -> StepPlan | None:
        self._plan_number += 1
        self.planned = []
        preempted: list[str] = []
        left = self._plan_running(budget, preempted)
        if not preempted:
            self._plan_waiting(budget, left)
        self._plan_is_fresh = True
        if not self.planned and not preempted:
            return None
        items = tuple(
            PlannedRequest(s.request.request_id, new, s.computed, s.computed + new == len(s.token_ids))
            for s, new in self.planned
        )
        return StepPlan(self._plan_number, items, tuple(preempted))

    def begin(self, plan: StepPlan) -> list[tuple[LiveRequest, int]]:
        """The sequences of the newest plan, in its order; anything else is a bug."""
        assert self._plan_is_fresh and plan.number == self._plan_number, f"plan {plan.number} is stale"
        self._plan_is_fresh = False
        return self.planned

    def complete(self, plan: StepPlan, samples: Mapping[str, Sampled]) -> list[TokenEvent]:
        """Account for a step that was run: `samples` holds a token for every item that samples."""
        self._steps += 1
        events = []
        for (sequence, new_tokens), item in zip(self.planned, plan.items, strict=True):
            before, sequence.computed = sequence.computed, sequence.computed + new_tokens
            self._prompt_tokens += max(0, min(sequence.computed, len(sequence.request.prompt_ids)) - before)
            self._publish_full_blocks(sequence)
            if item.samples:
                events.append(self._append(sequence, samples[item.request_id]))
        self.planned = []
        return events

    def waiting(self, most: int) -> list[LiveRequest]:
        """The first of those that wait, in the order in which they will be let in. However many wait behind them."""
        heap, found = self._waiting, list[LiveRequest]()
        edge = [(heap[0][0], 0)] if heap else []  # of the heap's tree: those above it have been looked at
        while edge and len(found) < most:
            _, place = heapq.heappop(edge)
            if self._is_waiting(heap[place][1]):
                found.append(heap[place][1])
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heapq.heappush(edge, (heap[below][0], below))
        return found

    def has_work(self) -> bool:
        return bool(self._sequences)

    def sequence(self, request_id: str) -> LiveRequest:
        return self._sequences[request_id]

    def facts(self) -> EngineFacts:
        return EngineFacts(
            version=self.version,
            running=len(self.running),
            waiting=self._waiting_count,
            kv_blocks_limit=self.pool.limit,
            kv_blocks_used=self.pool.used,
            kv_blocks_cached=self.pool.cached,
            block_tokens=self.limits.block_tokens,
            block_bytes=self.limits.block_bytes,
            max_context_tokens=self.limits.max_context_tokens,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
        )

    def check(self) -> None:
        """Every block a sequence holds is referenced by it, and by nobody who does not hold it."""
        self.pool.check()
        held = [0] * self.pool.capacity
        assert len({s.slot for s in self.running} | set(self._free_slots)) == self.limits.max_sequences
        for sequence in self._sequences.values():
            assert sequence.running == (sequence in self.running)
            assert sequence.running or not sequence.blocks, "a waiting request holds blocks"
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            assert self._blocks_for(sequence.computed) <= len(sequence.blocks)
            for block in sequence.blocks:
                held[block] += 1
        assert held == self.pool.references, "references and owners disagree"
        assert self._waiting_count == sum(not s.running for s in self._sequences.values())

    # Admission of requests

    def _check(self, request: Request) -> None:
        sampling, limits = request.sampling, self.limits
        if request.request_id in self._sequences:
            raise RequestRefused(f"request id {request.request_id!r} is already in use")
        if not request.prompt_ids:
            raise RequestRefused("the prompt is empty", hint="send at least one token")
        if sampling.max_tokens <= len(request.partial.token_ids):
            raise RequestRefused(f"max_tokens {sampling.max_tokens} leaves nothing to generate")
        most = len(request.prompt_ids) + sampling.max_tokens
        if most > limits.max_context_tokens:
            raise ContextTooLong(
                f"the prompt has {len(request.prompt_ids)} tokens and max_tokens is {sampling.max_tokens}, "
                f"together more than the context of {limits.max_context_tokens}",
                hint="shorten the prompt or lower max_tokens",
            )
        needed = self._blocks_for(most)
        if needed > self.pool.capacity:
            raise RequestRefused(
                f"{most} tokens need {needed} KV blocks and this engine has {self.pool.capacity}",
                hint="lower max_tokens or raise the engine's KV memory",
            )
        if needed > self.pool.limit:
            what = f"{most} tokens need {needed} KV blocks and this engine may hold {self.pool.limit} now"
            raise Unavailable(what, hint="send it again later, or elsewhere")
        for ids in (request.prompt_ids, request.partial.token_ids):
            if ids and not (min(ids) >= 0 and max(ids) < limits.vocabulary):
                raise RequestRefused(f"token ids must be in [0, {limits.vocabulary})")
        free_seats = limits.max_sequences - len(self.running)
        if self._waiting_count >= limits.max_waiting + free_seats:
            raise QueueFull(f"{self._waiting_count} requests are waiting already", hint="retry a little later")

    def _enqueue(self, sequence: LiveRequest) -> None:
        sequence.running = False
        heapq.heappush(self._waiting, (sequence.key, sequence))
        self._waiting_count += 1

    def _peek_waiting(self) -> LiveRequest | None:
        while self._waiting:
            sequence = self._waiting[0][1]
            if self._is_waiting(sequence):
                return sequence
            heapq.heappop(self._waiting)
        return None

    def _is_waiting(self, sequence: LiveRequest) -> bool:
        """The heap also holds those that were cancelled or evicted while they waited."""
        return self._sequences.get(sequence.request.request_id) is sequence and not sequence.running

    # Planning

    def _plan_running(self, budget: Budget, preempted: list[str]) -> Budget:
        """Decodes first, then prompts under way; returns what is left of the budget."""
        tokens, seats = budget.tokens, budget.sequences
        order = self.running
        if len(order) > min(tokens, seats):
            order = sorted(order, key=lambda s: s.turn)
        decoding = [s for s in order if len(s.token_ids) - s.computed == 1]
        prefilling = [s for s in order if len(s.token_ids) - s.computed != 1]
        for sequence in [*decoding, *prefilling]:
            if tokens <= 0 or seats <= 0:
                break
            if not sequence.running:  # preempted a moment ago
                continue
            new = min(len(sequence.token_ids) - sequence.computed, tokens)
            if not self._grow(sequence, sequence.computed + new, preempted):
                continue
            self._put_in_plan(sequence, new)
            tokens, seats = tokens - new, seats - 1
        self.planned = [(s, new) for s, new in self.planned if s.running]
        return Budget(budget.tokens - sum(new for _, new in self.planned), budget.sequences - len(self.planned))

    def _plan_waiting(self, budget: Budget, left: Budget) -> None:
        tokens, seats = left.tokens, left.sequences
        while tokens > 0 and seats > 0 and len(self.running) < self.limits.max_sequences:
            sequence = self._peek_waiting()
            if sequence is None or not self._admit(sequence):
                return
            new = min(len(sequence.token_ids) - sequence.computed, tokens)
            self._put_in_plan(sequence, new)
            tokens, seats = tokens - new, seats - 1

    def _put_in_plan(self, sequence: LiveRequest, new_tokens: int) -> None:
        sequence.last_planned = self._plan_number
        self.planned.append((sequence, new_tokens))

    def _admit(self, sequence: LiveRequest) -> bool:
        """Give a waiting request its cached prefix and blocks for the rest, or nothing at all."""
        digests, found = self._cached_prefix(sequence)
        for block in found:
            self.pool.take(block)
        fresh = None
        try:
            fresh = self.pool.allocate(self._blocks_for(len(sequence.token_ids)) - len(found))
        finally:  # where pages come from may raise
            if fresh is None:
                self.pool.release(found)
        if fresh is None:
            return False
        heapq.heappop(self._waiting)
        self._waiting_count -= 1
        hit = len(found) * self.limits.block_tokens
        sequence.blocks, sequence.digests, sequence.computed = found + fresh, digests, hit
        sequence.findable, sequence.running = True, True
        sequence.slot, sequence.prepared_blocks = self._free_slots.pop(), len(found)
        if not sequence.reported_cached:
            sequence.cached_tokens = hit
        self._prefix_query_tokens += len(sequence.token_ids)
        self._prefix_hit_tokens += hit
        self.running.append(sequence)
        return True

    def _cached_prefix(self, sequence: LiveRequest) -> tuple[list[bytes], list[int]]:
        """Whole blocks only, and never the last token: its logits must be computed."""
        size, ids = self.limits.block_tokens, sequence.token_ids
        digest = root_digest(sequence.request.tenant, self.version)
        digests: list[bytes] = []
        blocks: list[int] = []
        for start in range(0, (len(ids) - 1) // size * size, size):
            digest = block_digest(digest, ids[start : start + size])
            block = self.pool.find(digest)
            if block is None:
                break
            digests.append(digest)
            blocks.append(block)
        return digests, blocks

    def _grow(self, sequence: LiveRequest, tokens: int, preempted: list[str]) -> bool:
        """Blocks for this many tokens, putting back younger requests if need be."""
        missing = self._blocks_for(tokens) - len(sequence.blocks)
        while missing > 0:
            fresh = self.pool.allocate(missing)
            if fresh is not None:
                sequence.blocks.extend(fresh)
                return True
            victim = max(self.running, key=lambda s: s.key)
            self._preempt(victim)
            preempted.append(victim.request.request_id)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: LiveRequest) -> None:
        self._release(sequence)
        self._enqueue(sequence)
        self._preemptions += 1

    # Results

    def _append(self, sequence: LiveRequest, sampled: Sampled) -> TokenEvent:
        sequence.token_ids.append(sampled.token_id)
        sequence.logprobs.append(sampled.logprob)
        self._extend_spans(sequence)
        self._generated_tokens += 1
        finish = self._finish_reason(sequence, sampled.token_id)
        cached = None if sequence.reported_cached else sequence.cached_tokens
        sequence.reported_cached = True
        if finish:
            self._remove(sequence)
        return TokenEvent(
            sequence.request.request_id,
            (sampled.token_id,),
            (sampled.logprob,),
            self.version,
            finish,
            (sampled.top_logprobs,) if sampled.top_logprobs else (),
            cached,
        )

    def _extend_spans(self, sequence: LiveRequest) -> None:
        end = sequence.produced
        last = sequence.spans[-1] if sequence.spans else None
        if last is not None and last.version == self.version:
            sequence.spans[-1] = Span(self.version, last.start, end)
        else:
            sequence.spans.append(Span(self.version, end - 1, end))

    def _finish_reason(self, sequence: LiveRequest, token_id: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        if sequence.produced >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                return "stop"
            if token_id in self.limits.eos_token_ids and not sampling.ignore_eos:
                return "stop"
        return "length" if sequence.produced >= sampling.max_tokens else None

    def _publish_full_blocks(self, sequence: LiveRequest) -> None:
        size = self.limits.block_tokens
        full = sequence.computed // size
        if not sequence.findable or full <= len(sequence.digests):
            return
        for index in range(len(sequence.digests), full):
            parent = sequence.digests[-1] if index else root_digest(sequence.request.tenant, self.version)
            digest = block_digest(parent, sequence.token_ids[index * size : (index + 1) * size])
            sequence.digests.append(digest)
            self.pool.publish(sequence.blocks[index], digest)

    def _abort(self, sequence: LiveRequest) -> TokenEvent:
        self._remove(sequence)
        return TokenEvent(sequence.request.request_id, (), (), self.version, "abort")

    def _remove(self, sequence: LiveRequest) -> None:
        del self._sequences[sequence.request.request_id]
        self._plan_is_fresh = False
        if sequence.running:
            self._release(sequence)
        else:
            self._waiting_count -= 1
            self._drop_gone()

    def _drop_gone(self) -> None:
        """`plan` skips those that went while they waited; behind a shut gate nothing is planned, and they pile up."""
        if len(self._waiting) > 2 * self._waiting_count + GONE_KEPT:
            self._waiting = [entry for entry in self._waiting if self._is_waiting(entry[1])]
            heapq.heapify(self._waiting)

    def _release(self, sequence: LiveRequest) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.digests = [], []
        sequence.computed, sequence.running = 0, False
        self._free_slots.append(sequence.slot)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)
