"""The paper's end-to-end table by the simulator of whole jobs: every competitor as a policy of the same simulator.

Set-ups, workload and constants are in `reproduction/setups.py`, each stated once; none is tuned to a cell. Every cell
is a ratio within a seed, with its mean and 95 % interval over three seeds. Nothing here was measured on a GPU. Both
set-ups are played in part, the 8B one at half and the 32B one at a quarter of its size: trainers, workers and groups in
the same proportion (`--whole` for all). A seed plays one step of GRPO, the first and the last of DAPO, and two steps of
an asynchronous job after two that do not count; with --quick only GRPO. Without --data a seeded generator stands in for
the recorded serving traffic, and `traffic` in the JSON says so.

    python benchmarks/paper.py --data FOLDER --json FILE       or set ROSE_DATA
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
from reproduction import competitors, setups, sharing
from reproduction.comparison import (
    CELLS,
    RATIO_MIN,
    REPRODUCED,
    SetupRuns,
    cell_row,
    is_bound,
    job_rows,
    sharing_rows,
)
from reproduction.competitors import Competitor
from reproduction.setups import PaperSetup
from reproduction.sharing import Shared
from scheduling import traffic, trajectories
from scheduling.trajectories import Source

from rose.sim.prompt_difficulty import PromptSource
from rose.sim.routing_bound import alone_s, clairvoyant_s

SEEDS = 3
STEPS = 1
SPAN_S = 150.0  # of one device per seed and way of sharing; the others are the same at another time
QUICK_SPAN_S = 60.0
ALLOCATION_MAX = 0.003
ALGORITHMS = ("grpo", "dapo", "asynchronous")
RECORDED = ("ROLL GRPO, fixed pool", "paper's rules 1.0 GRPO", "ours GRPO")  # played with recorded agents too
TABLE = ("setup", "against", "paper_figure", "paper_rules", "paper_rules_low", "paper_rules_high", "ours", "ours_low",
         "ours_high", "ours_over_paper_rules", "longest_share", "over_bound")  # fmt: skip
SHARED = ("setup", "way", "requests", "lent_share", "ttft_p99_ms", "tpot_p99_ms", "attainment")
JOBS = ("setup", "competitor", "trained_per_s", "rollout_s", "train_s", "rollout_share", "allocation_share",
        "demand_ratio", "evictions")  # fmt: skip


def options() -> Any:
    parser = harness.parser(__doc__ or "")
    data = os.environ.get("ROSE_DATA")
    parser.add_argument("--data", type=Path, default=Path(data) if data else None, help="folder of recorded data")
    parser.add_argument("--whole", action="store_true", help="play the set-ups at their full size")
    parser.add_argument("--setups", nargs="+", choices=["8b", "32b"], default=["8b", "32b"])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, help="all, or grpo with --quick")
    arguments = parser.parse_args()
    arguments.algorithms = arguments.algorithms or list(ALGORITHMS[:1] if arguments.quick else ALGORITHMS)
    return arguments


def measure(setup: PaperSetup, trace: traffic.Trace, arguments: Any, recorded: Source | None = None) -> SetupRuns:
    """Play all competitors, or with recorded agents those of `RECORDED`."""
    is_quick, runs = arguments.quick, SetupRuns({}, {}, [], [])
    played = [one for one in competitors.COMPETITORS if one.algorithm in arguments.algorithms]
    played = [one for one in played if recorded is None or one.name in RECORDED]
    rate = sharing.rate_of(setup, trace)
    for seed in range(arguments.seed, arguments.seed + SEEDS):
        shared = share_devices(setup, trace, rate, is_quick=is_quick, played=played, seed=seed)
        for way, found in shared.items():
            runs.shared.setdefault(way, []).append(found)
        for competitor in played:
            begin_s = time.perf_counter()
            figures = competitors.run(competitor, setup, shared, prompts_of(setup, recorded, seed), STEPS, seed)
            runs.jobs.setdefault(competitor.name, []).append(figures)
            seconds = time.perf_counter() - begin_s
            print(f"{setup.name}, seed {seed}, {competitor.name}: {figures.trained_per_s:.3f} trajectories/s, rollouts "
                  f"{figures.rollout_s:.0f} s ({seconds:.0f} s)", flush=True)  # fmt: skip
        source = prompts_of(setup, recorded, seed)
        groups = [[source.group(step) for _ in range(setup.groups)] for step in range(STEPS)]
        batches = [[one for group in drawn for one in group.trajectories] for drawn in groups]
        lines = sharing.spread(shared["decode"].timelines, setup.borrowed)
        runs.longest_s.append(fmean(max(alone_s(setup.rollout, one.turns) for one in batch) for batch in batches))
        bounds_s = (clairvoyant_s(setup.rollout, setup.dedicated, lines, batch) for batch in batches)
        runs.bound_s.append(fmean(bounds_s))
    return runs


def share_devices(
    setup: PaperSetup, trace: traffic.Trace, rate: float, *, is_quick: bool, played: list[Competitor], seed: int
) -> dict[str, Shared]:
    span_s = QUICK_SPAN_S if is_quick else SPAN_S
    wanted = {competitor.supply for competitor in played}
    ways = [way for way in sharing.WAYS if way in wanted]
    return {way: sharing.share(setup, way, trace, rate, 1, span_s, seed) for way in ("alone", *ways)}


def prompts_of(setup: PaperSetup, recorded: Source | None, seed: int) -> PromptSource:
    if recorded is None:
        return setups.prompts(setup, seed)
    return setups.recorded_prompts(recorded, setup, seed)


def bars(cells: list[dict[str, Any]], shared: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for row in cells:
        what = f"{row['setup']}, {row['against']}"
        if row["paper_figure"]:
            apart = abs(row["paper_rules"] / row["paper_figure"] - 1)
            bar = harness.wanted(f"{what}: paper's rules from the paper's figure", round(apart, 3), REPRODUCED,
                                 at_most=True)  # fmt: skip
            made.append(bar)
        least = 1.0 if is_bound(row) else RATIO_MIN
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
    agents = trajectories.load(trajectories.FILES[0], arguments.data, arguments.seed)
    cells, shared, jobs = [], [], []
    played = setups.SETUPS if arguments.whole else setups.shrunk_setups()
    for setup in [one for one in played if one.name in arguments.setups]:
        runs = measure(setup, trace, arguments)
        cells += [cell_row(cell, setup.name, runs) for cell in CELLS if cell.names <= runs.jobs.keys()]
        shared += sharing_rows(setup.name, runs)
        jobs += job_rows(setup.name, runs)
        if setup.name == "8b" and not arguments.quick:
            name = f"{setup.name}, {agents.what}"
            runs = measure(setup, trace, arguments, agents)
            cells += [cell_row(CELLS[0], name, runs)]
            jobs += job_rows(name, runs)
    for rows, columns in ((cells, TABLE), (shared, SHARED), (jobs, JOBS)):
        print()
        harness.print_table(rows, columns)
    spent = {"seconds": round(time.monotonic() - begin_s), "cpu_seconds": round(time.process_time())}
    notes = {"traffic": trace.what, "constants": constants(), "sharing": shared, "jobs": jobs,
             "shrunk_by": {one.name: one.shrunk_by for one in played}, **spent}  # fmt: skip
    print(f"\n{spent['seconds']} s, of them {spent['cpu_seconds']} s of the processor")
    return harness.finish(arguments, "paper", cells, bars(cells, shared, jobs), begun, **notes)


if __name__ == "__main__":
    raise SystemExit(main())
