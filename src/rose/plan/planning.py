"""One plan: the traffic is sampled, the job is played, and both become the figures of a `PlanReport`.

The cost of a correct answer comes from `rose.cost.bill` with the usage of one day; device-seconds of all borrowed
devices stand for its one device. Its three prices differ in what an hour of a borrowed device costs: the margin only,
what its users pay for it, or what a dedicated one costs. At the break-even price an answer costs as much as without
borrowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rose.config.loading import load_settings
from rose.core.admission import Mode
from rose.core.memory import MemoryLimits
from rose.cost.bill import CostSettings, RunUsage, cost_of
from rose.plan.advice import advice_of
from rose.plan.curve import Curve, CurvePoint, curve_of
from rose.plan.economics import PlanEconomics, economics_of, minute_counts, simulate_spikes
from rose.plan.fleet import Fleet, capacity_note
from rose.plan.job import RlJob
from rose.plan.traffic import FleetTraffic
from rose.plan.windows import (
    COUNTED_S,
    WARM_S,
    Estimate,
    HourResult,
    MinuteCount,
    Progress,
    WindowResult,
    attainment,
    by_hour,
    held_back,
    lost_share,
    mean_estimate,
    phases_of,
    simulate_windows,
    worst_minute,
)

DAY_S = 86_400.0
GPU_PRICES = CostSettings(
    dedicated_usd_per_hour=2.5, serving_usd_per_hour=2.5, energy_usd_per_hour=0.07, transfer_usd_per_gb=0.02,
    breach_usd=0.01, waiting_usd_per_hour=1.0,
)  # fmt: skip
COST_GAINS_MIN = 1e-9


@dataclass(frozen=True, slots=True)
class AnswerCost:
    """US dollars for a correct answer, by the price of a borrowed device's hour; `fixed` is without borrowing."""

    fixed: float | None
    margin: float | None
    serving_price: float | None
    dedicated_price: float | None
    break_even_usd_per_hour: float | None  # of a borrowed device, beyond the margin
    serving_usd_per_hour: float
    dedicated_usd_per_hour: float
    correct_per_day: float
    borrowed_hours_per_day: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All figures of a plan. Nothing in it was measured on a GPU."""

    traffic: str
    fleet: str
    job: str
    mode: str
    windows: int
    requests: int
    requests_per_day: float
    attainment_alone: Estimate
    attainment_lent: Estimate
    lost_per_day: Estimate
    worst_minute: MinuteCount | None
    lent_share: Estimate
    lent_share_idle: Estimate | None  # in comparison
    hours: tuple[HourResult, ...]
    lent_gpu_hours: float  # a day, on all devices
    rollout_tokens_s: float  # of all replicas, if rollouts always wanted to run
    held_back: dict[str, float]
    peak_kv_share: float
    breaker_trips: int
    points: tuple[CurvePoint, ...]
    train_s: float
    sync_s: float
    longest_trajectory_s: float
    cost: AnswerCost
    economics: PlanEconomics
    advice: str
    assumptions: tuple[str, ...]

    @property
    def gain(self) -> float | None:
        """Return steps a day with all devices over those without."""
        without, with_all = self.points[0].steps_per_day.value, self.points[-1].steps_per_day.value
        return with_all / without if without else None


def make_plan(
    fleet: Fleet, traffic: FleetTraffic, job: RlJob, prices: CostSettings, mode: str, seed: int, progress: Progress
) -> PlanReport:
    """Simulate and add up. `mode` is idle, decode, or compare: decode with the lent share of idle beside it."""
    main: Mode = "idle" if mode == "idle" else "decode"
    phases = phases_of(len(traffic.hours), fleet, 2 if mode == "compare" else 1)
    results, busiest = simulate_windows(fleet, traffic, job.context_tokens, main, phases, seed, progress)
    idle = None
    if mode == "compare":
        others, _ = simulate_windows(fleet, traffic, job.context_tokens, "idle", phases, seed, progress)
        idle = mean_estimate([result.lent_share for result in others], 0.0, 1.0)
    spikes = simulate_spikes(fleet, traffic, job.context_tokens, main, seed)
    curve = curve_of(fleet, traffic, job, results, seed, progress)
    hours = by_hour(traffic, results)
    lost = lost_share(results)
    value, low, high = (part * traffic.requests_per_day for part in (lost.value, lost.low, lost.high))
    per_day = Estimate(value, low, high, lost.n)
    share = mean_estimate([result.lent_share for result in results], 0.0, 1.0)
    usage = _usage(fleet, job, curve.points[-1], curve.points[0], per_day, share.value)
    minutes = minute_counts(traffic, fleet, seed)
    economics = economics_of(fleet, traffic, job, [*results, busiest], minutes, spikes, usage, prices)
    report = PlanReport(
        traffic=traffic.what,
        fleet=f"{fleet.devices} x {fleet.accelerator.name}: {fleet.replicas} replicas of {fleet.serving.name}",
        job=_job_text(fleet, job),
        mode=main,
        windows=len(results),
        requests=sum(result.requests for result in results),
        requests_per_day=traffic.requests_per_day,
        attainment_alone=attainment(results, lent=False),
        attainment_lent=attainment(results, lent=True),
        lost_per_day=per_day,
        worst_minute=worst_minute([*results, busiest]),
        lent_share=share,
        lent_share_idle=idle,
        hours=hours,
        lent_gpu_hours=24 * fleet.devices * fmean(hour.lent_share.value for hour in hours),
        rollout_tokens_s=fleet.replicas * fmean(hour.rollout_tokens_s for hour in hours),
        held_back=held_back(results),
        peak_kv_share=max(result.peak_kv_share for result in [*results, busiest]),
        breaker_trips=sum(result.breaker_trips for result in results),
        points=curve.points,
        train_s=job.train_s,
        sync_s=job.sync_s,
        longest_trajectory_s=curve.longest_s,
        cost=answer_cost(fleet, job, curve.points, per_day, share.value, prices),
        economics=economics,
        advice=advice_of(fleet, job, results, curve),
        assumptions=_assumptions(fleet, traffic, job, curve, results, phases),
    )
    return report


def read_prices(path: Path | None) -> CostSettings:
    """Return the prices of a YAML file with keys of `cost`, over the defaults for GPUs."""
    if path is None:
        return GPU_PRICES
    return load_settings(CostSettings, path)


def answer_cost(
    fleet: Fleet, job: RlJob, points: Sequence[CurvePoint], lost: Estimate, lent_share: float, prices: CostSettings
) -> AnswerCost:
    """Return the cost of a correct answer in a day on all devices, and without borrowing."""
    held = fleet.dedicated * fleet.degree + fleet.train_devices
    terms = _with_devices(prices, max(1, held))
    first, last = points[0], points[-1]
    bill = cost_of(_usage(fleet, job, last, first, lost, lent_share), terms)
    fixed = cost_of(_usage(fleet, job, first, first, None, 0.0), terms)
    hours = _rollout_s(job, last) / 3600 * last.devices
    usd = bill.total_usd
    at = {price: (usd + hours * price) / bill.correct if bill.correct else None
          for price in (0.0, prices.serving_usd_per_hour, prices.dedicated_usd_per_hour)}  # fmt: skip
    break_even = None
    if fixed.cost_per_correct is not None and hours > COST_GAINS_MIN:
        break_even = (fixed.cost_per_correct * bill.correct - usd) / hours
    return AnswerCost(
        fixed.cost_per_correct, at[0.0], at[prices.serving_usd_per_hour], at[prices.dedicated_usd_per_hour], break_even,
        prices.serving_usd_per_hour, prices.dedicated_usd_per_hour, bill.correct, hours,
    )  # fmt: skip


def _with_devices(prices: CostSettings, devices: int) -> CostSettings:
    values = {name: getattr(prices, name) for name in CostSettings.__slots__}
    return CostSettings(**(values | {"dedicated_devices": devices}))


def _rollout_s(job: RlJob, point: CurvePoint) -> float:
    """Return the seconds of a day in which rollouts run."""
    return min(DAY_S, point.steps_per_day.value * point.rollout_s) if point.steps_per_day.value else 0.0


def _usage(
    fleet: Fleet, job: RlJob, point: CurvePoint, without: CurvePoint, lost: Estimate | None, lent_share: float
) -> RunUsage:
    """Return what one day uses; turns and tokens are split between pools by the time that each computed."""
    steps, rollout_s = point.steps_per_day.value, _rollout_s(job, point)
    turns = round(steps * sum(len(trajectory.turns) for trajectory in job.trajectories))
    borrowed = round(turns * point.borrowed_share)
    judged = round(steps * job.inputs.batch)
    fixed_s = DAY_S * steps / without.steps_per_day.value if without.steps_per_day.value else 0.0
    return RunUsage(
        run_s=DAY_S,
        rollout_s=rollout_s,
        lent_s=rollout_s * point.devices,  # given back while the job trains
        lent_rollout_s=rollout_s * point.devices * lent_share,
        trajectories=judged,
        correct=round(judged * job.inputs.accept),
        turns=turns,
        generated_tokens=round(steps * job.output_tokens / job.inputs.oversample),
        dedicated_turns=turns - borrowed,
        borrowed_turns=borrowed,
        fixed_s=fixed_s,
        fixed_basis="estimated" if point.workers else "same",
        pool_tokens=round(steps * job.output_tokens),
        breaches=max(0.0, lost.value) if lost is not None else 0.0,
        headroom_share=MemoryLimits().headroom_share,
        transfer_bytes=round(steps * job.sync_bytes * point.workers),
    )


def _job_text(fleet: Fleet, job: RlJob) -> str:
    inputs = job.inputs
    return (
        f"{inputs.algorithm} on {inputs.turns}: {inputs.batch:,} trajectories a step in groups of {inputs.group}, "
        f"{fleet.rollout.name}, {fleet.dedicated * fleet.degree} dedicated and {fleet.train_devices} training GPUs"
    )


def _assumptions(
    fleet: Fleet, traffic: FleetTraffic, job: RlJob, curve: Curve, results: Sequence[WindowResult], phases: int
) -> tuple[str, ...]:
    """Return in sentences everything that the figures rest on."""
    inputs = job.inputs
    lines = [
        "Nothing was measured on a GPU: " + fleet.serving.what + "; rollouts: " + fleet.rollout.what + ".",
        f"Traffic: {'; '.join((traffic.what, *traffic.notes))}.",
        f"The balancer sends each request to one of {fleet.replicas} replicas at random; {capacity_note()}; users' "
        "requests share no prefix.",
        f"Sampled: {len(results)} windows, {phases} per hour, of {COUNTED_S:.0f} s after {WARM_S:.0f} s of warm-up, "
        "one replica each. Losses count from rollouts that always want to run, so they are an upper estimate.",
        f"Lengths of trajectories: {job.task.source} Assumed: {job.task.assumed}",
        f"Half of a rollout's context is {job.context_tokens:,} tokens; contexts end at "
        f"{fleet.rollout.max_context_tokens:,}. {inputs.accept:.0%} of trajectories are correct.",
        f"Training: {job.train_s:.0f} s a step "
        + ("(given)." if inputs.train_s is not None else f"(6 x parameters x tokens at {inputs.mfu:.0%} utilisation)."),
        f"A version takes {job.sync_s:.1f} s to reach the workers: {inputs.delta:.0%} of its bytes, twice, at "
        f"{inputs.link_gbps:g} Gbps a link. Borrowing a device takes 5 s, within the rollouts.",
        f"Rollouts and training run {'at the same time' if inputs.overlap == 'yes' else 'one after the other'}; "
        "group members are alike by a Gaussian copula of " + f"{inputs.likeness:g}.",
        *(f"{note}." for note in fleet.notes),
    ]
    if curve.shrunk_by > 1:
        lines.append(
            f"Rollouts were simulated at 1/{curve.shrunk_by} of the job, workers and trajectories alike: fewer workers "
            "find more prefixes cached, so the steps a day are too many."
        )
    return tuple(lines)
