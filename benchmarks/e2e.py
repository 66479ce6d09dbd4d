"""End to end: does a small model learn while a device serves users, and what is the borrowed device worth?

Runs of `rose run`, as a user would start them. The `default` job shows learning: held-out success before and after. The
`rollout-heavy` job alternates steps with and without the borrowed device (with, without, without, with), while users
are served in both; from it come the ratios. Nothing is simulated and nothing waits on purpose: rollouts take their
share of a step because turns are forty tokens and more, groups are large, and few members of each are trained on. Its
users keep the device busy for about a fifth of the time (`--traffic`); `serving_load` is what it was.

A third job has a restless owner, who takes the device back every few seconds, under running turns, and offers it again:
from it comes the share of the run's time in which a device was wanted and not usable, or on its way back. It is counted
from the moment that the owner is asked, and over at least `--cycles` of borrowing and giving back.

Each is run with a fixed number of groups (`grpo`) and with dynamic sampling (`dapo`: others are drawn for groups in
which all went alike), synchronous and asynchronous: there rollouts never stop, their share of a step is 1, and a step's
tokens are those that were generated while it lasted. That is nine jobs of two to eight minutes. `--quick` has three:
dapo, synchronous. `--list` names them, and `--runs FOLDER --only NAME` runs them one by one (benchmarks/pieces.py).

The ideal ratio is 1 / ((1 - s) + s / (1 + i d)): s is the rollout share of a step without borrowing, i the share of the
borrowed core that serving alone leaves idle, d the speed of a core while the other one is busy over its speed alone.
s and i are taken from the steps without the device; d is measured here, with the arithmetic of a small model. It is
that of synchronous steps: an asynchronous trainer never leaves the dedicated worker its core alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before numpy is imported: it is read then

import harness  # noqa: E402
import numpy as np  # noqa: E402
import pieces  # noqa: E402

PART_S = 1.0  # one measurement of a core's speed
REPEATS, REPEATS_QUICK = 5, 3
BURN = "--burn"  # how this file is started as the other core's work
PROFILES, LOSSES, SYNCS = ("default", "rollout-heavy"), ("grpo", "dapo"), ("synchronous", "asynchronous")
STEPS = {"default": (20, 5), "rollout-heavy": (16, 4)}  # and quick
TRAFFIC = "gamma:rate=6.5,cv=2"  # keeps the serving model of a run busy for a fifth of the time on the machine we have
LOAD_MIN = 0.15
SHIPPED = ("dapo", "synchronous")  # what `rose run` does if nothing else is said
LEARN, COMPARE, CYCLES = "learn", "compare", "cycles"  # what a job is for
OWNER_LENDS_S, OWNER_KEEPS_S = (12.0, 3.0), 1.0  # and quick: then coming and going takes a larger share
STEP_S_MIN = 8.0  # of rollout-heavy, on the quickest machine seen: so many steps are sure to have the cycles wanted
COLUMNS = (
    "profile", "case", "loss", "sync", "steps", "success_before", "success_after", "rollout_share", "rollout_speedup",
    "throughput_ratio", "throughput_ratio_low", "throughput_ratio_high", "ideal_ratio", "ratio_of_ideal",
    "serving_load", "serving_attainment", "serving_attainment_alone", "control_cpu_ms_per_turn", "weight_sync_s",
    "staleness_max", "cost_per_correct", "cost_per_correct_fixed", "allocation_overhead_share", "borrow_cycles",
    "lost", "doubled", "took_s",
)  # fmt: skip
OVERALL = (
    "rollout_share", "rollout_speedup", "rollout_speedup_low", "rollout_speedup_high", "throughput_ratio",
    "throughput_ratio_low", "throughput_ratio_high", "idle_share", "serving_load", "busy_speed", "ideal_ratio",
    "ratio_of_ideal", "serving_attainment", "serving_attainment_alone", "control_cpu_ms_per_turn", "cpu_s_by_role",
    "weight_sync_s",
    "cost_per_correct", "cost_per_correct_fixed", "allocation_overhead_share", "borrow_cycles", "pause_s",
)  # fmt: skip
ALLOCATION = ("allocation_overhead_share", "borrow_cycles")
MEASURED_IN = {
    "pause_s": "no worker told how long its turns stood still for new weights",
    "allocation_overhead_share": "no device was borrowed and given back while the run went",
}
"""What only some runs write down, and what it means if one has not."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run; `case` is what it is for."""

    profile: str
    case: str
    loss: str
    sync: str

    @property
    def name(self) -> str:
        return f"{self.profile}-{self.case}-{self.loss}-{self.sync}"


def main() -> int:
    arguments = options().parse_args()
    begun = harness.machine()
    jobs = {job.name: job for job in jobs_of(arguments)}
    if arguments.list:
        print("\n".join(pieces.chosen(list(jobs), arguments.only)))
        return 0
    asked = {name: asked_of(job, arguments) for name, job in jobs.items()}

    def measure(name: str, runs: Path) -> dict[str, Any]:
        speed = busy_speed(REPEATS_QUICK if arguments.quick else REPEATS)
        return with_ideal(run(jobs[name], asked[name], runs), speed)

    rows = pieces.rows_of(arguments, asked, measure)
    harness.print_table(rows, COLUMNS)
    bars = [bar for row in rows for bar in bars_of(row, arguments.cycles)] + bars_of_both(rows)
    return harness.finish(arguments, "e2e", rows, bars, begun, **overall(rows))


def options() -> argparse.ArgumentParser:
    made = harness.parser(__doc__ or "")
    made.add_argument("--profile", nargs="+", choices=PROFILES, default=list(PROFILES), help="which profiles (both)")
    made.add_argument("--loss", nargs="+", choices=LOSSES, help="with which losses (both; dapo with --quick)")
    made.add_argument("--sync", nargs="+", choices=SYNCS, help="which loops (both; synchronous with --quick)")
    made.add_argument("--asynchronous", action="store_true", help="the same as --sync asynchronous")
    made.add_argument("--steps", type=int, help="steps of each job")
    made.add_argument("--traffic", default=TRAFFIC, help=f"users of the rollout-heavy jobs ({TRAFFIC})")
    made.add_argument(
        "--cycles", type=int, default=10, help="of borrowing and giving back in a job of its own; 0: none"
    )
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of every run")
    pieces.add_options(made)
    return made


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    losses = arguments.loss or (["dapo"] if arguments.quick else list(LOSSES))
    syncs = ["asynchronous"] if arguments.asynchronous else arguments.sync
    syncs = syncs or (["synchronous"] if arguments.quick else list(SYNCS))
    jobs = [
        Job(profile, case_of(profile), loss, sync) for sync in syncs for loss in losses for profile in arguments.profile
    ]
    if arguments.cycles and "rollout-heavy" in arguments.profile:
        jobs.append(Job("rollout-heavy", CYCLES, losses[-1], syncs[0]))
    return jobs


def case_of(profile: str) -> str:
    return COMPARE if profile == "rollout-heavy" else LEARN


def steps_of(job: Job, arguments: argparse.Namespace) -> int:
    if arguments.steps and job.case != CYCLES:
        return int(arguments.steps)
    if job.case == CYCLES:
        return max(4, math.ceil(arguments.cycles * (OWNER_LENDS_S[arguments.quick] + OWNER_KEEPS_S) / STEP_S_MIN))
    return STEPS[job.profile][arguments.quick]


def asked_of(job: Job, arguments: argparse.Namespace) -> list[str]:
    """The settings of its run."""
    steps = steps_of(job, arguments)
    asked = [f"profile={job.profile}", f"seed={arguments.seed}", f"steps={steps}"]
    asked += [f"train.loss.name={job.loss}", f"groups.dynamic_sampling={str(job.loss == 'dapo').lower()}"]
    asked += [f"compare={str(job.case == COMPARE).lower()}"]
    asked += [f"asynchrony.is_used={str(job.sync == 'asynchronous').lower()}"]
    asked += [f"traffic.source={arguments.traffic}"] if job.profile == "rollout-heavy" else []
    owner = [f"serving.owner_lends_s={OWNER_LENDS_S[arguments.quick]}", f"serving.owner_keeps_s={OWNER_KEEPS_S}"]
    asked += owner if job.case == CYCLES else []
    return asked + list(arguments.set)


def overall(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of a job that compares, what was learnt of one that is evaluated, allocation of its own.

    Each of the job that is like what is shipped, or the first if none is; `figures_of` names them.
    """
    jobs = {case: row for case in (COMPARE, LEARN, CYCLES) if (row := as_shipped(rows, case))}
    heavy, learning, cycles = (jobs.get(case, {}) for case in (COMPARE, LEARN, CYCLES))
    found = {key: heavy.get(key) for key in OVERALL}
    found |= {key: (cycles or heavy).get(key) for key in ALLOCATION}
    found |= {key: learning.get(key) for key in ("success_before", "success_after")}
    found["ratios"] = {
        f"{row['loss']}, {row['sync']}": row["throughput_ratio"] for row in rows if row["case"] == COMPARE
    }
    found["figures_of"] = {case: Job(row["profile"], case, row["loss"], row["sync"]).name for case, row in jobs.items()}
    found |= {f"{key}_reason": why for key, why in MEASURED_IN.items() if found[key] is None}
    return found | {key: sum(row[key] or 0 for row in rows) for key in ("lost", "doubled")}


def as_shipped(rows: list[dict[str, Any]], case: str) -> dict[str, Any]:
    of_case = [row for row in rows if row["case"] == case]
    shipped = [row for row in of_case if (row["loss"], row["sync"]) == SHIPPED]
    return next(iter([*shipped, *of_case]), {})


def bars_of(row: dict[str, Any], cycles: int = 0) -> list[dict[str, Any]]:
    name, wanted = f"{row['profile']}, {row['loss']}, {row['sync']}", harness.wanted
    if row["case"] == CYCLES:
        name += ", restless owner"
    bars = [
        wanted(f"{name}: trajectories lost", row["lost"], 0, at_most=True),
        wanted(f"{name}: trajectories counted twice", row["doubled"], 0, at_most=True),
    ]
    if row["case"] == LEARN:
        is_judged = (row["loss"], row["sync"]) == SHIPPED and row["steps"] >= STEPS["default"][0]
        return [wanted(f"{name}: held-out success after", row["success_after"], 0.6), *bars] if is_judged else bars
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
        wanted(f"{name}: share of time that serving alone is busy", row["serving_load"], LOAD_MIN),
        wanted(f"{name}: points of serving attainment lost", lost_points, 0.2, at_most=True),
        wanted(f"{name}: control CPU per turn, ms", row["control_cpu_ms_per_turn"], 1.5, at_most=True),
    ]


def bars_of_both(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dynamic sampling gains at least what a fixed number of groups does, within the interval."""
    bars = []
    for sync in SYNCS:
        by_loss = {row["loss"]: row for row in rows if row["case"] == COMPARE and row["sync"] == sync}
        if set(by_loss) == set(LOSSES):
            highest = by_loss["dapo"]["throughput_ratio_high"] or by_loss["dapo"]["throughput_ratio"]
            what = f"dapo gains what grpo does, {sync} (upper end)"
            bars.append(harness.wanted(what, highest, by_loss["grpo"]["throughput_ratio"]))
    return bars


def run(job: Job, asked: list[str], runs: Path) -> dict[str, Any]:
    """As a user starts it; its summary."""
    command = [sys.executable, "-m", "rose", "run", "--name", job.name, "--set", f"runs={runs}"]
    pieces.ran([*command, *(word for setting in asked for word in ("--set", setting))])
    found: dict[str, Any] = json.loads((runs / job.name / "summary.json").read_text())
    row = {"profile": job.profile, "case": job.case, "loss": job.loss, "sync": job.sync} | found
    row["serving_load"] = None if found["idle_share"] is None else round(1 - found["idle_share"], 4)
    return row | {f"{key}_reason": why for key, why in MEASURED_IN.items() if row[key] is None}


def ideal_ratio(rollout_share: float, idle_share: float, busy_speed: float) -> float:
    """Return the best speedup of a step that one borrowed core can give.

    Only the rollout share of a step can be made quicker. What is added is the share of the borrowed core that serving
    leaves idle, at the speed that a core has while the other is busy.
    """
    return 1 / ((1 - rollout_share) + rollout_share / (1 + idle_share * busy_speed))


def with_ideal(row: dict[str, Any], speed: float) -> dict[str, Any]:
    row |= {"busy_speed": speed, "ideal_ratio": None, "ratio_of_ideal": None}
    if row["sync"] == "asynchronous":
        row["ideal_ratio_reason"] = "its trainer computes on the dedicated worker's core all the time: no such formula"
    elif row["throughput_ratio"] is not None and row["idle_share"] is not None:
        ideal = ideal_ratio(row["rollout_share"], row["idle_share"], speed)
        row |= {"ideal_ratio": round(ideal, 4), "ratio_of_ideal": round(row["throughput_ratio"] / ideal, 4)}
    return row


@cache
def busy_speed(repeats: int) -> float:
    """The speed of the last core while the first computes, over its speed while the first is idle."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return 1.0
    os.sched_setaffinity(0, {cores[-1]})
    ratios = []
    try:
        for _ in range(repeats):
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
