"""Continuous batching: everything a step engine decides, and nothing it computes.

A step takes one new token of every decoding request and fills the token budget with pieces of prompts (chunked
prefill), oldest first. A priority moves a request by a bounded number of places in the queue, so none starves. A
request is admitted only with blocks for all its known tokens, and only if it could finish alone within the KV limit:
preempting the youngest therefore always helps, and the oldest always finishes. A preempted request is recomputed.

An engine calls `plan`, then `begin`, computes, and gives the sampled tokens to `complete`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from rose.api.requests import PromptLogprob, VersionSpan
from rose.engines.base import Budget, EngineFacts, FinishReason, Partial, PlannedRequest, Request, StepPlan, TokenEvent
from rose.engines.blocks import BlockPool, block_digest, root_digest
from rose.engines.live_request import LiveRequest, Sampled
from rose.errors import ContextTooLong, QueueFull, RequestRefused, Unavailable

GONE_KEPT = 64  # entries in the queue of requests that are gone: so many are cheaper to skip than to remove


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The most that one engine can hold."""

    block_tokens: int
    block_bytes: int
    max_context_tokens: int
    max_sequences: int
    max_waiting: int
    vocabulary: int
    eos_token_ids: frozenset[int] = frozenset()
    spare_sequences: int = 0  # that may run beyond `max_sequences` while `BatchScheduler.uses_spare`


class BatchScheduler:
    """The queues and the block pool of one engine. Not thread-safe."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, version: str) -> None:
        self.limits = limits
        self.pool = pool
        self.version = version
        self.running: list[LiveRequest] = []
        self.planned: list[tuple[LiveRequest, int]] = []  # of the newest plan, in its order
        self.uses_spare = False  # because lending has delayed requests that run
        self._free_slots = list(range(limits.max_sequences + limits.spare_sequences))
        self._sequences: dict[str, LiveRequest] = {}
        self._waiting: list[tuple[tuple[int, int], LiveRequest]] = []  # a heap; gone ones are skipped
        self.waiting_count = 0
        self._next_order = 0
        self._plan_number = 0
        self._plan_is_fresh = False
        self._preemptions = self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._prefix_query_tokens = self._prefix_hit_tokens = 0

    def add(self, request: Request) -> None:
        self._check(request)
        partial = request.partial
        token_ids = [*request.prompt_ids, *partial.token_ids]
        sequence = LiveRequest(request, self._next_order, token_ids, list(partial.logprobs), list(partial.spans))
        sequence.scores_prompt = request.sampling.prompt_logprobs is not None and not partial.token_ids
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
        """Take a new version. Requests in flight keep their KV, but no later request finds any of it.

        A prompt whose log-probabilities are under way begins again: they are those of one version.
        """
        self.version = version
        self.pool.forget_digests()
        for sequence in [sequence for sequence in self.running if sequence.scores_prompt]:
            self._release(sequence)
            self._enqueue(sequence)
        for sequence in self.running:
            sequence.findable = False
        self._plan_is_fresh = False

    def limit_kv(self, blocks: int) -> list[TokenEvent]:
        """Lower or raise the KV limit, and abort what no longer fits, least computed tokens first."""
        self.pool.set_limit(blocks)
        self._plan_is_fresh = False
        most_tokens = [(s, len(s.request.prompt_ids) + s.request.sampling.max_tokens) for s in self._sequences.values()]
        events = [self._abort(s) for s, tokens in most_tokens if self._blocks_for(tokens) > self.pool.limit]
        by_loss = sorted(self.running, key=lambda s: (s.computed, -s.order), reverse=True)
        while self.pool.used > self.pool.limit and by_loss:
            events.append(self._abort(by_loss.pop()))
        return events

    def gather(self, pages: int, blocks_max: int) -> dict[int, int]:
        """Move requests' blocks together so that this many pages hold none, in at most `blocks_max` moves.

        Returns {from: to}; the caller must copy these blocks before anything else happens. Plans stay valid.
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
            self._plan_waiting(left)
        self._plan_is_fresh = True
        if not self.planned and not preempted:
            return None
        items = tuple(
            PlannedRequest(
                s.request.request_id, new, s.computed, s.computed + new == len(s.token_ids), new * s.scores_prompt
            )
            for s, new in self.planned
        )
        return StepPlan(self._plan_number, items, tuple(preempted))

    def begin(self, plan: StepPlan) -> list[tuple[LiveRequest, int]]:
        """Return the sequences of the newest plan, in its order; another plan is a bug."""
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
        """Return the first requests that wait, in the order of admission, however many wait behind them."""
        heap, found = self._waiting, list[LiveRequest]()
        edge = [(heap[0][0], 0)] if heap else []  # of the heap's tree: the nodes above it have been visited
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

    def facts(self) -> EngineFacts:
        return EngineFacts(
            version=self.version,
            running=len(self.running),
            waiting=self.waiting_count,
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
        """Assert that references and holders of blocks agree, and that every request is in one place."""
        self.pool.check()
        held = [0] * self.pool.capacity
        slots = self.limits.max_sequences + self.limits.spare_sequences
        assert len({s.slot for s in self.running} | set(self._free_slots)) == slots
        for sequence in self._sequences.values():
            assert sequence.running == (sequence in self.running)
            assert sequence.running or not sequence.blocks, "a waiting request holds blocks"
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            assert self._blocks_for(sequence.computed) <= len(sequence.blocks)
            for block in sequence.blocks:
                held[block] += 1
        assert held == self.pool.references, "references and owners disagree"
        assert self.waiting_count == sum(not s.running for s in self._sequences.values())

    # Admission

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
        free_slots = max(0, limits.max_sequences - len(self.running))
        if self.waiting_count >= limits.max_waiting + free_slots:
            raise QueueFull(f"{self.waiting_count} requests are waiting already", hint="retry a little later")

    def _enqueue(self, sequence: LiveRequest) -> None:
        sequence.running = False
        heapq.heappush(self._waiting, (sequence.key, sequence))
        self.waiting_count += 1

    def _is_waiting(self, sequence: LiveRequest) -> bool:
        # The heap also holds requests that were cancelled or evicted while they waited.
        return self._sequences.get(sequence.request.request_id) is sequence and not sequence.running

    # Planning

    def _plan_running(self, budget: Budget, preempted: list[str]) -> Budget:
        """Plan decodes first, then prompts under way; return what is left of the budget."""
        tokens, sequences = budget.tokens, budget.sequences
        order = self.running
        if len(order) > min(tokens, sequences):
            order = sorted(order, key=lambda s: s.turn)
        decoding = [s for s in order if len(s.token_ids) - s.computed == 1]
        prefilling = [s for s in order if len(s.token_ids) - s.computed != 1]
        for sequence in [*decoding, *prefilling]:
            if tokens <= 0 or sequences <= 0:
                break
            cost = 1 + sequence.scores_prompt  # a token with log-probabilities also costs a row of logits
            new = min(len(sequence.token_ids) - sequence.computed, tokens // cost or 1)
            if not sequence.running or not self._grow(sequence, sequence.computed + new, preempted):
                continue  # preempted a moment ago, or now
            self._put_in_plan(sequence, new)
            tokens, sequences = tokens - cost * new, sequences - 1
        self.planned = [(s, new) for s, new in self.planned if s.running]
        used = sum(new * (1 + sequence.scores_prompt) for sequence, new in self.planned)
        return Budget(budget.tokens - used, budget.sequences - len(self.planned))

    def _plan_waiting(self, left: Budget) -> None:
        tokens, sequences = left.tokens, left.sequences
        running_max = self.limits.max_sequences + self.uses_spare * self.limits.spare_sequences
        while tokens > 0 and sequences > 0 and len(self.running) < running_max:
            while self._waiting and not self._is_waiting(self._waiting[0][1]):
                heapq.heappop(self._waiting)
            if not self._waiting or not self._admit(self._waiting[0][1]):
                return
            sequence = self.running[-1]
            cost = 1 + sequence.scores_prompt  # a token with log-probabilities also costs a row of logits
            new = min(len(sequence.token_ids) - sequence.computed, tokens // cost or 1)
            self._put_in_plan(sequence, new)
            tokens, sequences = tokens - cost * new, sequences - 1

    def _put_in_plan(self, sequence: LiveRequest, new_tokens: int) -> None:
        sequence.last_planned = self._plan_number
        self.planned.append((sequence, new_tokens))

    def _admit(self, sequence: LiveRequest) -> bool:
        """Give the first waiting request its cached prefix and blocks for the rest, or nothing at all."""
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
        self.waiting_count -= 1
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
        """Return digests and blocks of the known prefix. It never has the last token, whose logits are needed."""
        if sequence.scores_prompt:  # every token of it is needed, not only its keys and values
            return [], []
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
        """Take blocks for this many tokens, preempting younger requests if need be; False if it was the youngest."""
        missing = self._blocks_for(tokens) - len(sequence.blocks)
        while missing > 0:
            fresh = self.pool.allocate(missing)
            if fresh is not None:
                sequence.blocks.extend(fresh)
                return True
            victim = max(self.running, key=lambda s: s.key)
            self._release(victim)
            self._enqueue(victim)
            self._preemptions += 1
            preempted.append(victim.request.request_id)
            if victim is sequence:
                return False
        return True

    # Results

    def _append(self, sequence: LiveRequest, sampled: Sampled) -> TokenEvent:
        scores: tuple[PromptLogprob, ...] = ()
        if sequence.scores_prompt:
            scores = tuple(sequence.prompt_logprobs)
            sequence.prompt_logprobs, sequence.scores_prompt = [], False
        sequence.token_ids.append(sampled.token_id)
        sequence.logprobs.append(sampled.logprob)
        last = sequence.spans[-1] if sequence.spans else None
        if last is not None and last.version == self.version:
            sequence.spans[-1] = VersionSpan(self.version, last.start, sequence.produced)
        else:
            sequence.spans.append(VersionSpan(self.version, sequence.produced - 1, sequence.produced))
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
            prompt_logprobs=scores,
        )

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
        full = sequence.computed // size if sequence.findable else 0
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
            return
        self.waiting_count -= 1
        # `plan` skips requests that are gone; while admission is blocked nothing is planned, and they would pile up.
        if len(self._waiting) > 2 * self.waiting_count + GONE_KEPT:
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


class BatchingEngine:
    """The part of a `StepEngine` that its scheduler answers."""

    scheduler: BatchScheduler

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(request_id)

    def evict(self, request_id: str) -> Partial:
        return self.scheduler.evict(request_id)

    def limit_kv(self, blocks: int) -> list[TokenEvent]:
        return self.scheduler.limit_kv(blocks)

    def facts(self) -> EngineFacts:
        return self.scheduler.facts()
