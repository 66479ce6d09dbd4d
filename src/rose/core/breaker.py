"""The circuit breaker of one device: lending stops by itself when serving suffers, whatever the reason.

It counts by the second, over the last minute: lent steps and those longer than their upper estimate, requests, and
deadlines lost to lending, ambiguous ones included (`core.accountant`). One step in a hundred may be late by design, so
late steps count as a share; lost deadlines count one by one, and on a busy device as a share too.

Lending resumes after a cool-down, which doubles while the breaker keeps tripping, or by a command of the operator. Late
steps alone have harmed no request yet, and the estimates have learnt from them, so their cool-down is shorter. Whom
late steps have harmed shows when requests end, often during that cool-down: it forgives late steps only, and deadlines
that turn out to be lost lengthen it. A pause by the operator ends only by the operator.
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
    lost_share_max: float = 0.01  # of requests; on a busy device a few more than that prove as little
    cool_down_s: float = 20.0
    late_cool_down_s: float = 5.0  # after late steps


@dataclass(slots=True)
class _CoolDown:
    """The cool-down for one cause; each lasts twice as long as the last unless a minute has passed since."""

    first_s: float
    factor: int = 1
    until_s: float = 0.0

    def begin(self, now_s: float) -> None:
        if now_s >= self.until_s + WINDOW_S:
            self.factor = 1
        self.until_s = now_s + self.first_s * self.factor
        self.factor = min(COOL_DOWN_FACTOR_MAX, 2 * self.factor)


@dataclass(slots=True)
class _BreakerCounts:
    """What happened in one second, or in all seconds of the window."""

    second: int = 0
    lent: int = 0
    late: int = 0
    lost: int = 0
    requests: int = 0

    def add(self, lent: int, late: int, lost: int, requests: int) -> None:
        self.lent += lent
        self.late += late
        self.lost += lost
        self.requests += requests


class Breaker:
    """Report what happened; ask `why_stopped` before lending."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.limits = limits or BreakerLimits()
        self.trips = 0
        self._seconds: deque[_BreakerCounts] = deque()
        self._total = _BreakerCounts()
        self._paused: str | None = None
        self._tripped: str | None = None
        self._cooling: _CoolDown | None = None
        self._until_s = 0.0
        self._lost, self._late = _CoolDown(self.limits.cool_down_s), _CoolDown(self.limits.late_cool_down_s)

    def on_lent_step(self, now_s: float, *, is_late: bool) -> None:
        self._count(now_s, lent=1, late=int(is_late))

    def on_deadline_lost(self, now_s: float) -> None:
        self._count(now_s, lost=1)

    def on_finished(self, now_s: float) -> None:
        """Count a serving request that has ended."""
        self._count(now_s, requests=1)

    def pause(self, why: str = "paused by the owner") -> None:
        self._paused = why

    def resume(self) -> None:
        """Resume at once by a command of the operator, and forget what happened before."""
        self._paused = self._tripped = self._cooling = None
        self._until_s = 0.0
        self._lost.factor = self._late.factor = 1
        self._forget()

    def why_stopped(self, now_s: float) -> str | None:
        """Return the reason not to lend now, or None."""
        if self._cooling is not None and now_s >= self._until_s:
            self._end_cool_down()
        if self._cooling is not self._lost:
            while self._seconds and self._seconds[0].second < now_s - WINDOW_S:
                gone = self._seconds.popleft()
                self._total.add(-gone.lent, -gone.late, -gone.lost, -gone.requests)
            self._trip_if_crossed(now_s)
        return self._paused or self._tripped

    def _trip_if_crossed(self, now_s: float) -> None:
        total, limits = self._total, self.limits
        if total.lost > max(limits.deadlines_lost_max, limits.lost_share_max * total.requests):
            cool_down, reason = self._lost, f"{total.lost} deadlines lost to lending in a minute"
        elif total.late >= limits.late_steps_min and total.late > limits.late_share_max * total.lent:
            reason = f"{total.late} of {total.lent} lent steps longer than their estimate in a minute"
            cool_down = self._late
        else:
            return
        if cool_down is self._cooling:
            return
        self.trips += 1
        self._tripped, self._cooling = f"circuit breaker: {reason}", cool_down
        cool_down.begin(now_s)
        self._until_s = max(self._until_s, cool_down.until_s)

    def _end_cool_down(self) -> None:
        """Forget what caused it; after lost deadlines that is everything."""
        if self._cooling is self._late:
            for counts in (*self._seconds, self._total):
                counts.lent = counts.late = 0
        else:
            self._forget()
        self._tripped = self._cooling = None

    def _count(self, now_s: float, lent: int = 0, late: int = 0, lost: int = 0, requests: int = 0) -> None:
        second = int(now_s)
        if not self._seconds or self._seconds[-1].second < second:
            self._seconds.append(_BreakerCounts(second))
        for counts in (self._seconds[-1], self._total):
            counts.add(lent, late, lost, requests)

    def _forget(self) -> None:
        self._seconds.clear()
        self._total = _BreakerCounts()
