"""The paper's end-to-end table by the simulator of whole jobs: every competitor as a policy of the same simulator.

Set-ups, workload and constants are in `reproduction/setups.py`, each stated once; none is tuned to a cell. Every cell
is a ratio within a seed, with its mean and 95 % interval over three seeds. Nothing here was measured on a GPU. The 32B
set-up is played at a quarter of its size (trainers, workers and groups). Without --data a seeded generator stands in
for the recorded serving traffic, and `traffic` in the JSON says so.

    python benchmarks/paper.py --data FOLDER --json FILE       or set ROSE_DATA
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import harness
from reproduction import competitors, setups, sharing
from reproduction.comparison import (
    BOUND_SHARE,
    CELLS,
    RATIO_MIN,
    REPRODUCED,
    SetupRuns,
    cell_row,
    job_rows,
    sharing_rows,
)
from reproduction.setups import PaperSetup
from reproduction.sharing import Shared
from scheduling import traffic

from rose.sim.routing_bound import alone_s

SEEDS, QUICK_SEEDS = 3, 2
STEPS, QUICK_STEPS = 2, 1
DEVICES, SPAN_S = 2, 130.0  # per seed and way of sharing; distinct ones, the others are the same at another time
QUICK_DEVICES, QUICK_SPAN_S = 1, 90.0
LONGEST_OF = 64  # groups, to find the longest trajectory
ALLOCATION_MAX = 0.003
TABLE = ("setup", "against", "paper_figure", "paper_rules", "paper_rules_low", "paper_rules_high", "ours", "ours_low",
         "ours_high", "ours_over_paper_rules", "longest_share")  # fmt: skip
SHARED = ("setup", "way", "requests", "lent_share", "ttft_p99_ms", "tpot_p99_ms", "attainment")
JOBS = ("setup", "competitor", "trained_per_s", "rollout_s", "train_s", "rollout_share", "allocation_share",
        "demand_ratio", "evictions")  # fmt: skip


def options() -> Any:
    parser = harness.parser(__doc__ or "")
    data = os.environ.get("ROSE_DATA")
    parser.add_argument("--data", type=Path, default=Path(data) if data else None, help="folder of recorded data")
    parser.add_argument("--setups", nargs="+", choices=["8b", "32b"], default=["8b", "32b"])
    return parser.parse_args()


def measure(setup: PaperSetup, trace: traffic.Trace, arguments: Any) -> SetupRuns:
    is_quick, runs = arguments.quick, SetupRuns({}, {}, [])
    steps, seeds = (QUICK_STEPS, QUICK_SEEDS) if is_quick else (STEPS, SEEDS)
    devices, span_s = (QUICK_DEVICES, QUICK_SPAN_S) if is_quick else (DEVICES, SPAN_S)
    rate = sharing.rate_of(setup, trace)
    for seed in range(arguments.seed, arguments.seed + seeds):
        shared: dict[str, Shared] = {}
        for way in ("alone", *sharing.WAYS):
            shared[way] = sharing.share(setup, way, trace, rate, devices, span_s, seed)
            runs.shared.setdefault(way, []).append(shared[way])
        for competitor in competitors.COMPETITORS:
            begin_s = time.perf_counter()
            found = competitors.run(competitor, setup, shared, setups.prompts(setup, seed), steps, seed)
            runs.jobs.setdefault(competitor.name, []).append(found)
            seconds = time.perf_counter() - begin_s
            print(f"{setup.name}, seed {seed}, {competitor.name}: {found.trained_per_s:.3f} trajectories/s, rollouts "
                  f"{found.rollout_s:.0f} s ({seconds:.0f} s)", flush=True)  # fmt: skip
        groups = (setups.tail_group(f"{number}", random.Random(seed * LONGEST_OF + number))
                  for number in range(setup.groups))  # fmt: skip
        runs.longest_s.append(max(alone_s(setup.rollout, one.turns) for group in groups for one in group))
    return runs


def bars(cells: list[dict[str, Any]], shared: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for row in cells:
        what = f"{row['setup']}, {row['against']}"
        if row["paper_figure"]:
            apart = abs(row["paper_rules"] / row["paper_figure"] - 1)
            bar = harness.wanted(f"{what}: paper's rules from the paper's figure", round(apart, 3), REPRODUCED,
                                 at_most=True)  # fmt: skip
            made.append(bar)
        least = RATIO_MIN if row["longest_share"] < BOUND_SHARE else 1.0
        made.append(harness.wanted(f"{what}: ours over the paper's rules", row["ours_over_paper_rules"], least))
    for row in jobs:
        if row["competitor"].startswith("ours") and "fixed" not in row["competitor"]:
            name = f"{row['setup']}, {row['competitor']}: allocation overhead"
            made.append(harness.wanted(name, round(row["allocation_share"], 4), ALLOCATION_MAX, at_most=True))
    ways = {(row["setup"], row["way"]): row for row in shared}
    published = {"8b": {"ttft": 7, "tpot": 16}, "32b": {"ttft": 17, "tpot": 27}}
    for setup in dict.fromkeys(row["setup"] for row in shared):
        alone, ours = ways[setup, "alone"], ways[setup, "decode"]
        for kind, percent in published[setup].items():
            added = 100 * (ours[f"{kind}_p99_ms"] / alone[f"{kind}_p99_ms"] - 1)
            name = f"{setup}: P99 {kind.upper()} added by ours, %"
            made.append(harness.wanted(name, round(added, 1), percent, at_most=True))
        lost = round(alone["attainment"] - ours["attainment"], 4)
        made.append(harness.wanted(f"{setup}: attainment lost by ours", lost, 0.002, at_most=True))
    return made


def constants() -> dict[str, Any]:
    names = ("GROUP", "LOAD", "MFU", "TRAINING_PASSES", "DELTA", "LINK_GBPS", "LINK_LATENCY_S", "COLD_START_S",
             "RELOAD_BYTES_S", "SPOT_BOOT_S", "SPOT_UP_S", "SPOT_DOWN_S", "STALENESS_MAX", "DEMAND_LOGIT")  # fmt: skip
    lengths = {name: getattr(setups.LENGTHS, name) for name in setups.LENGTHS.__struct_fields__}
    return {name.lower(): getattr(setups, name) for name in names} | {"lengths": lengths}


def main() -> int:
    arguments = options()
    begun, begin_s = harness.machine(), time.monotonic()
    trace = traffic.load(arguments.data, arguments.seed)
    print(trace.what, flush=True)
    cells, shared, jobs = [], [], []
    for setup in [one for one in setups.setups() if one.name in arguments.setups]:
        runs = measure(setup, trace, arguments)
        cells += [cell_row(cell, setup.name, runs) for cell in CELLS]
        shared += sharing_rows(setup.name, runs)
        jobs += job_rows(setup.name, runs)
    for rows, columns in ((cells, TABLE), (shared, SHARED), (jobs, JOBS)):
        print()
        harness.print_table(rows, columns)
    spent = {"seconds": round(time.monotonic() - begin_s), "cpu_seconds": round(time.process_time())}
    notes = {"traffic": trace.what, "constants": constants(), "sharing": shared, "jobs": jobs,
             "shrunk_by": {one.name: one.shrunk_by for one in setups.setups()}, **spent}  # fmt: skip
    print(f"\n{spent['seconds']} s, of them {spent['cpu_seconds']} s of the processor")
    return harness.finish(arguments, "paper", cells, bars(cells, shared, jobs), begun, **notes)


if __name__ == "__main__":
    raise SystemExit(main())
