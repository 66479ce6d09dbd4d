"""Statistics of a run: from its records to the summary. Pure.

With `--compare`, steps come in rounds of four (with, without, without, with the borrowed device), so that a drift of
the job or the machine falls on both sides alike. The ratio is taken per pair of neighbours, as time per generated
token, and the interval is by drawing pairs again.

A device is on its way from the moment it is asked, and back when both the device and the gateway say so
(`core.allocation`). Each attempt of a resumed run has its own clock and its own cycles.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from rose.core.provision import Cycle, allocation_overhead_s
from rose.cost.bill import Cost, CostSettings, RunUsage, cost_of
from rose.load.statistics import percentile as load_percentile
from rose.observe.intervals import share_text
from rose.run.diagnostics import notes_of
from rose.run.run_records import (
    AllocationRecord,
    AskedRecord,
    BalanceRecord,
    CostsRecord,
    DeathRecord,
    EvaluationRecord,
    LendingRecord,
    ResumeRecord,
    RunRecord,
    StepRecord,
    Summary,
    SyncRecord,
    fields_of,
    of_kind,
)
from rose.run.run_usage import breaches_of, usage_of
from rose.run.serving_traffic import UserRequest

CONTROL_ROLES = ("gateway", "agent_borrowed", "agent_dedicated")
POOLS = ("dedicated", "borrowed")
LEDGER_FIGURES = ("begun", "returned", "written_off", "lost", "doubled", "differing")
RESAMPLES = 10_000


def summary_of(
    name: str,
    lines: Sequence[RunRecord],
    served: Sequence[UserRequest],
    prices: CostSettings | None = None,
    headroom_share: float = 0.0,
) -> Summary:
    """Return the figures of a whole run; what was not measured is None."""
    steps = of_kind(lines, StepRecord)
    evaluations = of_kind(lines, EvaluationRecord)
    syncs = of_kind(lines, SyncRecord)
    balance = (of_kind(lines, BalanceRecord) or [BalanceRecord()])[-1]
    cpu_s_by_role, control_cpu_ms_per_turn = costs_of(of_kind(lines, CostsRecord))
    cost = cost_of_run(lines, served, prices or CostSettings(), headroom_share)
    speedup, throughput = compared(steps)
    overhead_share, borrow_cycles = allocation_of(lines)
    turns, tokens = _total(steps, "turns"), _total(steps, "generated_tokens")
    trajectories = _total(steps, "trajectories")
    lent, alone = ([step for step in steps if step.is_borrowed is is_lent] for is_lent in (True, False))
    return Summary(
        name=name,
        steps=len(steps),
        success_before=evaluations[0].success_rate if evaluations else None,
        success_after=evaluations[-1].success_rate if len(evaluations) > 1 else None,
        trajectories=trajectories,
        turns=turns,
        generated_tokens=tokens,
        tokens_per_turn=_ratio(tokens, turns),
        invalid_share=invalid_share(steps),
        step_s=_median([step.step_s for step in steps]),
        rollout_share=_ratio(_total(alone or steps, "rollout_s"), _total(alone or steps, "step_s")),
        trajectories_per_s=_ratio(trajectories, _total(steps, "step_s")),
        turns_by_pool={pool: sum(step.turns_by_pool.get(pool, 0) for step in steps) for pool in POOLS},
        **_serving_figures(served, lent, alone),
        resumes=len(of_kind(lines, ResumeRecord)),
        restarts=len([line for line in of_kind(lines, DeathRecord) if line.is_restarted]),
        **{key: getattr(balance, key) for key in LEDGER_FIGURES},
        idle_share=idle_share(alone),
        weight_sync_s=weight_sync_s(steps, syncs),
        pause_s=pause_s([*steps, *syncs]),
        allocation_overhead_share=overhead_share,
        borrow_cycles=borrow_cycles,
        logprob_gap_mean=_median(_known(steps, "logprob_gap_mean"), digits=6),
        staleness_max=max(_known(steps, "staleness_max"), default=None),
        cpu_s_by_role=cpu_s_by_role,
        control_cpu_ms_per_turn=control_cpu_ms_per_turn,
        rollout_speedup=speedup.middle,
        rollout_speedup_low=speedup.low,
        rollout_speedup_high=speedup.high,
        throughput_ratio=throughput.middle,
        throughput_ratio_low=throughput.low,
        throughput_ratio_high=throughput.high,
        cost_per_correct=cost.cost_per_correct,
        cost_per_correct_fixed=cost.cost_per_correct_fixed,
        cost=cost,
        notes=notes_of(lines),
    )


def _serving_figures(
    served: Sequence[UserRequest], lent: Sequence[StepRecord], alone: Sequence[StepRecord]
) -> dict[str, Any]:
    """Return what users got during the run, and during its steps with and without lending."""
    while_lent, while_alone = within(served, lent), within(served, alone)
    return {
        "serving_requests": len(judged(served)),
        "serving_requests_lent": len(judged(while_lent)),
        "serving_requests_alone": len(judged(while_alone)),
        "serving_attainment": attainment(while_lent),
        "serving_attainment_alone": attainment(while_alone),
        "serving_ttft_p99_ms": percentile([row.ttft_ms for row in served], 99),
        "serving_tpot_p99_ms": percentile([row.tpot_ms for row in served], 99),
    }


def cost_of_run(
    lines: Sequence[RunRecord], served: Sequence[UserRequest], prices: CostSettings, headroom_share: float
) -> Cost:
    """Return what the run cost at these prices. `headroom_share` is the memory that the lent device kept free."""
    return cost_of(usage_of_run(lines, served, headroom_share), prices)


def usage_of_run(lines: Sequence[RunRecord], served: Sequence[UserRequest], headroom_share: float) -> RunUsage:
    """Return what the run used, with the requests that lending made late."""
    steps = of_kind(lines, StepRecord)
    lent, alone = ([step for step in steps if step.is_borrowed is is_lent] for is_lent in (True, False))
    counts = of_kind(lines, LendingRecord)
    return usage_of(
        steps,
        evaluation_s=sum(line.took_s for line in of_kind(lines, EvaluationRecord)),
        breaches=breaches_of(within(served, lent), within(served, alone), counts[-1] if counts else None),
        headroom_share=headroom_share,
    )


def costs_of(marks: Sequence[CostsRecord]) -> tuple[dict[str, float] | None, float | None]:
    """Return the processor time by role while steps were run, and the control plane's milliseconds per turn."""
    roles: dict[str, float] = {}
    turns = 0
    for begin, end in zip(marks[::2], marks[1::2]):
        turns += end.turns - begin.turns
        for role, seconds in end.roles.items():
            roles[role] = roles.get(role, 0.0) + seconds - begin.roles.get(role, 0.0)
    control_s = sum(roles.get(role, 0.0) for role in CONTROL_ROLES)
    by_role = {role: round(seconds, 2) for role, seconds in sorted(roles.items())}
    return by_role or None, round(1000 * control_s / turns, 4) if turns else None


def weight_sync_s(steps: Sequence[StepRecord], syncs: Sequence[SyncRecord]) -> float | None:
    """Return the seconds from `publish` until every worker runs it; an asynchronous trainer waits for a part only."""
    updated = [step for step in steps if step.verdict == "updated"]
    if not syncs:
        return _median([step.publish_s for step in updated])
    waited_s = {line.step: line.took_s for line in syncs}
    return _median([step.publish_s + waited_s[step.step] for step in updated if step.step in waited_s])


def pause_s(lines: Sequence[StepRecord | SyncRecord]) -> float | None:
    """Return how long generation stalled for a version, on the worker where it was longest."""
    return _median(_known(lines, "pause_s"), digits=5)


def invalid_share(steps: Sequence[StepRecord]) -> float | None:
    """Return the share of turns whose action the environment did not understand."""
    known = [step for step in steps if step.invalid_turns is not None]
    return _ratio(sum(step.invalid_turns or 0 for step in known), sum(step.turns for step in known))


def idle_share(steps: Sequence[StepRecord]) -> float | None:
    """Return the idle share of the borrowed core while its engine only served."""
    busy_s = sum(step.cpu_s.get("engine_borrowed", 0.0) for step in steps)
    share = _ratio(busy_s, sum(step.step_s for step in steps))
    return None if share is None else round(1 - share, 4)


class RatioInterval(NamedTuple):
    """A geometric mean of ratios and its 95 % interval; None where there is nothing to compare."""

    middle: float | None = None
    low: float | None = None
    high: float | None = None


def compared(steps: Sequence[StepRecord]) -> tuple[RatioInterval, RatioInterval]:
    """Return how many times as quick rollouts and whole steps were with the borrowed device."""
    pairs = []  # neighbouring steps, the one with the borrowed device first
    for first, second in zip(steps[::2], steps[1::2]):
        if first.is_borrowed != second.is_borrowed and first.tokens_played and second.tokens_played:
            pairs.append((first, second) if first.is_borrowed else (second, first))
    if not pairs:
        return RatioInterval(), RatioInterval()
    speedups = [_seconds_per(without, "rollout_s") / _seconds_per(borrowed, "rollout_s") for borrowed, without in pairs]
    ratios = [_seconds_per(without, "step_s") / _seconds_per(borrowed, "step_s") for borrowed, without in pairs]
    return geometric_interval(speedups), geometric_interval(ratios)


def _seconds_per(step: StepRecord, part: str) -> float:
    """Return the seconds per generated token: no two steps play equally much."""
    return float(getattr(step, part)) / step.tokens_played


def geometric_interval(ratios: Sequence[float], seed: int = 0) -> RatioInterval:
    """Return the geometric mean and its interval by resampling the ratios; no interval for fewer than three."""
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    middle = round(float(np.exp(logs.mean())), 4)
    if len(ratios) < 3:
        return RatioInterval(middle)
    drawn = np.random.default_rng(seed).integers(len(logs), size=(RESAMPLES, len(logs)))
    low, high = np.exp(np.percentile(logs[drawn].mean(axis=1), [2.5, 97.5]))
    return RatioInterval(middle, round(float(low), 4), round(float(high), 4))


def within(served: Sequence[UserRequest], steps: Sequence[StepRecord]) -> list[UserRequest]:
    """Return the requests that should have arrived while one of these steps played."""
    spans = sorted((step.began_s, step.began_s + step.rollout_s) for step in steps)
    begins = [begin for begin, _ in spans]
    ends = list(itertools.accumulate((end for _, end in spans), max, initial=-math.inf))  # [n]: the latest of n spans
    return [row for row in served if row.at_s <= ends[bisect_right(begins, row.at_s)]]


def attainment(served: Sequence[UserRequest]) -> float | None:
    verdicts = judged(served)
    return round(sum(verdicts) / len(verdicts), 6) if verdicts else None


def kept_text(share: float | None, requests: int | None, what: str) -> str:
    """Return how many requests kept their budgets, with an interval; an empty text if none was judged."""
    return share_text(round(share * requests), requests, what) if share is not None and requests else ""


def judged(served: Sequence[UserRequest]) -> list[bool]:
    """Return the verdicts on requests; those that the run itself cut off have none."""
    return [row.attained for row in served if row.attained is not None]


def percentile(values: Sequence[float | None], percent: int) -> float | None:
    """Return a percentile of the known values, by nearest rank."""
    known = [value for value in values if value is not None]
    return load_percentile(known, percent) if known else None


def _total(steps: Sequence[StepRecord], key: str) -> Any:
    return sum(getattr(step, key) for step in steps)


def _ratio(above: float, below: float) -> float | None:
    return round(above / below, 4) if below else None


def _median(values: Sequence[float], digits: int = 4) -> float | None:
    return round(statistics.median(values), digits) if values else None


def _known(steps: Sequence[StepRecord | SyncRecord], key: str) -> list[Any]:
    """Return the values that were measured; older runs did not write everything."""
    values = (getattr(step, key) for step in steps)
    return [value for value in values if value is not None and value is not UNSET]


def allocation_of(lines: Sequence[RunRecord]) -> tuple[float | None, int]:
    """Return the share of the time of steps, None if nothing was borrowed, and how many cycles ended in it."""
    overhead_s = time_s = 0.0
    had = returned = 0
    attempts: list[list[RunRecord]] = [[]]
    for line in lines:
        if isinstance(line, ResumeRecord):
            attempts.append([])
        attempts[-1].append(line)
    for attempt in attempts:
        steps = of_kind(attempt, StepRecord)
        newest = {record.number: record for record in of_kind(attempt, AllocationRecord)}
        cycles = [Cycle(**fields_of(newest[number])) for number in sorted(newest)]
        count_from_asking(cycles, of_kind(attempt, AskedRecord))
        if steps:
            began_s, ended_s = steps[0].began_s, steps[-1].began_s + steps[-1].step_s
            time_s += ended_s - began_s
            overhead_s += allocation_overhead_s(cycles, began_s, ended_s)
            had += len(cycles)
            ends_s = [cycle.returned_s for cycle in cycles if cycle.returned_s is not None]
            returned += sum(began_s <= end_s <= ended_s for end_s in ends_s)
    share = overhead_s / time_s if had and time_s > 0 else None
    return share, returned


def count_from_asking(cycles: Sequence[Cycle], asked: Sequence[AskedRecord]) -> None:
    """Move the begin and end of cycles to when the device was asked, which is before the gateway knew."""
    ends_s = [*(line.at_s for line in asked[1:]), math.inf]
    for line, end_s in zip(asked, ends_s):
        begin_s = line.at_s
        if line.is_lent:
            for cycle in (cycle for cycle in cycles if begin_s <= cycle.chosen_s < end_s):
                cycle.wanted_s = min(cycle.wanted_s, begin_s)
                break
        else:
            for cycle in (cycle for cycle in cycles if begin_s <= (cycle.returned_s or -1.0) < end_s):
                cycle.returned_s = begin_s
                if cycle.released_s is not None and line.answered_s is not None:
                    cycle.released_s = max(cycle.released_s, line.answered_s)
                break
