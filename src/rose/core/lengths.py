"""How long trajectories and answers will be, from those that have ended.

Lengths of agentic trajectories are about log-normal, and siblings, which play the same task, resemble each other. How
much they do is learnt too: the variance of log-lengths is split into that between groups and that within them, and a
group's own mean counts for more the more siblings have finished and the more alike siblings have been. A trajectory
that has produced so much already is at least that long: what remains is the mean of the tail beyond it, so the
estimate of one that does not end grows, as it should.

Short siblings finish first, so means begin too low. The tail beyond what a trajectory has produced sets that right for
those that matter: the long ones.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass

FINISHED_MIN = 8  # fewer trajectories say nothing about the next
ANSWERS_MIN = 32
ANSWERS_KEPT = 512
ANSWER_QUANTILE = 0.95
GROUPS_KEPT = 4096  # a group is over long before so many have come after it
VARIANCE_MIN = 0.01  # of log-lengths: a tenth more or less is always possible


@dataclass(slots=True)
class _Moments:
    """Of log-lengths."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def deviations(self) -> float:
        """Sum of squared distances from the mean."""
        return max(0.0, self.squares - self.total * self.total / self.count)


class Answers:
    """Tokens of single turns: their mean, and what only one in twenty exceeds."""

    def __init__(self) -> None:
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []
        self._total = 0

    def add(self, tokens: int) -> None:
        if len(self._newest) == ANSWERS_KEPT:
            oldest = self._newest.popleft()
            self._total -= oldest
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
        self._newest.append(tokens)
        self._total += tokens
        bisect.insort(self._sorted, tokens)

    def mean(self, max_tokens: int) -> float:
        if len(self._newest) < ANSWERS_MIN:
            return float(max_tokens)
        return min(self._total / len(self._newest), max_tokens)

    def high(self, max_tokens: int) -> int:
        if len(self._newest) < ANSWERS_MIN:
            return max_tokens
        return min(self._sorted[int(ANSWER_QUANTILE * (len(self._sorted) - 1))], max_tokens)


class Lengths:
    """Tell it of every trajectory that ended; ask what remains of one that has not. Lengths are generated tokens."""

    def __init__(self) -> None:
        self._all = _Moments()
        self._groups: dict[str, _Moments] = {}
        self._within = 0.0  # sum over groups of squared distances from the group's mean
        self._within_freedom = 0
        self._between = _Moments()
        self._known: dict[str | None, tuple[float, float]] = {}  # what is expected of a group, until another one ends

    def finished(self, group: str | None, tokens: int) -> None:
        value = math.log(max(1, tokens))
        self._known.clear()
        self._all.add(value)
        if group is None:
            return
        moments = self._groups.get(group)
        if moments is None:
            moments = self._groups[group] = _Moments()
            if len(self._groups) > GROUPS_KEPT:
                del self._groups[next(iter(self._groups))]
        elif moments.count:
            self._within -= moments.deviations
            self._within_freedom += 1
        moments.add(value)
        self._within += moments.deviations

    @property
    def likeness(self) -> float:
        """Between 0, siblings are strangers, and 1, all alike: the share of the variance that lies between groups."""
        if self._within_freedom < FINISHED_MIN:
            return 0.0
        total = self._all.deviations / max(1, self._all.count - 1)
        within = max(0.0, self._within) / self._within_freedom
        return min(0.99, max(0.0, 1.0 - within / total)) if total > 0 else 0.0

    def remaining(self, group: str | None, done_tokens: int) -> float | None:
        """Tokens that a trajectory is still expected to generate; None while too little is known."""
        if self._all.count < FINISHED_MIN:
            return None
        known = self._known.get(group)
        if known is None:
            mean, variance = self._outlook(group)
            known = self._known[group] = (mean, math.sqrt(max(variance, VARIANCE_MIN)))
        return _mean_beyond(*known, done_tokens) - done_tokens

    def _outlook(self, group: str | None) -> tuple[float, float]:
        """Mean and variance of the log-length of one more of this group."""
        mean, variance = self._all.mean, self._all.deviations / max(1, self._all.count - 1)
        siblings = self._groups.get(group) if group is not None else None
        if siblings is None:
            return mean, variance
        alike = self.likeness
        weight = siblings.count * alike / (siblings.count * alike + 1.0 - alike)
        return mean + weight * (siblings.mean - mean), variance * (1.0 - alike * weight)


def _mean_beyond(mean: float, deviation: float, done: float) -> float:
    """Of a log-normal length, given that it is more than `done`."""
    whole = math.exp(mean + deviation * deviation / 2)
    if done < 1:
        return whole
    distance = (math.log(done) - mean) / deviation
    likely = _tail(distance)
    if likely < 1e-9:  # beyond all experience: as long again
        return 2.0 * done
    return max(done + 1.0, whole * _tail(distance - deviation) / likely)


def _tail(distance: float) -> float:
    """How likely a normal value is further than so many deviations above its mean."""
    return 0.5 * math.erfc(distance / math.sqrt(2.0))
