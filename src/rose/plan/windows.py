"""What lending gives and costs on sampled devices: windows of the day, each simulated with and without lending.

Each window is one replica with its random part of the fleet's traffic, for a minute of warm-up and three that count.
`rose.sim.lent_timeline.SaturatedDevice` runs it under the core's own admission, memory policy, accountant and breaker;
nothing is decided here. The two runs meet the same requests. A device continues with what it has learnt of serving in
the window before. One more window around the busiest minutes of the trace counts for the worst minute only.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rose.core.admission import Mode
from rose.core.history import HistorySnapshot
from rose.core.slo import Budgets
from rose.observe.intervals import share_interval
from rose.plan.fleet import Fleet
from rose.plan.traffic import HOUR_S, FleetTraffic, Span
from rose.sim.lent_timeline import LentTimeline, SaturatedDevice
from rose.sim.models import step_shape
from rose.sim.shapes import Arrival

WARM_S, COUNTED_S, MINUTE_S = 60.0, 180.0, 60.0
WINDOW_S = WARM_S + COUNTED_S
WINDOWS_GOAL, PHASES_MIN, PHASES_MAX = 48, 2, 24  # windows in all; per hour of the day
STEPS_MAX = 1_500_000.0  # of all windows: about two minutes of one core
Z = 1.96

Progress = Callable[[int, int, str], None]  # done, in all, what


@dataclass(frozen=True, slots=True)
class MinuteCount:
    """Requests of one minute, and how many were in budget."""

    requests: int
    alone: int
    lent: int


@dataclass(frozen=True, slots=True)
class WindowResult:
    """One simulated window."""

    hour: int
    requests: int
    alone: int  # in budget
    lent: int
    lost: int  # in budget alone, and not with lending
    gained: int
    lent_share: float
    rollout_tokens_s: float
    unlent_s: dict[str, float]
    minutes: tuple[MinuteCount, ...]
    breaker_trips: int
    peak_kv_share: float  # of the KV memory, by serving
    timeline: LentTimeline
    slower_s: float = 0.0  # summed over requests in budget with and without lending; negative if lending helps


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with the ends of its 95 % interval."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class HourResult:
    """What lending does in one hour of the day, per replica."""

    hour: int
    requests_s: float  # of the fleet
    lent_share: Estimate
    rollout_tokens_s: float
    attainment_alone: float
    attainment_lent: float


def phases_of(hours: int, fleet: Fleet, modes: int) -> int:
    """Return how many windows each hour gets: fewer where steps are short, so that a plan takes about as long."""
    step_s = fleet.rollout.step_s(step_shape(1, 2000, 16))
    affordable = STEPS_MAX / modes / (WINDOW_S / step_s)
    return max(1, min(PHASES_MAX, int(affordable / hours), max(PHASES_MIN, WINDOWS_GOAL // hours)))


def simulate_windows(
    fleet: Fleet, traffic: FleetTraffic, context_tokens: int, mode: Mode, phases: int, seed: int, progress: Progress
) -> tuple[list[WindowResult], WindowResult]:
    """Return the windows in order of time, and the one around the busiest minutes."""
    share = 1 / fleet.replicas
    results: list[WindowResult] = []
    learnt: HistorySnapshot | None = None
    total = phases * len(traffic.hours)
    chance = random.Random(f"windows {seed}")
    for hour in traffic.hours:
        for phase in range(phases):
            progress(len(results), total, f"{mode}, hour {hour.hour}")
            span = hour.window((phase + chance.random()) / phases, WINDOW_S)
            arrivals = traffic.source.arrivals(span, share, chance)
            result, learnt = simulate(fleet, arrivals, context_tokens, mode, seed + len(results), learnt, hour.hour)
            results.append(result)
    span = widened(traffic.busiest(COUNTED_S))
    arrivals = traffic.source.arrivals(span, share, chance)
    busiest, _ = simulate(fleet, arrivals, context_tokens, mode, seed + total, learnt, int(span[0] // HOUR_S) % 24)
    return results, busiest


def simulate(
    fleet: Fleet, arrivals: list[Arrival], context_tokens: int, mode: Mode, seed: int,
    learnt: HistorySnapshot | None, hour: int,
) -> tuple[WindowResult, HistorySnapshot]:  # fmt: skip
    """Run one window with and without lending; return what came of it, and what the device has learnt."""

    def device(*, lends: bool) -> tuple[SaturatedDevice, LentTimeline]:
        one = SaturatedDevice(
            fleet.serving, fleet.rollout, fleet.budgets, arrivals, WINDOW_S, seed, lends=lends, mode=mode,
            context_tokens=context_tokens, memory_bytes=fleet.memory_bytes, learnt=learnt,
        )  # fmt: skip
        return one, one.run()

    (alone, _), (lent, timeline) = device(lends=False), device(lends=True)
    kept_alone, kept_lent = _kept(alone, fleet.budgets), _kept(lent, fleet.budgets)
    by_minute: dict[int, list[str]] = defaultdict(list)
    for served in alone.served:
        if served.arrival.at_s >= WARM_S:
            by_minute[int((served.arrival.at_s - WARM_S) // MINUTE_S)].append(served.name)
    minutes = tuple(
        MinuteCount(len(names), sum(kept_alone[name] for name in names), sum(kept_lent[name] for name in names))
        for _, names in sorted(by_minute.items())
    )
    names = [name for names in by_minute.values() for name in names]
    counted = timeline.lent_by(WINDOW_S - 1e-6) - timeline.lent_by(WARM_S)
    kv_bytes = lent.peak_kv_tokens * fleet.serving.kv_bytes_per_token
    result = WindowResult(
        hour=hour,
        requests=len(names),
        alone=sum(kept_alone[name] for name in names),
        lent=sum(kept_lent[name] for name in names),
        lost=sum(kept_alone[name] and not kept_lent[name] for name in names),
        gained=sum(kept_lent[name] and not kept_alone[name] for name in names),
        lent_share=min(1.0, counted / COUNTED_S),
        rollout_tokens_s=lent.rollout_tokens / WINDOW_S,
        unlent_s=dict(lent.unlent_s),
        minutes=minutes,
        breaker_trips=lent.breaker.trips,
        peak_kv_share=kv_bytes / fleet.memory_bytes,
        timeline=timeline.shifted(WARM_S),
        slower_s=_slower_s(alone, lent, {name for name in names if kept_alone[name] and kept_lent[name]}),
    )
    return result, lent.admission.history.snapshot(WINDOW_S)


def _kept(device: SaturatedDevice, budgets: Budgets) -> dict[str, bool]:
    return {served.name: served.keeps(budgets) for served in device.served}


def _slower_s(alone: SaturatedDevice, lent: SaturatedDevice, names: set[str]) -> float:
    """Return by how many seconds lending delays the ends of these requests, summed."""
    sums = [sum(served.last_token_s for served in device.served if served.name in names) for device in (lent, alone)]
    return sums[0] - sums[1]


def widened(span: Span) -> Span:
    """Return the span with the warm-up before it."""
    return max(0.0, span[0] - WARM_S), max(0.0, span[0] - WARM_S) + WINDOW_S


# Figures


def by_hour(traffic: FleetTraffic, results: Sequence[WindowResult]) -> tuple[HourResult, ...]:
    hours = []
    for hour in traffic.hours:
        mine = [result for result in results if result.hour == hour.hour]
        requests = sum(result.requests for result in mine)
        hours.append(
            HourResult(
                hour.hour,
                hour.rate,
                mean_estimate([result.lent_share for result in mine], 0.0, 1.0),
                fmean(result.rollout_tokens_s for result in mine),
                sum(result.alone for result in mine) / requests if requests else math.nan,
                sum(result.lent for result in mine) / requests if requests else math.nan,
            )
        )
    return tuple(hours)


def mean_estimate(values: Sequence[float], low: float = -math.inf, high: float = math.inf) -> Estimate:
    """Return the mean of independent values, in the normal approximation; of one value any other may be true."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, low, high, len(values))
    half = Z * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, max(low, mean - half), min(high, mean + half), len(values))


def attainment(results: Sequence[WindowResult], *, lent: bool) -> Estimate:
    """Return the share in budget; windows are clusters, and its interval is at least Wilson's of as many requests."""
    kept, requests = sum(r.lent if lent else r.alone for r in results), sum(r.requests for r in results)
    if not requests:
        return Estimate(math.nan, 0.0, 1.0, 0)
    share = kept / requests
    low, high = share_interval(kept, requests)
    half = Z * _ratio_error(results, [(r.lent if lent else r.alone) - share * r.requests for r in results])
    return Estimate(share, max(0.0, min(low, share - half)), min(1.0, max(high, share + half)), requests)


def lost_share(results: Sequence[WindowResult]) -> Estimate:
    """Return the share of requests that are in budget alone and not with lending; those that lending helps count too.

    Where none was lost, the upper end is that of Wilson's interval.
    """
    net, requests = sum(r.lost - r.gained for r in results), sum(r.requests for r in results)
    if not requests:
        return Estimate(0.0, 0.0, 1.0, 0)
    share = net / requests
    half = Z * _ratio_error(results, [r.lost - r.gained - share * r.requests for r in results])
    _, most = share_interval(max(0, net), requests)
    return Estimate(share, share - half, max(share + half, most), requests)


def _ratio_error(results: Sequence[WindowResult], residuals: Sequence[float]) -> float:
    count, requests = len(results), sum(r.requests for r in results)
    return math.sqrt(count / max(1, count - 1) * sum(value * value for value in residuals)) / requests


def worst_minute(results: Sequence[WindowResult]) -> MinuteCount | None:
    """Return the minute in which lending cost most; if it cost nothing anywhere, the one that kept the fewest."""
    minutes = [minute for result in results for minute in result.minutes if minute.requests]
    return min(
        minutes,
        key=lambda m: ((m.lent - m.alone) / m.requests, m.lent / m.requests, -m.requests),
        default=None,
    )


def held_back(results: Sequence[WindowResult]) -> dict[str, float]:
    """Return the share of all time that was not lent, by admission's reason, the largest first."""
    shares: dict[str, float] = defaultdict(float)
    for result in results:
        for reason, seconds in result.unlent_s.items():
            shares[reason or "before the first decision"] += seconds / (WINDOW_S * len(results))
    return dict(sorted(shares.items(), key=lambda pair: -pair[1]))


def at_level(results: Sequence[WindowResult], place: float, count: int) -> list[WindowResult]:
    """Return the windows that lend about as much as the one at `place` of all, sorted by the lent share."""
    ordered = sorted(results, key=lambda result: result.lent_share)
    first = max(0, min(len(ordered) - count, round(place * (len(ordered) - 1)) - count // 2))
    return ordered[first : first + count]
