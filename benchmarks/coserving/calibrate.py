"""Finds the rate that the load asked for means here, and the budgets, with serving alone; both are then frozen.

Capacity is the rate at which serving alone begins to answer requests when more wait than it can run, in the middle half
of such a run: at its ends the batch fills and empties. Beginnings, because short answers end first: ends would count
more of them than there are. A first, short run only says how many requests that takes. The
busy share is the engine's own time in steps over the time of the run. Requests that come at random to a device that is
mostly idle keep it busy for 1 - exp(-rate x time of one), so one measured point gives the next rate to try. `alone99`
is found by bisection on the logarithm of the rate, with the same requests every time.

Everything tried is kept, with what came of it, for the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from coserving.options import GIVEN_MS, Load
from coserving.sending import record_of
from coserving.store import Row
from coserving.traffic import at_rate, cut, sample, with_mix
from rose.load.load_report import LatencyBudget, measure, seen
from rose.load.statistics import mean, percentile
from rose.load.traces import Trace

FIRST_SAMPLE = 96
SAMPLE_MAX = 700  # under the generator's bound on requests under way, and under the device's on those waiting
CLOSE_ENOUGH = 0.06  # of the target
FIRST_GUESS_SHARE = 0.1  # of capacity
ALONE_ATTAINMENT = 0.99
SEARCHED_SHARES = (0.03, 0.9)  # of capacity
BUDGET_OVER_P99 = 2.0


class Alone(Protocol):
    """Serving alone: sends requests and says how long the engine was in steps meanwhile."""

    def __call__(self, trace: Trace, seed: int) -> Trial: ...


class Trial(msgspec.Struct):
    """One run of serving alone."""

    wall_s: float
    busy_s: float
    rows: list[Row]

    @property
    def busy_share(self) -> float:
        return self.busy_s / self.wall_s


class Effort(msgspec.Struct):
    """How much time goes into it."""

    saturated_s: float = 40.0
    busy_s: float = 45.0
    busy_tries: int = 3
    search_requests: int = 1000
    search_steps: int = 4
    budget_requests: int = 1000
    budget_s: float = 300.0


QUICK = Effort(
    saturated_s=9.0, busy_s=7.0, busy_tries=2, search_requests=40, search_steps=3, budget_requests=60, budget_s=12.0
)


class Calibration(msgspec.Struct):
    """What is frozen for the run."""

    capacity_rps: float
    rate_rps: float
    ttft_ms: float
    tpot_ms: float
    tried: list[dict[str, Any]]


def steady_rate(began_s: Sequence[float]) -> float:
    """Requests a second over the middle half of these moments."""
    moments = np.sort(np.asarray(began_s, dtype=np.float64))
    first, last = len(moments) // 4, (3 * len(moments)) // 4
    assert last > first, "too few requests for a rate"
    return float((last - first) / (moments[last] - moments[first]))


def next_rate(rate_rps: float, busy_share: float, target: float) -> float:
    """The rate at which the busy share should be `target`, from one point of the curve; at most four times as much."""
    measured = min(max(busy_share, 1e-4), 0.98)
    return rate_rps * min(4.0, max(0.25, math.log1p(-target) / math.log1p(-measured)))


def searched(attained: Callable[[float], float], low: float, high: float, steps: int, target: float) -> float:
    """The rate at which attainment falls to the target, by bisection in the logarithm, and in the end by a straight
    line between the two rates that enclose it; `low` if even the lowest rate tried misses the target."""
    at_low = at_high = math.nan
    for _ in range(steps):
        middle = math.sqrt(low * high)
        found = attained(middle)
        if found >= target:
            low, at_low = middle, found
        else:
            high, at_high = middle, found
    if math.isnan(at_low) or math.isnan(at_high):
        return low
    return low * (high / low) ** ((at_low - target) / (at_low - at_high))


def attainment_of(rows: Sequence[Row], budget: LatencyBudget) -> float:
    return mean(seen(measure([record_of(row) for row in rows], budget).attained))


def budget_of(rows: Sequence[Row]) -> tuple[float, float]:
    """Twice the P99 of TTFT and TPOT, in milliseconds."""
    measures = measure([record_of(row) for row in rows], LatencyBudget())
    tails_s = [percentile(seen(values), 99) for values in (measures.ttft_s, measures.tpot_s)]
    return tuple(round(BUDGET_OVER_P99 * tail_s * 1000, 2) for tail_s in tails_s)  # type: ignore[return-value]


class Calibrator:
    """Uses serving alone on the requests of the run."""

    def __init__(self, alone: Alone, trace: Trace, effort: Effort, seed: int, say: Callable[[str], None]) -> None:
        self._alone, self._trace, self._effort, self._seed, self._say = alone, trace, effort, seed, say
        self._tried: list[dict[str, Any]] = []

    def run(self, load: Load, budget: str, rate_rps: float | None = None) -> Calibration:
        """`rate_rps` if it is known what the load means."""
        capacity_rps = self.capacity()
        if rate_rps is None:
            rate_rps = self.rate(load, capacity_rps)
        ttft_ms, tpot_ms = GIVEN_MS if budget == "given" else self.budgets(rate_rps)
        return Calibration(capacity_rps, rate_rps, ttft_ms, tpot_ms, self._tried)

    def capacity(self) -> float:
        rate_rps = self._saturated(FIRST_SAMPLE)
        count = min(SAMPLE_MAX, max(FIRST_SAMPLE, round(rate_rps * self._effort.saturated_s)))
        return self._saturated(count)

    def rate(self, load: Load, capacity_rps: float) -> float:
        if load.kind == "alone99":
            return self._search(capacity_rps)
        assert load.share is not None
        return capacity_rps * load.share if load.kind == "capacity" else self._busy(load.share, capacity_rps)

    def budgets(self, rate_rps: float) -> tuple[float, float]:
        count = min(self._effort.budget_requests, max(20, round(rate_rps * self._effort.budget_s)))
        trial = self._at(rate_rps, count, 0)
        found = budget_of(trial.rows)
        self._note("budget", requests=len(trial.rows), ttft_ms=found[0], tpot_ms=found[1])
        return found

    def _saturated(self, count: int) -> float:
        trial = self._alone(sample(self._trace, count), self._seed)
        rate_rps = steady_rate([row.token_s[0] for row in trial.rows if row.outcome == "done" and row.token_s])
        self._note("saturated", requests=count, capacity_rps=round(rate_rps, 3), busy_share=round(trial.busy_share, 3))
        return rate_rps

    def _busy(self, target: float, capacity_rps: float) -> float:
        rate_rps, place = capacity_rps * FIRST_GUESS_SHARE, 0
        for _ in range(self._effort.busy_tries):
            count = max(20, round(rate_rps * self._effort.busy_s))
            trial = self._at(rate_rps, count, place)
            place += count
            self._note("busy", rate_rps=round(rate_rps, 3), requests=count, busy_share=round(trial.busy_share, 4))
            is_close = abs(trial.busy_share / target - 1) < CLOSE_ENOUGH
            rate_rps = next_rate(rate_rps, trial.busy_share, target)
            if is_close:
                break
        return rate_rps

    def _search(self, capacity_rps: float) -> float:
        """With the rhythm of the whole run: a slice brought to the same mean rate could have weaker bursts."""
        count = min(self._effort.search_requests, len(self._trace))

        def attained(rate_rps: float) -> float:
            trial = self._alone(cut(at_rate(self._trace, rate_rps), 0, count), self._seed)
            found = attainment_of(trial.rows, LatencyBudget())
            self._note("alone99", rate_rps=round(rate_rps, 3), requests=count, attainment=round(found, 4))
            return found

        low, high = (share * capacity_rps for share in SEARCHED_SHARES)
        return searched(attained, low, high, self._effort.search_steps, ALONE_ATTAINMENT)

    def _at(self, rate_rps: float, count: int, place: int) -> Trial:
        """So many requests in the rhythm of a place in the run, at exactly this mean rate, with the run's lengths."""
        count = min(count, len(self._trace))
        begin = place % (len(self._trace) - count + 1)
        few = with_mix(cut(self._trace, begin, begin + count), self._trace)
        return self._alone(at_rate(few, rate_rps), self._seed)

    def _note(self, what: str, **figures: Any) -> None:
        self._tried.append({"what": what, **figures})
        self._say(f"calibration, {what}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
