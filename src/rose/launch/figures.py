"""From the lines of a run to its figures. Pure: lists of plain records in, numbers out.

With `--compare`, steps come in rounds of four (with, without, without, with the borrowed device), so that a drift of
the job or the machine falls on both sides alike. The ratio is taken per pair of neighbours, as time per generated
token, and the interval is by drawing pairs again.

The ideal ratio of a step is 1 / ((1 - s) + s / (1 + i d)): only its rollout share s can be made quicker; what is added
is the share i of the borrowed core that serving leaves idle, at the speed d that a core has while the other is busy.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rose.cost.bill import Cost, cost_of
from rose.cost.settings import CostSettings
from rose.cost.usage import breaches_of, tokens_played, usage_of
from rose.launch.allocation import allocation_of
from rose.launch.notes import notes_of

Line = dict[str, Any]
CONTROL_ROLES = ("gateway", "agent_borrowed", "agent_dedicated")
RESAMPLES = 10_000


def summary_of(
    lines: Sequence[Line], served: Sequence[Line], prices: CostSettings | None = None, headroom_share: float = 0.0
) -> Line:
    """The figures of a whole run, under flat keys; what was not measured is None."""
    steps = of_kind(lines, "step")
    evaluations = of_kind(lines, "evaluation")
    balance = (of_kind(lines, "balance") or [{}])[-1]
    costs = costs_of(of_kind(lines, "costs"))
    turns = sum(step["turns"] for step in steps)
    lent, alone = ([step for step in steps if step["is_borrowed"] is is_lent] for is_lent in (True, False))
    return {
        "steps": len(steps),
        "success_before": evaluations[0]["success_rate"] if evaluations else None,
        "success_after": evaluations[-1]["success_rate"] if len(evaluations) > 1 else None,
        "trajectories": sum(step["trajectories"] for step in steps),
        "turns": turns,
        "generated_tokens": sum(step["generated_tokens"] for step in steps),
        "tokens_per_turn": _ratio(sum(step["generated_tokens"] for step in steps), turns),
        "invalid_share": invalid_share(steps),
        "step_s": _median([step["step_s"] for step in steps]),
        "rollout_share": share_of(alone or steps, "rollout_s"),
        "trajectories_per_s": _rate(steps),
        "turns_by_pool": _by_pool(steps),
        "serving_requests": len(judged(served)),
        "serving_requests_lent": len(judged(within(served, lent))),
        "serving_attainment": attainment(within(served, lent)),
        "serving_attainment_alone": attainment(within(served, alone)),
        "serving_ttft_p99_ms": _tail([row["ttft_ms"] for row in served]),
        "serving_tpot_p99_ms": _tail([row["tpot_ms"] for row in served]),
        "resumes": len(of_kind(lines, "resume")),
        "restarts": len([line for line in of_kind(lines, "death") if line["is_restarted"]]),
        "begun": balance.get("begun"),
        "returned": balance.get("returned"),
        "written_off": balance.get("written_off"),
        "lost": balance.get("lost"),
        "doubled": balance.get("doubled"),
        "differing": balance.get("differing"),
        "idle_share": idle_share(alone),
        "weight_sync_s": weight_sync_s(steps, of_kind(lines, "sync")),
        "pause_s": pause_s([*steps, *of_kind(lines, "sync")]),
        **allocation_of(lines),
        "logprob_gap_mean": _median(_known(steps, "logprob_gap_mean"), digits=6),
        "staleness_max": max(_known(steps, "staleness_max"), default=None),
        **costs,
        **compared(steps),
        **cost_shown(cost_of_run(lines, served, prices or CostSettings(), headroom_share)),
        "notes": notes_of(lines),
    }


def cost_of_run(lines: Sequence[Line], served: Sequence[Line], prices: CostSettings, headroom_share: float) -> Cost:
    """What the run cost at these prices. `headroom_share` is the memory that the lent device kept free."""
    steps = of_kind(lines, "step")
    lent, alone = ([step for step in steps if step["is_borrowed"] is is_lent] for is_lent in (True, False))
    told = (of_kind(lines, "lending") or [{}])[-1].get("breaches")
    usage = usage_of(
        steps,
        evaluation_s=sum(line["took_s"] for line in of_kind(lines, "evaluation")),
        breaches=breaches_of(within(served, lent), within(served, alone), told),
        headroom_share=headroom_share,
    )
    return cost_of(usage, prices)


def cost_shown(cost: Cost) -> Line:
    """The two figures that everybody asks for, and beside them what they are made of."""
    return {
        "cost_per_correct": cost.cost_per_correct,
        "cost_per_correct_fixed": cost.cost_per_correct_fixed,
        "cost": asdict(cost) | {"is_consistent": cost.is_consistent()},
    }


def costs_of(marks: Sequence[Line]) -> Line:
    """Processor time by role while steps were run, and what the control plane had of it for every turn."""
    roles: dict[str, float] = {}
    turns = 0
    for begin, end in zip(marks[::2], marks[1::2]):
        turns += end["turns"] - begin["turns"]
        for role, seconds in end["roles"].items():
            roles[role] = roles.get(role, 0.0) + seconds - begin["roles"].get(role, 0.0)
    control_s = sum(roles.get(role, 0.0) for role in CONTROL_ROLES)
    return {
        "cpu_s_by_role": {role: round(seconds, 2) for role, seconds in sorted(roles.items())} or None,
        "control_cpu_ms_per_turn": round(1000 * control_s / turns, 4) if turns else None,
    }


def weight_sync_s(steps: Sequence[Line], syncs: Sequence[Line]) -> float | None:
    """From the call of `publish` until every worker runs it; an asynchronous trainer waits for the first part only."""
    updated = [step for step in steps if step["verdict"] == "updated"]
    if not syncs:
        return _median([step["publish_s"] for step in updated])
    waited_s = {line["step"]: line["took_s"] for line in syncs}
    return _median([step["publish_s"] + waited_s[step["step"]] for step in updated if step["step"] in waited_s])


def pause_s(lines: Sequence[Line]) -> float | None:
    """How long turns stood still for a version, on the worker where it was longest."""
    return _median(_known(lines, "pause_s"), digits=5)


def invalid_share(steps: Sequence[Line]) -> float | None:
    """Of the turns of judged trajectories, those whose action the environment did not understand."""
    told = [step for step in steps if step.get("invalid_turns") is not None]
    return _ratio(sum(step["invalid_turns"] for step in told), sum(step["turns"] for step in told))


def idle_share(steps: Sequence[Line]) -> float | None:
    """Of the borrowed core, while its engine served and did nothing else."""
    busy_s = sum(step["cpu_s"].get("engine_borrowed", 0.0) for step in steps)
    share = _ratio(busy_s, sum(step["step_s"] for step in steps))
    return None if share is None else round(1 - share, 4)


def of_kind(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def compared(steps: Sequence[Line]) -> Line:
    """How much the borrowed device was worth; all None unless there are steps of both kinds."""
    pairs = _pairs(steps)
    names = ("rollout_speedup", "throughput_ratio")
    if not pairs:
        return {name + end: None for name in names for end in ("", "_low", "_high")}
    speedups = [_seconds_per(without, "rollout_s") / _seconds_per(borrowed, "rollout_s") for borrowed, without in pairs]
    ratios = [_seconds_per(without, "step_s") / _seconds_per(borrowed, "step_s") for borrowed, without in pairs]
    found: Line = {}
    for name, values in zip(names, (speedups, ratios)):
        middle, low, high = geometric_interval(values)
        found |= {name: middle, f"{name}_low": low, f"{name}_high": high}
    return found


def _pairs(steps: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Neighbours of which one had the borrowed device and the other had not, in that order."""
    pairs = []
    for first, second in zip(steps[::2], steps[1::2]):
        if first["is_borrowed"] != second["is_borrowed"] and tokens_played(first) and tokens_played(second):
            pairs.append((first, second) if first["is_borrowed"] else (second, first))
    return pairs


def _seconds_per(step: Line, part: str) -> float:
    """Per generated token: no two steps play equally much."""
    return float(step[part]) / tokens_played(step)


def geometric_interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float | None, float | None]:
    """The geometric mean and its 95 % interval, by drawing the ratios again; no interval under three of them."""
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    middle = round(float(np.exp(logs.mean())), 4)
    if len(ratios) < 3:
        return middle, None, None
    drawn = np.random.default_rng(seed).integers(len(logs), size=(RESAMPLES, len(logs)))
    low, high = np.exp(np.percentile(logs[drawn].mean(axis=1), [2.5, 97.5]))
    return middle, round(float(low), 4), round(float(high), 4)


def ideal_ratio(rollout_share: float, idle_share: float, busy_speed: float) -> float:
    """The best that one borrowed core can do for a step."""
    return 1 / ((1 - rollout_share) + rollout_share / (1 + idle_share * busy_speed))


def share_of(steps: Sequence[Line], part: str) -> float | None:
    return _ratio(sum(step[part] for step in steps), sum(step["step_s"] for step in steps))


def within(served: Sequence[Line], steps: Sequence[Line]) -> list[Line]:
    """Requests that should have come while one of these steps played."""
    spans = sorted((step["began_s"], step["began_s"] + step["rollout_s"]) for step in steps)
    begins = [begin for begin, _ in spans]
    ends = list(itertools.accumulate((end for _, end in spans), max, initial=-math.inf))  # [n]: the latest of n spans
    return [row for row in served if row["at_s"] <= ends[bisect_right(begins, row["at_s"])]]


def attainment(served: Sequence[Line]) -> float | None:
    verdicts = judged(served)
    return round(sum(verdicts) / len(verdicts), 6) if verdicts else None


def judged(served: Sequence[Line]) -> list[bool]:
    """Those that had a chance; what the run itself cut off had none."""
    return [row["attained"] for row in served if row["attained"] is not None]


def percentile(values: Sequence[float | None], percent: float) -> float | None:
    """By nearest rank, of those that are known."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return known[max(0, math.ceil(len(known) * percent / 100) - 1)]


def _tail(values: Sequence[float | None]) -> float | None:
    return percentile(values, 99)


def _by_pool(steps: Sequence[Line]) -> dict[str, int]:
    return {kind: sum(step["turns_by_pool"].get(kind, 0) for step in steps) for kind in ("dedicated", "borrowed")}


def _rate(steps: Sequence[Line]) -> float | None:
    return _ratio(sum(step["trajectories"] for step in steps), sum(step["step_s"] for step in steps))


def _ratio(above: float, below: float) -> float | None:
    return round(above / below, 4) if below else None


def _median(values: Sequence[float], digits: int = 4) -> float | None:
    return round(statistics.median(values), digits) if values else None


def _known(steps: Sequence[Line], key: str) -> list[Any]:
    """Older runs did not write everything."""
    return [step[key] for step in steps if step.get(key) is not None]
