"""End to end: does a small model learn while a device serves users, and what is the borrowed device worth?

Runs of `rose run`, as a user would start them. The `default` job shows learning: held-out success before and after. The
`rollout-heavy` job alternates steps with and without the borrowed device (with, without, without, with), while users
are served in both; from it come the ratios. Nothing is simulated and nothing waits on purpose: rollouts take their
share of a step because turns are forty tokens and more, groups are large, and few members of each are trained on.

A third job has a restless owner, who takes the device back every few seconds, under running turns, and offers it again:
from it comes the share of the run's time in which a device was wanted and not usable, or on its way back. It is counted
from the moment that the owner is asked, and over at least `--cycles` of borrowing and giving back.

`--loss grpo dapo` runs each job with each: grpo has a fixed number of groups, dapo draws others for those in which all
went alike. With `--asynchronous` rollouts never stop: their share of a step is 1, and a step's tokens are those that
were generated while it lasted.

The ideal ratio is 1 / ((1 - s) + s / (1 + i d)): s is the rollout share of a step without borrowing, i the share of the
borrowed core that serving alone leaves idle, d the speed of a core while the other one is busy over its speed alone.
s and i are taken from the steps without the device; d is measured here, with the arithmetic of a small model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before numpy is imported: it is read then

import harness  # noqa: E402
import numpy as np  # noqa: E402

from rose.launch.figures import ideal_ratio  # noqa: E402
from rose.launch.watching import allocation_overhead  # noqa: E402

PART_S = 1.0  # one measurement of a core's speed
REPEATS = 5
BURN = "--burn"  # how this file is started as the other core's work
PROFILES, LOSSES = ("default", "rollout-heavy"), ("grpo", "dapo")
STEPS = {"default": (20, 10), "rollout-heavy": (16, 4)}  # and quick
LEARN, COMPARE, CYCLES = "learn", "compare", "cycles"  # what a job is for
OWNER = {"serving.owner_lends_s": 3.0, "serving.owner_keeps_s": 1.0}
STEP_S_MIN = 10.0  # of rollout-heavy, on the quickest machine seen: so many steps are sure to have the cycles wanted
COLUMNS = (
    "profile", "case", "loss", "sync", "steps", "success_before", "success_after", "rollout_share", "rollout_speedup",
    "throughput_ratio", "throughput_ratio_low", "throughput_ratio_high", "ideal_ratio", "ratio_of_ideal",
    "serving_attainment", "serving_attainment_alone", "control_cpu_ms_per_turn", "weight_sync_s", "staleness_max",
    "cost_per_correct", "cost_per_correct_fixed", "allocation_overhead_share", "borrow_cycles", "lost", "doubled",
)  # fmt: skip
OVERALL = (
    "rollout_share", "rollout_speedup", "rollout_speedup_low", "rollout_speedup_high", "throughput_ratio",
    "throughput_ratio_low", "throughput_ratio_high", "idle_share", "busy_speed", "ideal_ratio", "ratio_of_ideal",
    "serving_attainment", "serving_attainment_alone", "control_cpu_ms_per_turn", "cpu_s_by_role", "weight_sync_s",
    "cost_per_correct", "cost_per_correct_fixed", "allocation_overhead_share", "borrow_cycles", "pause_s",
)  # fmt: skip
ALLOCATION = ("allocation_overhead_share", "borrow_cycles")
MEASURED_IN = {
    "pause_s": "no worker told how long its turns stood still for new weights",
    "allocation_overhead_share": "no device was borrowed and given back while the run went",
}
"""What only some runs write down, and what it means if one has not."""


def main() -> int:
    arguments = options().parse_args()
    begun = harness.machine()
    speed = busy_speed()
    jobs = jobs_of(arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="rose-e2e-") as runs:
        for number, (profile, case, loss) in enumerate(jobs, 1):
            print(f"job {number} of {len(jobs)}: {profile}, {case}, {loss}, {sync_of(arguments)}", flush=True)
            rows.append(with_ideal(job(Path(runs), profile, case, loss, arguments), speed))
    harness.print_table(rows, COLUMNS)
    bars = [bar for row in rows for bar in bars_of(row, arguments.cycles)] + bars_of_both(rows)
    return harness.finish(arguments, "e2e", rows, bars, begun, **overall(rows))


def options() -> argparse.ArgumentParser:
    made = harness.parser(__doc__ or "")
    made.add_argument("--profile", nargs="+", choices=PROFILES, default=list(PROFILES), help="which jobs (both)")
    made.add_argument("--loss", nargs="+", choices=LOSSES, default=["dapo"], help="with which losses (dapo)")
    made.add_argument("--asynchronous", action="store_true", help="rollouts never stop")
    made.add_argument("--steps", type=int, help="steps of each job")
    made.add_argument(
        "--cycles", type=int, default=10, help="of borrowing and giving back in a job of its own; 0: none"
    )
    return made


def jobs_of(arguments: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Profile, what the job is for, loss."""
    jobs = [(profile, case_of(profile), loss) for loss in arguments.loss for profile in arguments.profile]
    if arguments.cycles and "rollout-heavy" in arguments.profile:
        jobs.append(("rollout-heavy", CYCLES, arguments.loss[-1]))
    return jobs


def case_of(profile: str) -> str:
    return COMPARE if profile == "rollout-heavy" else LEARN


def steps_of(profile: str, case: str, arguments: argparse.Namespace) -> int:
    if arguments.steps and case != CYCLES:
        return int(arguments.steps)
    if case == CYCLES:
        return max(4, math.ceil(arguments.cycles * sum(OWNER.values()) / STEP_S_MIN))
    return STEPS[profile][arguments.quick]


def sync_of(arguments: argparse.Namespace) -> str:
    return "asynchronous" if arguments.asynchronous else "synchronous"


def overall(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of the first job that compares, what was learnt of the first that is evaluated, allocation of its own."""
    heavy, learning, cycles = (
        next((row for row in rows if row["case"] == case), {}) for case in (COMPARE, LEARN, CYCLES)
    )
    found = {key: heavy.get(key) for key in OVERALL}
    found |= {key: (cycles or heavy).get(key) for key in ALLOCATION}
    found |= {key: learning.get(key) for key in ("success_before", "success_after")}
    found |= {f"{key}_reason": why for key, why in MEASURED_IN.items() if found[key] is None}
    return found | {key: sum(row[key] or 0 for row in rows) for key in ("lost", "doubled")}


def bars_of(row: dict[str, Any], cycles: int = 0) -> list[dict[str, Any]]:
    name, wanted = f"{row['profile']}, {row['loss']}", harness.wanted
    if row["case"] == CYCLES:
        name += ", restless owner"
    bars = [
        wanted(f"{name}: trajectories lost", row["lost"], 0, at_most=True),
        wanted(f"{name}: trajectories counted twice", row["doubled"], 0, at_most=True),
    ]
    if row["case"] == LEARN:
        return [wanted(f"{name}: held-out success after", row["success_after"], 0.6), *bars]
    if row["case"] == CYCLES:
        bars.append(wanted(f"{name}: devices borrowed and given back", row["borrow_cycles"], cycles))
        share = row["allocation_overhead_share"]
        return [wanted(f"{name}: allocation overhead", share, 0.004, at_most=True), *bars]
    alone = row["serving_attainment_alone"]
    lost_points = None if alone is None else round(100 * (alone - (row["serving_attainment"] or 0.0)), 3)
    is_synchronous = row["sync"] == "synchronous"
    if is_synchronous:
        bars.append(wanted(f"{name}: rollout share of a step", row["rollout_share"], 0.7))
        bars.append(wanted(f"{name}: rollouts, without / with the borrowed device", row["rollout_speedup"], 1.4))
        bars.append(wanted(f"{name}: of the ideal", row["ratio_of_ideal"], 0.88))
    return [
        wanted(f"{name}: whole steps, without / with", row["throughput_ratio"], 1.35 if is_synchronous else 1.5),
        *bars,
        wanted(f"{name}: points of serving attainment lost", lost_points, 0.2, at_most=True),
        wanted(f"{name}: control CPU per turn, ms", row["control_cpu_ms_per_turn"], 1.5, at_most=True),
    ]


def bars_of_both(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dynamic sampling gains at least what a fixed number of groups does, within the interval."""
    by_loss = {row["loss"]: row for row in rows if row["case"] == COMPARE}
    if set(by_loss) != set(LOSSES):
        return []
    highest = by_loss["dapo"]["throughput_ratio_high"] or by_loss["dapo"]["throughput_ratio"]
    return [harness.wanted("dapo gains what grpo does (upper end)", highest, by_loss["grpo"]["throughput_ratio"])]


def job(runs: Path, profile: str, case: str, loss: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, as a user starts it; its summary."""
    steps = steps_of(profile, case, arguments)
    given = [f"runs={runs}", f"profile={profile}", f"seed={arguments.seed}", f"steps={steps}"]
    given += [f"train.loss.name={loss}", f"groups.dynamic_sampling={str(loss == 'dapo').lower()}"]
    given += [f"compare={str(case == COMPARE).lower()}"]
    given += [f"{key}={value}" for key, value in OWNER.items() if case == CYCLES]
    given += [f"asynchrony.is_used={str(arguments.asynchronous).lower()}"]
    name = f"{profile}-{case}-{loss}"
    command = [sys.executable, "-m", "rose", "run", "--name", name]
    command += [word for override in given for word in ("--set", override)]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads((runs / name / "summary.json").read_text())
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    row = {"profile": profile, "case": case, "loss": loss, "sync": sync_of(arguments)} | found
    row |= {"weight_sync_s": weight_sync_s(lines, found), "pause_s": pause_s(lines)} | allocation(lines)
    return row | {f"{key}_reason": why for key, why in MEASURED_IN.items() if row[key] is None}


def allocation(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The share of the run in which a wanted device was not usable, and how often one was borrowed and given back."""
    newest = {line["number"]: line for line in lines if line["kind"] == "allocation"}
    share = allocation_overhead(lines) if newest else None
    back = [line for line in newest.values() if line.get("returned_s") is not None]
    return {"allocation_overhead_share": share, "borrow_cycles": len(back)}


def pause_s(lines: list[dict[str, Any]]) -> float | None:
    """How long turns stood still for a version, on the worker where it was longest."""
    known = [line["pause_s"] for line in lines if line["kind"] in ("step", "sync") and line.get("pause_s") is not None]
    return round(statistics.median(known), 5) if known else None


def weight_sync_s(lines: list[dict[str, Any]], summary: dict[str, Any]) -> float | None:
    """From the call of `publish` until every worker runs it; an asynchronous trainer waits for the first part only."""
    waited = {line["step"]: line["took_s"] for line in lines if line["kind"] == "sync"}
    if not waited:
        return summary["weight_sync_s"]
    steps = [line for line in lines if line["kind"] == "step" and line["verdict"] == "updated"]
    found = [line["publish_s"] + waited[line["step"]] for line in steps if line["step"] in waited]
    return round(statistics.median(found), 4) if found else None


def with_ideal(row: dict[str, Any], speed: float) -> dict[str, Any]:
    row |= {"busy_speed": speed, "ideal_ratio": None, "ratio_of_ideal": None}
    if row["throughput_ratio"] is not None and row["idle_share"] is not None:
        ideal = ideal_ratio(row["rollout_share"], row["idle_share"], speed)
        row |= {"ideal_ratio": round(ideal, 4), "ratio_of_ideal": round(row["throughput_ratio"] / ideal, 4)}
    return row


def busy_speed() -> float:
    """The speed of the last core while the first computes, over its speed while the first is idle."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return 1.0
    os.sched_setaffinity(0, {cores[-1]})
    ratios = []
    try:
        for _ in range(REPEATS):
            alone = rate()
            with subprocess.Popen([sys.executable, __file__, BURN, str(cores[0])]) as other:
                time.sleep(PART_S)  # until it computes
                ratios.append(rate() / alone)
                other.kill()
    finally:
        os.sched_setaffinity(0, cores)
    return round(float(np.median(ratios)), 4)


def rate() -> float:
    """Small matrix products per second, such as a step of a small model is made of."""
    left, right = np.ones((32, 160), np.float32), np.ones((160, 448), np.float32)
    until_s, done = time.perf_counter() + PART_S, 0
    while time.perf_counter() < until_s:
        for _ in range(50):
            left @ right
        done += 50
    return done / PART_S


def burn_for_ever(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        rate()


if __name__ == "__main__":
    if sys.argv[1:2] == [BURN]:
        burn_for_ever(int(sys.argv[2]))
    sys.exit(main())
