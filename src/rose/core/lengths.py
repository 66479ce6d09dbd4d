"""Predicted lengths of trajectories and answers, learned from those that ended.

Lengths of agentic trajectories are about log-normal, and trajectories of one group resemble each other. The variance of
log-lengths is split into the part between groups and the part within groups. A group's own mean weighs more, the more
of its trajectories have ended and the smaller the part within groups is. The remaining length of a trajectory is the
conditional mean beyond what it has generated, so the estimate of one that does not end keeps growing.

Short trajectories end first, so means start too low. The conditional mean corrects that for the long ones.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass

FINISHED_MIN = 8  # fewer trajectories predict nothing
ANSWERS_MIN = 32  # fewer answers predict nothing: `max_tokens` is assumed
ANSWERS_KEPT = 512  # the newest, so that a change of the model shows
ANSWER_QUANTILE = 0.95
GROUPS_KEPT = 4096  # a group has ended long before so many have followed it
VARIANCE_MIN = 0.01  # of log-lengths: a tenth more or less is always possible


@dataclass(slots=True)
class _Moments:
    """Running moments of log-lengths."""

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
        """Return the sum of squared distances from the mean."""
        return max(0.0, self.squares - self.total * self.total / self.count)


class Answers:
    """Lengths of single turns in tokens: their mean and 95th percentile."""

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
    """Lengths of trajectories in generated tokens: report those that ended, ask what remains of the others."""

    def __init__(self) -> None:
        self._all = _Moments()
        self._groups: dict[str, _Moments] = {}
        self._within = 0.0  # sum over groups of squared distances from the group's mean
        self._within_freedom = 0
        self._between = _Moments()
        self._known: dict[str | None, tuple[float, float]] = {}  # prediction by group, until another trajectory ends

    def on_finished(self, group: str | None, tokens: int) -> None:
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
        """Return the share of the variance that lies between groups: 0 for unrelated members, 1 for equal ones."""
        if self._within_freedom < FINISHED_MIN:
            return 0.0
        total = self._all.deviations / max(1, self._all.count - 1)
        within = max(0.0, self._within) / self._within_freedom
        return min(0.99, max(0.0, 1.0 - within / total)) if total > 0 else 0.0

    def remaining(self, group: str | None, done_tokens: int) -> float | None:
        """Return how many more tokens a trajectory is expected to generate, or None if unknown."""
        if self._all.count < FINISHED_MIN:
            return None
        known = self._known.get(group)
        if known is None:
            mean, variance = self._outlook(group)
            known = self._known[group] = (mean, math.sqrt(max(variance, VARIANCE_MIN)))
        return _mean_beyond(*known, done_tokens) - done_tokens

    def _outlook(self, group: str | None) -> tuple[float, float]:
        """Return mean and variance of the log-length of another trajectory of this group."""
        mean, variance = self._all.mean, self._all.deviations / max(1, self._all.count - 1)
        siblings = self._groups.get(group) if group is not None else None
        if siblings is None:
            return mean, variance
        alike = self.likeness
        weight = siblings.count * alike / (siblings.count * alike + 1.0 - alike)
        return mean + weight * (siblings.mean - mean), variance * (1.0 - alike * weight)


def _mean_beyond(mean: float, deviation: float, done: float) -> float:
    """Return the mean of a log-normal length, given that it exceeds `done`."""
    whole = math.exp(mean + deviation * deviation / 2)
    if done < 1:
        return whole
    distance = (math.log(done) - mean) / deviation
    likely = _tail(distance)
    if likely < 1e-9:  # beyond all observations: assume as much again
        return 2.0 * done
    return max(done + 1.0, whole * _tail(distance - deviation) / likely)


def _tail(distance: float) -> float:
    """Return the probability that a normal value is so many deviations above its mean."""
    return 0.5 * math.erfc(distance / math.sqrt(2.0))
