"""The batch model of one rollout worker: continuous batching, chunked prompts and a prefix cache, by the step profile.

The batch does not change between two events, so all its steps are alike: every sequence gains one token per step, and
the first prompt in the queue fills the rest of the step. A turn costs a few events instead of hundreds of steps. The
model ignores that the last step before an event is a whole one.

A borrowed worker advances only while its device lends (`LentTimeline`), in the memory that the device allows. A turn
holds memory for its prompt and answer from its start, and waits in arrival order if there is none. Free memory keeps
the prefixes of ended turns; the oldest goes first. Trajectories share nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from itertools import count

from rose.core.facts import StepFeatures
from rose.engines.profiles import StepProfile
from rose.sim.lent_timeline import BIN_S, SEQUENCES, STEP_TOKENS, LentTimeline

DUST = 1e-6  # tokens, so that rounding leaves no turn unfinished
_ORDER = count()


@dataclass(slots=True, eq=False)
class BatchTurn:
    """A turn on a worker: compute `prompt_tokens`, then generate `output_tokens`."""

    turn_id: str
    trajectory: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    left_tokens: float = 0.0  # of the prompt, not computed yet
    begun_at: float | None = None  # the worker's step count when decoding began
    is_on_worker: bool = True

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class BatchWorker:
    def __init__(
        self, name: str, profile: StepProfile, timeline: LentTimeline | None, active_from_s: float = 0.0
    ) -> None:
        self.name, self.profile, self.timeline = name, profile, timeline
        self.active_from_s = active_from_s
        self.kv_tokens = timeline.kv_tokens[0] if timeline is not None else self.kv_all
        self.turns: dict[str, BatchTurn] = {}
        self.busy_s = 0.0  # of the time that it was lent
        self._own_s = self._own(active_from_s)
        self._made = 0.0  # steps since the start: tokens of a sequence that ran throughout
        self._queue: deque[BatchTurn] = deque()
        self._prompts: deque[BatchTurn] = deque()
        self._left_tokens = 0.0
        self._decoding: list[tuple[float, int, BatchTurn]] = []
        self._starting: set[str] = set()
        self._decodes = 0
        self._context_tokens = 0.0
        self._held_tokens = 0
        self._cache: dict[str, int] = {}
        self._cache_tokens = 0
        self._step_s = math.inf
        self._chunk = 0.0

    @property
    def kv_all(self) -> int:
        return self.profile.kv_memory_bytes // self.profile.kv_bytes_per_token

    # Time

    def _own(self, now_s: float) -> float:
        return now_s if self.timeline is None else self.timeline.lent_by(now_s)

    def next_s(self) -> float:
        """Return when the next prompt or turn ends; infinite while nothing runs."""
        steps = math.inf
        if self._prompts:
            steps = self._prompts[0].left_tokens / max(self._chunk, DUST)
        while self._decoding and not self._decoding[0][2].is_on_worker:
            heapq.heappop(self._decoding)
        if self._decoding:
            steps = min(steps, self._decoding[0][0] - self._made)
        if steps == math.inf:
            return math.inf
        own_s = self._own_s + max(0.0, steps) * self._step_s
        return own_s if self.timeline is None else self.timeline.when_lent(own_s)

    def advance(self, now_s: float) -> list[BatchTurn]:
        """Advance to `now_s`, which is at most `next_s`, and return the turns that ended."""
        own_s = self._own(now_s)
        passed_s, self._own_s = max(0.0, own_s - self._own_s), max(own_s, self._own_s)
        if not (self._prompts or self._decodes):
            return []
        self.busy_s += passed_s
        steps = passed_s / self._step_s
        self._made += steps
        self._context_tokens += steps * self._decodes
        self._compute_prompts(steps * self._chunk)
        ended = self._end_turns()
        self._admit()
        return ended

    def _compute_prompts(self, tokens: float) -> None:
        while self._prompts and self._prompts[0].left_tokens <= tokens + DUST:
            running = self._prompts.popleft()
            tokens -= running.left_tokens
            self._left_tokens -= running.left_tokens
            running.left_tokens = 0.0
            running.begun_at = self._made
            heapq.heappush(self._decoding, (self._made + running.output_tokens, next(_ORDER), running))
            self._decodes += 1
            self._context_tokens += running.prompt_tokens
        if self._prompts and tokens > 0:
            self._prompts[0].left_tokens -= tokens
            self._left_tokens -= tokens

    def _end_turns(self) -> list[BatchTurn]:
        ended = []
        while self._decoding and self._decoding[0][0] <= self._made + DUST:
            running = heapq.heappop(self._decoding)[2]
            if not running.is_on_worker:
                continue
            self._decodes -= 1
            self._context_tokens -= running.tokens
            self._leave(running)
            self._cache_tokens += running.tokens - self._cache.pop(running.trajectory, 0)
            self._cache[running.trajectory] = running.tokens
            self._trim()
            ended.append(running)
        return ended

    def _leave(self, running: BatchTurn) -> None:
        running.is_on_worker = False
        del self.turns[running.turn_id]
        self._held_tokens -= running.tokens

    # Turns

    def reserve(self, running: BatchTurn) -> None:
        """Hold a turn that is not ready to run; `add` begins it."""
        self.turns[running.turn_id] = running
        self._starting.add(running.turn_id)

    def swap_weights(self, pause_s: float) -> None:
        """Stand still for `pause_s`, drop the prefix cache, and compute the contexts of all running turns again."""
        self._cache.clear()
        self._cache_tokens = 0
        tokens = int(self._context_tokens)
        depth = tokens // max(1, self._decodes) // 2
        steps = tokens / STEP_TOKENS
        features = StepFeatures(STEP_TOKENS, depth + STEP_TOKENS, STEP_TOKENS * depth, 1)
        self._own_s += pause_s + steps * self.profile.step_s(features)

    def add(self, running: BatchTurn) -> None:
        self._starting.discard(running.turn_id)
        self.turns[running.turn_id] = running
        self._queue.append(running)
        self._admit()

    def evict(self, turn_id: str) -> int:
        """Remove a turn and return how many output tokens it has generated."""
        running = self.turns[turn_id]
        if turn_id in self._starting or running in self._queue:
            if turn_id in self._starting:
                self._starting.remove(turn_id)
            else:
                self._queue.remove(running)
            running.is_on_worker = False
            del self.turns[turn_id]
            return 0
        made = 0
        if running.begun_at is None:
            self._prompts.remove(running)
            self._left_tokens -= running.left_tokens
        else:
            exact = self._made - running.begun_at
            made = min(running.output_tokens - 1, int(exact))
            self._decodes -= 1
            self._context_tokens -= running.prompt_tokens + exact
        self._leave(running)
        self._admit()
        return made

    def shrink(self, kv_tokens: int) -> list[str]:
        """Set the KV limit and return the turns to evict, those with the least computed prompt first."""
        self.kv_tokens = kv_tokens
        over, evicted = self._held_tokens - kv_tokens, []
        running = [
            turn for turn in self.turns.values() if turn.turn_id not in self._starting and turn not in self._queue
        ]
        for turn in sorted(running, key=lambda turn: (turn.prompt_tokens - turn.left_tokens, turn.turn_id)):
            if over <= 0:
                break
            over -= turn.tokens
            evicted.append(turn.turn_id)
        self._trim()
        return evicted

    def _admit(self) -> None:
        while self._queue and len(self._prompts) + self._decodes < SEQUENCES:
            running = self._queue[0]
            if self._held_tokens and self._held_tokens + running.tokens > self.kv_tokens:
                break
            self._queue.popleft()
            cached = self._cache.pop(running.trajectory, 0)
            self._cache_tokens -= cached
            running.cached_tokens = min(cached, running.prompt_tokens - 1)
            running.left_tokens = float(running.prompt_tokens - running.cached_tokens)
            self._left_tokens += running.left_tokens
            self._held_tokens += running.tokens
            self._prompts.append(running)
            self._trim()
        self._plan()

    def _trim(self) -> None:
        while self._cache and self._cache_tokens > self.kv_tokens - self._held_tokens:
            self._cache_tokens -= self._cache.pop(next(iter(self._cache)))

    # Steps

    def _plan(self) -> None:
        decodes, context = self._decodes, int(self._context_tokens) + self._decodes
        self._chunk = min(float(STEP_TOKENS - decodes), self._left_tokens) if self._prompts else 0.0
        if not self._prompts and not decodes:
            self._step_s = math.inf
            return
        chunk, depth = math.ceil(self._chunk), 0
        if chunk:
            head = self._prompts[0]
            depth = int(head.prompt_tokens - head.left_tokens / 2)
        prompts = 1 if chunk else 0
        self._step_s = self.profile.step_s(
            StepFeatures(decodes + chunk, context + depth + chunk, context + chunk * depth, decodes + prompts)
        )

    def rates(self, now_s: float) -> tuple[float, float]:
        """Return tokens/s of prefill and of one decoding sequence, as a heartbeat reports them."""
        share = self.share(now_s)
        decodes = max(1, self._decodes)
        context = max(int(self._context_tokens), 1000) + decodes
        decode_s = self.profile.step_s(StepFeatures(decodes, context, context, decodes))
        chunk = STEP_TOKENS - decodes
        features = StepFeatures(STEP_TOKENS, context + 8000, context + chunk * 8000, decodes + 1)
        return share * chunk / self.profile.step_s(features), share / decode_s

    def share(self, now_s: float, over_s: float = 20.0) -> float:
        """Return the share of the last `over_s` seconds that the device lent."""
        if self.timeline is None:
            return 1.0
        begin_s = max(0.0, now_s - over_s)
        lent_s = self.timeline.lent_by(now_s) - self.timeline.lent_by(begin_s)
        return max(0.02, lent_s / max(BIN_S, now_s - begin_s)) if now_s > 0 else 0.5
