"""How much of serving's concurrency and KV memory the next burst will need: what lending must leave free.

Lending makes answers live longer, so more requests run at once and a burst finds fewer free slots and pages than it
would alone. Requests without a slot wait, and the last of them miss their first token.

*Slots.* Lending goes on while no more requests run than a threshold. Which threshold is safe is tried out on the
traffic itself: for each of some thresholds, `SlotThresholds` follows how many requests would be here if rollouts ran
whenever it allows. Each arrival adds one request, with an answer as long as those of late. Up to the threshold its
tokens come as slowly as budgets allow, above it as fast as serving makes them beside so many requests. An arrival that
would not have found a slot in time counts against the threshold, unless it would not have found one alone either. An
engine may have spare slots: one counts for each request that would have ended by now without lending. The
largest threshold that hardly any arrival counts against is used. It says nothing of a burst that comes when more
requests are here than at the bursts before it. So beside more requests than serving alone would have, lending also
leaves room for the largest burst of late: the most by which their number rises within a TTFT budget.

*KV memory.* Each arrival is a sample: by how much the prompt tokens of the requests here had risen above their lowest
value within a window. All but one in a thousand such rises must fit in what is free. The window is the TTFT budget, or
the time that serving itself needs for an answer if that is longer: it takes so long until delayed answers have ended.
Requests that end while the last one can still wait make room for it. A rise that overloads serving alone is no sample:
no reserve would help.

A share of *arrivals* is the right measure, since a burst of fifty is fifty samples: however rare bursts are, at most
that share of the requests finds no room. Before much is known the next burst may be of any size: the reserve begins
with everything and falls with the time for which serving has been observed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rose.core.slo import RecentValues

ARRIVALS_KEPT = 10_000  # ten lie beyond the reserve, which is as few as say something
BLOCK_ARRIVALS = 1000  # are forgotten together
BEYOND_SHARE = 0.001  # of arrivals that may find no room; serving may lose a tenth of a percent at most
BEYOND_MIN = 2  # fewer say nothing
THRESHOLDS = 30  # that are tried out
UNKNOWN_S = 30.0  # of observation in which all slots are reserved; bursts that come by the minute show in it or soon


class _HypotheticalLoad:
    """The requests that would be here if rollouts ran whenever no more than `threshold` requests are here."""

    __slots__ = ("_at_s", "_done", "_ends", "ended", "threshold")

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self.ended = 0
        self._at_s = -math.inf
        self._done = 0.0  # tokens of a request that has been here all the time
        self._ends: list[float] = []  # when that many are done

    @property
    def here(self) -> int:
        return len(self._ends)

    def add(self, tokens: float) -> None:
        heapq.heappush(self._ends, self._done + tokens)

    def advance(self, now_s: float, steps_s: Sequence[float], pace_s: float) -> None:
        """Generate tokens until `now_s`: each takes a step of so many requests, up to the threshold `pace_s`."""
        ends, most = self._ends, len(steps_s) - 1
        while ends:
            token_s = steps_s[min(len(ends), most)]
            if len(ends) <= self.threshold:
                token_s = max(token_s, pace_s)
            end_s = self._at_s + (ends[0] - self._done) * token_s
            if end_s > now_s:
                self._done += (now_s - self._at_s) / token_s
                break
            self._done, self._at_s = heapq.heappop(ends), end_s
            self.ended += 1
        self._at_s = now_s


class _Level:
    """A number that rises and falls, and how far it is above its lowest value of the last window."""

    def __init__(self) -> None:
        self.value = 0
        self._lowest: deque[tuple[float, int]] = deque([(-math.inf, 0)])  # since when it is at least so high; ascending

    def change(self, by: int, at_s: float) -> None:
        self.value += by
        while self._lowest and self._lowest[-1][1] >= self.value:
            at_s, _ = self._lowest.pop()
        self._lowest.append((at_s, self.value))

    def rise(self, since_s: float) -> int:
        while len(self._lowest) > 1 and self._lowest[1][0] <= since_s:
            self._lowest.popleft()
        return self.value - self._lowest[0][1]


class SlotThresholds:
    """The number of requests beside which lending may go on, learnt from arrivals and from the lengths of answers."""

    def __init__(self, slots: int, spare: int = 0) -> None:
        self.slots, self.spare = slots, spare
        self.pace_s = 0.0  # that lending may make a request's token take
        self._steps_s: Sequence[float] = ()  # that a token takes beside so many requests; none if it is not known
        self._most = slots + spare
        # Thresholds are closer to each other where they are small.
        thresholds = {round(self._most * (step / THRESHOLDS) ** 1.5) for step in range(THRESHOLDS + 1)}
        self._loads = [_HypotheticalLoad(threshold) for threshold in sorted(thresholds)]
        self._waiting: deque[tuple[float, list[int]]] = deque()  # until when so many must have ended
        self._missed: deque[list[int]] = deque(maxlen=ARRIVALS_KEPT // BLOCK_ARRIVALS)
        self._arrivals: deque[int] = deque(maxlen=ARRIVALS_KEPT // BLOCK_ARRIVALS)
        self._alone, self._rises = _Level(), RecentValues(0, ARRIVALS_KEPT)  # requests that serving alone has here
        self.best = self._most

    def set_steps(self, step_s: Callable[[int], float]) -> None:
        """Set what a token takes beside so many requests: known at the thresholds, interpolated in between."""
        known = [load.threshold for load in self._loads]
        self._steps_s = np.interp(range(self._most + 1), known, [step_s(count) for count in known]).tolist()

    def limit(self, now_s: float) -> int:
        """Return up to how many requests lending may go on."""
        if not self._steps_s:
            return self.best
        alone = self._loads[0]
        alone.advance(now_s, self._steps_s, self.pace_s)
        [largest] = self._rises.largest(1) or (0,)
        return min(self.best, max(self._most - int(largest), alone.here))

    def on_arrival(self, at_s: float, wait_s: float, tokens: float, window_s: float) -> None:
        """Count a request that can wait so long for a slot, for an answer of so many tokens.

        A burst is what arrives within `window_s`.
        """
        if not self._steps_s:
            return
        while self._waiting and self._waiting[0][0] <= at_s:
            self._judge(*self._waiting.popleft())
        self._advance(at_s)
        if not self._arrivals or self._arrivals[-1] >= BLOCK_ARRIVALS:
            self._missed.append([0] * len(self._loads))
            self._arrivals.append(0)
            self._choose()
        self._arrivals[-1] += 1
        self._alone.change(self._loads[0].here - self._alone.value, at_s)
        for load in self._loads:
            load.add(tokens)
        self._alone.change(1, at_s)
        self._rises.observe(min(self._most, self._alone.rise(at_s - window_s)))
        if self._loads[-1].here > self.slots:
            self._waiting.append((at_s + wait_s, [load.ended + self._too_many(load) for load in self._loads]))

    def _advance(self, now_s: float) -> None:
        for load in self._loads:
            load.advance(now_s, self._steps_s, self.pace_s)

    def _too_many(self, load: _HypotheticalLoad) -> int:
        """Return how many requests find no slot; of those that are delayed, some may run beyond the slots."""
        delayed = max(0, load.here - self._loads[0].here)
        return max(0, load.here - self.slots - min(self.spare, delayed))

    def _judge(self, due_s: float, needed: Sequence[int]) -> None:
        self._advance(due_s)
        has_missed = [load.ended < ended for load, ended in zip(self._loads, needed, strict=True)]
        if not has_missed[0] and any(has_missed):  # else it was without a slot alone too, or never
            self._missed[-1] = [missed + has for missed, has in zip(self._missed[-1], has_missed, strict=True)]
            self._choose()

    def _choose(self) -> None:
        """Choose the largest threshold up to which none has too many misses."""
        allowed = max(BEYOND_MIN, BEYOND_SHARE * sum(self._arrivals))
        self.best = 0
        for load, missed in zip(self._loads, self.missed, strict=True):
            if missed > allowed:
                break
            self.best = load.threshold

    @property
    def missed(self) -> tuple[int, ...]:
        """Return how many arrivals count against each threshold."""
        return tuple(sum(counts) for counts in zip(*self._missed, strict=True)) or (0,) * len(self._loads)

    def snapshot(self) -> tuple[int, ...]:
        """Return the number of arrivals, the largest burst, and how many arrivals count against each threshold."""
        return sum(self._arrivals), *(map(int, self._rises.largest(1) or (0,))), *self.missed

    def restore(self, snapshot: Sequence[int]) -> None:
        """Begin with a snapshot of another instance, if it had as many slots."""
        if len(snapshot) == 2 + len(self._loads):
            arrivals, largest, *missed = snapshot
            self._missed.append(missed)
            self._arrivals.append(arrivals)
            self._rises.observe(largest)
            self._choose()


@dataclass(slots=True)
class Rise:
    """The rise in prompt tokens that ends with one arrival, less what leaves while that one may wait."""

    tokens: int
    due_s: float = -math.inf  # until when it may wait
    tokens_left: int = 0  # in all, when it came
    is_settled: bool = True  # that time is over
    is_survived: bool = False  # serving alone could keep up with it


class BurstReserve:
    """The reserve of a device. Report every arrival and end of a serving request, in the order of time."""

    def __init__(self, window_s: float, slots: int, spare: int = 0) -> None:
        self.window_s = self._ttft_s = window_s
        self.wait_s = 0.0  # for a slot, that a request can afford
        self.thresholds = SlotThresholds(slots, spare)
        self._tokens, self._token_rises = _Level(), RecentValues(0, ARRIVALS_KEPT)
        self._pending: deque[Rise] = deque()
        self._tokens_left = 0
        self._now_s = self._since_s = -math.inf

    def on_arrival(self, prompt_tokens: int, output_tokens: float | None, at_s: float) -> Rise:
        """Count a request whose answer has about so many tokens, if that is known.

        Returns the rise that ends with it, to be passed to `learn` if serving alone can keep up with it.
        """
        at_s = self._advance(at_s)
        if output_tokens is not None:
            self.thresholds.on_arrival(at_s, self.wait_s, output_tokens, self._ttft_s)
        self._tokens.change(prompt_tokens, at_s)
        rise = Rise(self._tokens.rise(at_s - self.window_s), at_s + self.wait_s, self._tokens_left, is_settled=False)
        self._pending.append(rise)
        return rise

    def learn(self, rise: Rise) -> None:
        rise.is_survived = True
        if rise.is_settled:
            self._token_rises.observe(rise.tokens)

    def on_departure(self, prompt_tokens: int, at_s: float) -> None:
        at_s = self._advance(at_s)
        self._tokens.change(-prompt_tokens, at_s)
        self._tokens_left += prompt_tokens

    def running_max(self, now_s: float) -> int:
        """Return how many requests may run for lending to go on; negative if there is nothing to lend at all."""
        self._settle_due(now_s)
        most = self.thresholds.slots + self.thresholds.spare - 1
        return min(most, round(self.thresholds.limit(now_s) * (1 - self._unknown_share(now_s))))

    def kv_tokens(self, tokens: int, now_s: float) -> int:
        """Return how many tokens to keep free for prompts, of so many."""
        return min(tokens, max(self.learnt_kv_tokens, int(tokens * self._unknown_share(now_s))))

    @property
    def learnt_kv_tokens(self) -> int:
        """Return what bursts have needed so far, without a reserve for what is not known."""
        return int(self._token_rises.all_but(BEYOND_SHARE))

    def largest_rises(self, count: int) -> tuple[int, ...]:
        return tuple(int(tokens) for tokens in self._token_rises.largest(count))

    def restore(self, observed_s: float, slots: Sequence[int], tokens: Sequence[int], now_s: float) -> None:
        """Begin with what was known before, with no request here."""
        self._since_s = now_s - observed_s
        self.thresholds.restore(slots)
        for rise in tokens:
            self._token_rises.observe(rise)

    def observed_s(self, now_s: float) -> float:
        return max(0.0, now_s - self._since_s) if self._since_s > -math.inf else 0.0

    def _unknown_share(self, now_s: float) -> float:
        return (UNKNOWN_S / max(UNKNOWN_S, self.observed_s(now_s))) ** 2

    def _advance(self, at_s: float) -> float:
        self._now_s = max(self._now_s, at_s)
        if self._since_s == -math.inf:
            self._since_s = self._now_s
        self._settle_due(self._now_s)
        return self._now_s

    def _settle_due(self, now_s: float) -> None:
        while self._pending and self._pending[0].due_s <= now_s:
            rise = self._pending.popleft()
            rise.tokens = max(0, rise.tokens - (self._tokens_left - rise.tokens_left))
            rise.is_settled = True
            if rise.is_survived:
                self._token_rises.observe(rise.tokens)
