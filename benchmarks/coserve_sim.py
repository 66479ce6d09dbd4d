"""What lending costs serving's users and what it brings, in virtual time: what a live run is too short and noisy for.

    python benchmarks/coserve_sim.py --data FOLDER      FOLDER/traces; or set ROSE_DATA

One device on the CPU profiles, step by step, with the lender of a live device (`rose.sim.device`): the rules of
`core.admission` under noise and a cost of changing sides, rollouts in a closed loop of 32 trajectories. Every mode
meets the same requests. Serving alone runs twice, with other noise; the differences are to its two runs pooled, in
points of attainment, over all requests of all seeds; `aa_points` is how far the two are apart themselves.

    calm    pieces of the trace at 20, 50 and 80 % of what serving alone can do
    worst   95 to 110 % of it, drawn anew every ten seconds, rollouts pending throughout: the case of `coserve.py
            --worst-case`, whose queue is a random walk, so that two live runs of serving alone differ by points
    edge    the same at nine tenths of that load, where serving alone still keeps most of its promises, as it did in the
            live runs: a little time lost there costs most

Pages and HTTP are not simulated. Nothing here is a measurement of a machine; `coserve.py` is.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import harness
from coserving.calibrate import steady_rate
from coserving.traffic import at_rate, cut, sample, scaled, worst_case

from rose.core.admission import Mode
from rose.core.slo import Budgets
from rose.engines.base import Request, Sampling
from rose.load.formats import read_trace
from rose.load.generators import generated
from rose.load.traces import Trace
from rose.sim.device import GIVEN, Device, Report, World

TRACES = ("azure2023_conv", "azure2023_code", "servegen_r1_quiethour")
GENERATED = "gamma:rate=2,cv=2"
CONTEXT_TOKENS = 4096
SATURATED = 700
LOADS = (0.2, 0.5, 0.8)
CALM_MODES = ("alone_1", "alone_2", "decode", "idle", "paper")
WORST_MODES = (*CALM_MODES, "alternate", "fcfs")
OVERLOADS = {"worst": 1.0, "edge": 0.9}  # of the worst case's load
FRESH = 104_729  # seeds that nothing was tuned on
WORST_TOLERANCE, TOLERANCE = 0.5, 0.2  # points
COLUMNS = (
    "trace", "load", "mode", "seeds", "requests", "attainment", "points_to_alone", "aa_points", "ttft_p99_ms",
    "tpot_p99_ms", "rollout_tok_s", "lending_gain", "lent_share", "serving_time_share", "breaches",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace as the simulated device takes it: every request a tenant of its own, so none finds another's prefix."""

    trace: Trace

    def arrivals(self, seed: int, until_s: float) -> list[tuple[float, Request]]:
        del seed  # the requests are given
        columns = zip(self.trace.arrival_s, self.trace.prompt_tokens, self.trace.output_tokens, strict=True)
        return [
            (float(at_s), _request(number, float(at_s), int(prompt), int(output)))
            for number, (at_s, prompt, output) in enumerate(columns)
            if at_s <= until_s
        ]


def _request(number: int, at_s: float, prompt_tokens: int, output_tokens: int) -> Request:
    name, sampling = f"serving {number}", Sampling(max_tokens=output_tokens, ignore_eos=True, seed=number)
    return Request(name, tuple(range(prompt_tokens)), sampling, tenant=name, arrival_s=at_s)


@dataclass(frozen=True, slots=True)
class Case:
    """One trace at one load: a piece of it, or a worst case, for every seed."""

    trace: str
    load: str
    seeds: int
    span_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where the traces are; a seed for those that are made up."""

    folder: Path | None
    seed: int

    def path(self, name: str) -> Path | None:
        found = self.folder / "traces" / "recorded" / f"{name}.csv.gz" if self.folder is not None else None
        return found if found is not None and found.exists() else None


@cache
def _trace(place: Place, name: str) -> Trace:
    path = place.path(name)
    return scaled(read_trace(path) if path else generated(GENERATED, seed=place.seed, requests=4000), CONTEXT_TOKENS)


@cache
def _capacity_rps(place: Place, name: str) -> float:
    """The rate at which serving alone begins to answer when more wait than it can run."""
    heap = sample(_trace(place, name), SATURATED)
    report = Device(World(None, Replay(heap), until_s=1.0)).run()
    return steady_rate([served.first_token_s for served in report.served])


def _requests(place: Place, case: Case, number: int) -> Trace:
    trace, capacity_rps = _trace(place, case.trace), _capacity_rps(place, case.trace)
    if case.load in OVERLOADS:
        return worst_case(trace, OVERLOADS[case.load] * capacity_rps, FRESH + place.seed + number, case.span_s)
    rate_rps = capacity_rps * float(case.load.removeprefix("capacity:"))
    first, count = number * len(trace) // case.seeds, max(2, round(rate_rps * case.span_s))
    return cut(at_rate(trace, rate_rps), first, min(len(trace), first + count))


def simulate(place: Place, case: Case, mode: str, number: int, budgets: Budgets = GIVEN) -> Report:
    lends: Mode | None = None if mode.startswith("alone") else mode  # type: ignore[assignment]
    noise = number + (1 << 20 if mode == "alone_2" else 0)
    requests = Replay(_requests(place, case, number))
    return Device(World(lends, requests, seed=noise, until_s=case.span_s, budgets=budgets)).run()


@dataclass(slots=True)
class Tally:
    """What came of one mode over all seeds of a case."""

    requests: int
    kept: int
    row: dict[str, Any]


def _tally(mode: str, reports: Sequence[Report], budgets: Budgets) -> Tally:
    served = [one for report in reports for one in report.served]
    requests = len(served) + sum(report.rejected for report in reports)
    kept = sum(one.keeps(budgets) for one in served)
    seconds = sum(report.end_s for report in reports)
    row = {
        "mode": mode,
        "seeds": len(reports),
        "requests": requests,
        "attainment": round(kept / requests, 5),
        "ttft_p99_ms": round(1000 * _p99([one.ttft_s for one in served]), 1),
        "tpot_p99_ms": round(1000 * _p99([one.tpot_s for one in served]), 1),
        "rollout_tok_s": round(sum(report.rollout_tokens for report in reports) / seconds, 1),
        "lent_share": round(sum(report.lent_s for report in reports) / seconds, 4),
        "serving_time_share": round(sum(report.serving_s for report in reports) / seconds, 4),
        "breaches": sum(len(report.breaches) for report in reports),
    }
    return Tally(requests, kept, row)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def calibrated(reports: Sequence[Report]) -> Budgets:
    """Twice what 99 in 100 requests of serving alone needed."""
    served = [one for report in reports for one in report.served]
    return Budgets(2 * _p99([one.ttft_s for one in served]), 2 * _p99([one.tpot_s for one in served]))


def rows_of(
    place: Place, case: Case, pool: ProcessPoolExecutor, *, is_calibrated: bool = False
) -> list[dict[str, Any]]:
    budgets = GIVEN
    if is_calibrated:
        alone = [pool.submit(simulate, place, case, "alone_1", n) for n in range(case.seeds)]
        budgets = calibrated([one.result() for one in alone])
    modes = WORST_MODES if case.load in OVERLOADS else CALM_MODES
    asked = {mode: [pool.submit(simulate, place, case, mode, n, budgets) for n in range(case.seeds)] for mode in modes}
    found = {mode: _tally(mode, [one.result() for one in runs], budgets) for mode, runs in asked.items()}
    first, second = (found[mode].kept / found[mode].requests for mode in ("alone_1", "alone_2"))
    idle_tok_s = found["idle"].row["rollout_tok_s"]
    source = case.trace if place.path(case.trace) else f"generated: {GENERATED}"
    rows = []
    for tally in found.values():
        points = 100 * (tally.kept / tally.requests - (first + second) / 2)
        gain = round(tally.row["rollout_tok_s"] / idle_tok_s, 3) if idle_tok_s and tally.row["rollout_tok_s"] else None
        named = {
            "trace": source,
            "load": case.load,
            "capacity_rps": round(_capacity_rps(place, case.trace), 2),
            "budget_ttft_ms": round(1000 * budgets.ttft_s, 1),
            "budget_tpot_ms": round(1000 * budgets.tpot_s, 1),
        }
        compared = {"points_to_alone": round(points, 3), "aa_points": round(100 * abs(first - second), 3)}
        rows.append(named | tally.row | compared | {"lending_gain": gain})
    return rows


def bars_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    bars = []
    for row in rows:
        if row["mode"] != "decode":
            continue
        allowed = max(WORST_TOLERANCE if row["load"] in OVERLOADS else TOLERANCE, row["aa_points"])
        what = f"decode, {row['trace']} at {row['load']}: attainment less that of serving alone, points"
        bars.append(harness.wanted(what, row["points_to_alone"], -round(allowed, 3)))
    return bars


def cases(arguments: argparse.Namespace) -> list[Case]:
    seeds, calm_s, worst_s = (2, 20.0, 30.0) if arguments.quick else (8, 60.0, 180.0)
    loads = [Case(trace, f"capacity:{load:g}", seeds // 2, calm_s) for trace in arguments.traces for load in LOADS]
    return loads + [Case(trace, load, seeds, worst_s) for trace in arguments.traces for load in OVERLOADS]


def main() -> int:
    options = harness.parser(__doc__ or "")
    data = Path(os.environ["ROSE_DATA"]) if "ROSE_DATA" in os.environ else None
    options.add_argument("--data", type=Path, default=data, metavar="FOLDER", help="where traces/ is (ROSE_DATA)")
    options.add_argument(
        "--traces", nargs="+", choices=TRACES, default=TRACES[:1], metavar="NAME", help=", ".join(TRACES)
    )
    options.add_argument(
        "--budget", choices=("given", "calibrated"), default="given", help="500/150 ms, or 2x P99 of serving alone"
    )
    options.add_argument(
        "--loads", nargs="+", metavar="LOAD", help="only these: capacity:0.2 and the like, worst, edge"
    )
    arguments = options.parse_args()
    begun, place, rows = harness.machine(), Place(arguments.data, arguments.seed), []
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for case in cases(arguments):
            if arguments.loads and case.load not in arguments.loads:
                continue
            rows += rows_of(place, case, pool, is_calibrated=arguments.budget == "calibrated")
            print(f"{case.trace} at {case.load} is done", flush=True)
    harness.print_table(rows, COLUMNS)
    return harness.finish(arguments, "coserve_sim", rows, bars_of(rows), begun)


if __name__ == "__main__":
    raise SystemExit(main())
