"""The economics of a plan: price lines of rollouts, the slack that lending takes, slower answers, and spikes.

The formulas are those of `rose.cost.frontier`; this module counts what goes into them, in the traffic and in the
simulated windows. Bursts are counted in all minutes of the trace at one replica, losses in the simulated ones. Spikes
multiply the busiest window on every device at once, while rollouts want every step, on devices that have not met this
traffic before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rose.core.admission import Mode
from rose.cost.bill import HOUR_S, MILLION, CostSettings, RunUsage, bill_of
from rose.cost.frontier import (
    Frontier,
    FrontierTerms,
    HourSlack,
    LossCount,
    RolloutPrices,
    WorstCase,
    frontier,
    is_burst,
    slack_of,
    waiting_usd,
    worst_case,
)
from rose.plan.fleet import Fleet
from rose.plan.job import RlJob
from rose.plan.traffic import DAY_S, FleetTraffic
from rose.plan.windows import COUNTED_S, MINUTE_S, MinuteCount, WindowResult, simulate, widened
from rose.sim.shapes import Arrival

DAY_HOURS = 24.0
SPIKES = (2.0, 4.0)  # times the busiest window's requests
SPIKE_ARRIVALS_MAX = 20_000  # of one replica in one window; beyond them it only queues, for minutes of computing
MORE_ROLLOUTS = 100_000.0  # a day, of which a plan says how much they must teach

Minutes = dict[int, Sequence[Sequence[int]]]  # by hour: runs of consecutive minutes with their requests


@dataclass(frozen=True, slots=True)
class SpikeResult:
    """One replica at `times` the requests of its busiest window; counts are for a minute of the whole fleet."""

    times: float
    requests: float
    late_alone: float
    late_lent: float
    lost_usd: float


@dataclass(frozen=True, slots=True)
class PlanEconomics:
    """What lending is worth and what it risks; prices are for one GPU."""

    frontier: Frontier
    gain_points: float | None  # of the accept rate by `MORE_ROLLOUTS` a day, at the blend, for training to be worth it
    answer_usd: float | None
    slack: tuple[HourSlack, ...]
    slack_gpu_hour_usd: float  # mean over hours
    slower_answer_s: float  # mean over answers in budget
    waiting_gpu_hour_usd: float
    worst: WorstCase
    spikes: tuple[SpikeResult, ...]


@dataclass(frozen=True, slots=True)
class SpikeWindow:
    """A window at `times` the requests of the busiest one."""

    times: float
    window: WindowResult


def simulate_spikes(
    fleet: Fleet, traffic: FleetTraffic, context_tokens: int, mode: Mode, seed: int
) -> tuple[SpikeWindow, ...]:
    """Return the busiest window with its requests multiplied, as often as a replica can be simulated."""
    span, windows = widened(traffic.busiest(COUNTED_S)), []
    for number, times in enumerate(SPIKES):
        chance = random.Random(f"spike {seed} {times}")
        arrivals: list[Arrival] = []
        for _ in range(round(times)):
            arrivals += traffic.source.arrivals(span, 1 / fleet.replicas, chance)
        arrivals.sort(key=lambda arrival: arrival.at_s)
        if len(arrivals) > SPIKE_ARRIVALS_MAX:
            break
        window, _ = simulate(fleet, arrivals, context_tokens, mode, seed + number, None, 0)
        windows.append(SpikeWindow(times, window))
    return tuple(windows)


def minute_counts(traffic: FleetTraffic, fleet: Fleet, seed: int) -> Minutes:
    """Return the requests of one replica in every minute of the traffic."""
    chance, share = random.Random(f"minutes {seed}"), 1 / fleet.replicas
    return {
        hour.hour: [
            [
                len(traffic.source.arrivals((begin_s + MINUTE_S * n, begin_s + MINUTE_S * (n + 1)), share, chance))
                for n in range(int((end_s - begin_s) // MINUTE_S))
            ]
            for begin_s, end_s in hour.spans
        ]
        for hour in traffic.hours
    }


def economics_of(
    fleet: Fleet, traffic: FleetTraffic, job: RlJob, results: Sequence[WindowResult], minutes: Minutes,
    spikes: Sequence[SpikeWindow], usage: RunUsage, prices: CostSettings,
) -> PlanEconomics:  # fmt: skip
    """Return the economics of a day; `usage` is that of the day with all devices, `results` have the busiest window."""
    in_burst, in_calm = _losses(results)
    by_replica = slack_of(minutes, in_burst, in_calm, prices.breach_usd)
    slack = tuple(replace(hour, lent_hour_usd=hour.lent_hour_usd / fleet.degree) for hour in by_replica)
    slack_usd = sum(hour.lent_hour_usd for hour in slack) / len(slack) if slack else 0.0
    kept, slower_s = sum(result.lent - result.gained for result in results), sum(r.slower_s for r in results)
    slower_answer_s = slower_s / kept if kept else 0.0
    answers_gpu_hour = traffic.requests_per_day / DAY_HOURS / fleet.devices
    waiting = waiting_usd(slower_answer_s * answers_gpu_hour, prices.waiting_usd_per_hour)
    terms = _terms(fleet, traffic, job, usage, prices, slack_usd + waiting)
    line = frontier(terms)
    losses = [float(minute.alone - minute.lent) for result in results for minute in result.minutes]
    blend = line.line("blend")
    return PlanEconomics(
        frontier=line,
        gain_points=100 * blend.gain_needed * MORE_ROLLOUTS / terms.answers if blend else None,
        answer_usd=terms.answer_usd if terms.answers else None,
        slack=slack,
        slack_gpu_hour_usd=slack_usd,
        slower_answer_s=slower_answer_s,
        waiting_gpu_hour_usd=waiting,
        worst=worst_case(losses, fleet.replicas, usage.rollout_s / DAY_S, prices.breach_usd),
        spikes=tuple(_spike(fleet, spike, prices) for spike in spikes),
    )


def _losses(results: Sequence[WindowResult]) -> tuple[LossCount, LossCount]:
    """Return what lending cost in minutes that are bursts of their window, and in the others."""
    burst: list[MinuteCount] = []
    calm: list[MinuteCount] = []
    for result in results:
        usual = result.requests / max(1, len(result.minutes))
        for minute in result.minutes:
            (burst if is_burst(minute.requests, usual) else calm).append(minute)
    counts = [
        LossCount(len(some), sum(m.requests for m in some), float(sum(m.alone - m.lent for m in some)))
        for some in (burst, calm)
    ]
    return (counts[0] if burst else _assumed_burst(counts[1])), counts[1]


def _assumed_burst(calm: LossCount) -> LossCount:
    """Return a minute with twice the requests of a calm one, if no simulated minute was a burst."""
    requests = round(2 * calm.requests / calm.minutes) if calm.minutes else 0
    return LossCount(1, requests, 0.0)


def _terms(
    fleet: Fleet, traffic: FleetTraffic, job: RlJob, usage: RunUsage, prices: CostSettings, risk_gpu_hour_usd: float
) -> FrontierTerms:
    """Return the terms of a day; a rollout's part of training is that of all training devices, busy or not."""
    count = len(job.trajectories)
    rollouts = usage.all_tokens / (job.output_tokens / count)
    answers, held_usd = traffic.requests_per_day, DAY_HOURS * prices.dedicated_usd_per_hour
    dedicated, borrowed = (usage.million_tokens_of(n) for n in (usage.dedicated_turns, usage.borrowed_turns))
    hours, bill = usage.lent_s / HOUR_S, bill_of(usage, prices)
    margin_usd = bill.energy + bill.transfer + bill.headroom + hours * risk_gpu_hour_usd
    return FrontierTerms(
        answers=answers,
        rollouts=rollouts,
        answer_usd=DAY_HOURS * fleet.devices * prices.serving_usd_per_hour / answers if answers else 0.0,
        rollout_million_tokens=job.output_tokens / count / MILLION,
        training_usd=held_usd * fleet.train_devices / rollouts if rollouts else 0.0,
        accept_ratio=job.inputs.accept,
        prices=RolloutPrices(
            dedicated_usd=held_usd * fleet.dedicated * fleet.degree / dedicated if dedicated else None,
            serving_usd=hours * prices.serving_usd_per_hour / borrowed if borrowed else None,
            borrowed_usd=margin_usd / borrowed if borrowed else None,
            dedicated_tokens=dedicated,
            serving_tokens=prices.charged_share * borrowed,
            borrowed_tokens=(1 - prices.charged_share) * borrowed,
        ),
    )


def _spike(fleet: Fleet, spike: SpikeWindow, prices: CostSettings) -> SpikeResult:
    window = spike.window
    by_minute = fleet.replicas / max(1, len(window.minutes))
    lost = max(0, window.alone - window.lent) * by_minute
    return SpikeResult(
        spike.times, window.requests * by_minute, (window.requests - window.alone) * by_minute,
        (window.requests - window.lent) * by_minute, lost * prices.breach_usd,
    )  # fmt: skip
