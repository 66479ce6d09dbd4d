"""The circuit breaker of one device: lending stops by itself when serving suffers, whatever the reason.

It counts by the second, over the last minute: lent steps and those longer than their upper estimate, deadlines missed
that serving alone would have met, and requests that kept their budgets. One step in a hundred may be late by design, so
late steps count as a share; a deadline lost to lending counts one by one. It resumes after a cool-down, which doubles
while it keeps tripping, or when the owner says so. Late steps alone have harmed nobody yet, and the estimates have
learnt from them: a machine that changed its pace needs seconds, one that lost deadlines a minute. Each of the two has a
cool-down of its own: a machine whose steps were late for an hour does not rest the longer for a deadline lost then.

Whom late steps have harmed shows when requests end, often while lending rests for them already: such a rest forgives
late steps only, and deadlines that turn out to be lost lengthen it. The owner's pause ends only by the owner.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 60.0
COOL_DOWN_FACTOR_MAX = 16


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """Crossing any of these within a minute stops lending."""

    late_share_max: float = 0.1  # ten times what the upper estimate promises
    late_steps_min: int = 10  # fewer prove nothing
    deadlines_lost_max: int = 3
    attainment_min: float = 0.95
    requests_min: int = 20  # fewer prove nothing
    cool_down_s: float = 60.0
    late_cool_down_s: float = 5.0  # after late steps


@dataclass(slots=True)
class _Rest:
    """How long lending rests for one cause; twice as long again unless a minute has passed since the last rest."""

    first_s: float
    factor: int = 1
    until_s: float = 0.0

    def begin(self, now_s: float) -> None:
        if now_s >= self.until_s + WINDOW_S:
            self.factor = 1
        self.until_s = now_s + self.first_s * self.factor
        self.factor = min(COOL_DOWN_FACTOR_MAX, 2 * self.factor)


@dataclass(slots=True)
class _Second:
    second: int
    lent: int = 0
    late: int = 0
    lost: int = 0
    requests: int = 0
    attained: int = 0


class Breaker:
    """Tell it what happened; ask `why_stopped` before lending."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.limits = limits or BreakerLimits()
        self.trips = 0
        self._seconds: deque[_Second] = deque()
        self._total = _Second(0)
        self._paused: str | None = None
        self._tripped: str | None = None
        self._resting: _Rest | None = None
        self._until_s = 0.0
        self._lost, self._late = _Rest(self.limits.cool_down_s), _Rest(self.limits.late_cool_down_s)

    # What happened

    def lent(self, now_s: float, *, is_late: bool) -> None:
        self._count(now_s, lent=1, late=int(is_late))

    def deadline_lost(self, now_s: float) -> None:
        self._count(now_s, lost=1)

    def finished(self, now_s: float, *, is_attained: bool) -> None:
        self._count(now_s, requests=1, attained=int(is_attained))

    def pause(self, why: str = "paused by the owner") -> None:
        self._paused = why

    def resume(self) -> None:
        """By the owner: at once, with a clean slate."""
        self._paused = self._tripped = self._resting = None
        self._until_s = 0.0
        self._lost.factor = self._late.factor = 1
        self._forget()

    # Whether to lend

    def why_stopped(self, now_s: float) -> str | None:
        """The reason not to lend now, or None."""
        if self._resting is not None and now_s >= self._until_s:
            self._end_rest()
        if self._resting is not self._lost:
            self._expire(now_s)
            crossed = self._crossed()
            if crossed is not None and crossed[1] is not self._resting:
                self._trip(*crossed, now_s)
        return self._paused or self._tripped

    def _trip(self, reason: str, rest: _Rest, now_s: float) -> None:
        self.trips += 1
        self._tripped, self._resting = f"circuit breaker: {reason}", rest
        rest.begin(now_s)
        self._until_s = max(self._until_s, rest.until_s)

    def _end_rest(self) -> None:
        """What it was for is forgotten; after lost deadlines that is everything."""
        if self._resting is self._late:
            self._forget_steps()
        else:
            self._forget()
        self._tripped = self._resting = None

    def _crossed(self) -> tuple[str, _Rest] | None:
        """Which limit, in words, and the rest that is due for it."""
        total, limits = self._total, self.limits
        if total.lost > limits.deadlines_lost_max:
            return f"{total.lost} deadlines lost to lending in a minute", self._lost
        if total.requests >= limits.requests_min and total.attained < limits.attainment_min * total.requests:
            return f"{total.attained} of {total.requests} requests kept their budgets in a minute", self._lost
        if total.late >= limits.late_steps_min and total.late > limits.late_share_max * total.lent:
            return f"{total.late} of {total.lent} lent steps longer than their estimate in a minute", self._late
        return None

    # Counting

    def _count(self, now_s: float, **changes: int) -> None:
        second = int(now_s)
        if not self._seconds or self._seconds[-1].second < second:
            self._seconds.append(_Second(second))
        for name, change in changes.items():
            for counted in (self._seconds[-1], self._total):
                setattr(counted, name, getattr(counted, name) + change)

    def _expire(self, now_s: float) -> None:
        while self._seconds and self._seconds[0].second < now_s - WINDOW_S:
            gone = self._seconds.popleft()
            for name in ("lent", "late", "lost", "requests", "attained"):
                setattr(self._total, name, getattr(self._total, name) - getattr(gone, name))

    def _forget_steps(self) -> None:
        for counted in (*self._seconds, self._total):
            counted.lent = counted.late = 0

    def _forget(self) -> None:
        self._seconds.clear()
        self._total = _Second(0)
