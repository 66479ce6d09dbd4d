"""One rollout worker in virtual time: continuous batching, chunked prompts, a prefix cache, by the step profile.

Between two events nothing about a worker's batch changes, so all its steps are alike: every sequence gains a token per
step, and the prompt at the head of the queue as many tokens as the step has room for. That makes a turn a few events
instead of a hundred steps; what it leaves out is that the last step before an event is a whole one.

A borrowed worker's own time runs only while the device lends (`Timeline`), and its memory is what the device allows.
Memory: a turn holds its prompt and answer from its start; a turn for which there is no room waits, first come first
served; what is free keeps the prefixes of ended turns, the newest longest. Nothing is shared between trajectories.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from itertools import count

from rose.core.facts import StepFeatures
from rose.engines.profiles import StepProfile
from scheduling.lending import BIN_S, Timeline

STEP_TOKENS = 512
SEQUENCES = 64
DUST = 1e-6
_ORDER = count()


@dataclass(slots=True, eq=False)
class Running:
    """A turn on a worker: `prompt_tokens` to be in the cache, then `output_tokens` to be generated."""

    turn_id: str
    trajectory: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    left_tokens: float = 0.0  # of the prompt
    begun_at: float | None = None  # the worker's count of tokens when it began to decode
    is_here: bool = True

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class FluidWorker:
    def __init__(self, name: str, profile: StepProfile, timeline: Timeline | None, active_from_s: float = 0.0) -> None:
        self.name, self.profile, self.timeline = name, profile, timeline
        self.active_from_s = active_from_s
        self.kv_tokens = timeline.kv_tokens[0] if timeline is not None else self.kv_all
        self.turns: dict[str, Running] = {}
        self.busy_s = 0.0  # of its own time
        self._own_s = self._own(active_from_s)
        self._made = 0.0  # tokens per sequence since the start
        self._queue: deque[Running] = deque()
        self._prompts: deque[Running] = deque()
        self._left_tokens = 0.0
        self._decoding: list[tuple[float, int, Running]] = []
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
        """When something ends here; infinite while nothing runs."""
        steps = math.inf
        if self._prompts:
            steps = self._prompts[0].left_tokens / max(self._chunk, DUST)
        self._drop_gone()
        if self._decoding:
            steps = min(steps, self._decoding[0][0] - self._made)
        if steps == math.inf:
            return math.inf
        own_s = self._own_s + max(0.0, steps) * self._step_s
        return own_s if self.timeline is None else self.timeline.when_lent(own_s)

    def advance(self, now_s: float) -> list[Running]:
        """Up to now, which is not later than `next_s`; returns the turns that ended."""
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

    def _end_turns(self) -> list[Running]:
        ended = []
        while self._decoding and self._decoding[0][0] <= self._made + DUST:
            running = heapq.heappop(self._decoding)[2]
            if not running.is_here:
                continue
            self._decodes -= 1
            self._context_tokens -= running.tokens
            self._leave(running)
            self._keep(running.trajectory, running.tokens)
            ended.append(running)
        return ended

    def _leave(self, running: Running) -> None:
        running.is_here = False
        del self.turns[running.turn_id]
        self._held_tokens -= running.tokens

    def _drop_gone(self) -> None:
        while self._decoding and not self._decoding[0][2].is_here:
            heapq.heappop(self._decoding)

    # Turns

    def add(self, running: Running) -> None:
        self.turns[running.turn_id] = running
        self._queue.append(running)
        self._admit()

    def evict(self, turn_id: str) -> int:
        """Returns how many tokens of its answer it had made."""
        running = self.turns[turn_id]
        if running in self._queue:
            self._queue.remove(running)
            running.is_here = False
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
        """The device allows so much now; returns who has to go, those first who lose the least."""
        self.kv_tokens = kv_tokens
        over, gone = self._held_tokens - kv_tokens, []
        running = [turn for turn in self.turns.values() if turn not in self._queue]
        for turn in sorted(running, key=lambda turn: (turn.prompt_tokens - turn.left_tokens, turn.turn_id)):
            if over <= 0:
                break
            over -= turn.tokens
            gone.append(turn.turn_id)
        self._trim()
        return gone

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

    def _keep(self, trajectory: str, tokens: int) -> None:
        self._cache_tokens += tokens - self._cache.pop(trajectory, 0)
        self._cache[trajectory] = tokens
        self._trim()

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
        """Tokens a second of a prompt, and of one sequence beside those that run; as a heartbeat tells them."""
        share = self.share(now_s)
        decodes = max(1, self._decodes)
        context = max(int(self._context_tokens), 1000) + decodes
        decode_s = self.profile.step_s(StepFeatures(decodes, context, context, decodes))
        chunk = STEP_TOKENS - decodes
        features = StepFeatures(STEP_TOKENS, context + 8000, context + chunk * 8000, decodes + 1)
        return share * chunk / self.profile.step_s(features), share / decode_s

    def share(self, now_s: float, over_s: float = 20.0) -> float:
        """How much of the device's time was lent lately."""
        if self.timeline is None:
            return 1.0
        begin_s = max(0.0, now_s - over_s)
        lent_s = self.timeline.lent_by(now_s) - self.timeline.lent_by(begin_s)
        return max(0.02, lent_s / max(BIN_S, now_s - begin_s)) if now_s > 0 else 0.5
