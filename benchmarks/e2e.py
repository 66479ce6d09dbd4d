"""End to end: does a small model learn while a device serves users, and what is the borrowed device worth?

Two runs of `rose run`, as a user would start them. The `default` job shows learning: held-out success before and after.
The `rollout-heavy` job alternates steps with and without the borrowed device (with, without, without, with), while
users are served in both; from it come the ratios. Nothing is simulated and nothing waits on purpose: rollouts take
their share of a step because turns are forty tokens and more, groups are large, and few members of each are trained on.

The ideal ratio is 1 / ((1 - s) + s / (1 + i d)): s is the rollout share of a step without borrowing, i the share of the
borrowed core that serving alone leaves idle, d the speed of a core while the other one is busy over its speed alone.
s and i are taken from the steps without the device; d is measured here, with the arithmetic of a small model.
"""

from __future__ import annotations

import json
import os
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

PART_S = 1.0  # one measurement of a core's speed
REPEATS = 5
BURN = "--burn"  # how this file is started as the other core's work
COLUMNS = (
    "profile", "steps", "success_before", "success_after", "rollout_share", "rollout_speedup", "throughput_ratio",
    "throughput_ratio_low", "throughput_ratio_high", "ideal_ratio", "ratio_of_ideal", "serving_attainment",
    "serving_attainment_alone", "control_cpu_ms_per_turn", "weight_sync_s", "cost_per_correct",
    "cost_per_correct_fixed", "lost", "doubled",
)  # fmt: skip
OVERALL = (
    "rollout_share", "rollout_speedup", "rollout_speedup_low", "rollout_speedup_high", "throughput_ratio",
    "throughput_ratio_low", "throughput_ratio_high", "idle_share", "busy_speed", "ideal_ratio", "ratio_of_ideal",
    "serving_attainment", "serving_attainment_alone", "control_cpu_ms_per_turn", "cpu_s_by_role", "weight_sync_s",
    "cost_per_correct", "cost_per_correct_fixed",
)  # fmt: skip


def main() -> int:
    arguments = harness.parser(__doc__ or "").parse_args()
    begun = harness.machine()
    speed = busy_speed()
    with tempfile.TemporaryDirectory(prefix="rose-e2e-") as runs:
        learning = job(Path(runs), "default", arguments.seed, [f"steps={10 if arguments.quick else 20}"])
        heavy_steps = 4 if arguments.quick else 16
        heavy = job(Path(runs), "rollout-heavy", arguments.seed, [f"steps={heavy_steps}", "compare=true"])
    rows = [
        with_ideal({"profile": "default"} | learning, speed),
        with_ideal({"profile": "rollout-heavy"} | heavy, speed),
    ]
    harness.print_table(rows, COLUMNS)
    overall = {key: rows[1].get(key) for key in OVERALL}
    overall |= {key: rows[0][key] for key in ("success_before", "success_after")}
    overall |= {key: sum(row[key] or 0 for row in rows) for key in ("lost", "doubled")}
    return harness.finish(arguments, "e2e", rows, bars(rows[0], rows[1]), begun, **overall)


def bars(default: dict[str, Any], heavy: dict[str, Any]) -> list[dict[str, Any]]:
    wanted = harness.wanted
    alone = heavy["serving_attainment_alone"]
    lost_points = None if alone is None else round(100 * (alone - (heavy["serving_attainment"] or 0.0)), 3)
    return [
        wanted("held-out success after the default job", default["success_after"], 0.6),
        wanted("rollout share of a step, rollout-heavy", heavy["rollout_share"], 0.7),
        wanted("rollouts, without / with the borrowed device", heavy["rollout_speedup"], 1.4),
        wanted("whole steps, without / with", heavy["throughput_ratio"], 1.3),
        wanted("of the ideal", heavy["ratio_of_ideal"], 0.85),
        wanted("points of serving attainment lost", lost_points, 0.2, at_most=True),
        wanted("control CPU per turn, ms", heavy["control_cpu_ms_per_turn"], 1.5, at_most=True),
        wanted("trajectories lost", default["lost"] + heavy["lost"], 0, at_most=True),
        wanted("trajectories counted twice", default["doubled"] + heavy["doubled"], 0, at_most=True),
    ]


def job(runs: Path, profile: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One run, as a user starts it; its summary."""
    given = [f"runs={runs}", f"profile={profile}", f"seed={seed}", *overrides]
    command = [sys.executable, "-m", "rose", "run", "--name", profile]
    command += [word for override in given for word in ("--set", override)]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads((runs / profile / "summary.json").read_text())
    return found


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
