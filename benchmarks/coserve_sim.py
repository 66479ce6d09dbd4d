"""What lending costs serving's users and what it brings, in virtual time: what a live run is too short and noisy for.

    python benchmarks/coserve_sim.py --matrix --data FOLDER      the GPU profile: loads x budgets; FOLDER/traces
    python benchmarks/coserve_sim.py --matrix --profile cpu ...  the CPU profile, with the loads `edge` and `worst`
    python benchmarks/coserve_sim.py --hindsight --data FOLDER   fixed thresholds of running requests, chosen afterwards
    python benchmarks/coserve_sim.py --shapes                    adversarial traffic (`rose.sim.shapes`), both profiles
    python benchmarks/coserve_sim.py --shapes --hindsight        the shape `slots`, with fixed thresholds

One device, step by step, with the step arbiter of a live device (`rose.sim.simulated_device`): the rules of
`core.admission`, its circuit breaker, noise, a cost of changing sides, rollouts in a closed loop of 32 trajectories.
Every mode meets the same requests. `points` is the difference in attainment to serving alone, paired by request, with
its 95 % interval (requests that arrive within five seconds of each other are one cluster); `aa_points` and
`aa_lost` are the same between two runs of serving alone with other noise.

Budgets are multiples of the P99 of serving alone at the same load, or `given` (500 and 150 ms); users wait ten minutes
for a whole answer, as the OpenAI client does, or a minute where `given_60s` says so. `oracle_share` is the
time that a clairvoyant could lend at most: serving's work at its marginal costs, in the fewest steps. `of_bound` is the
harvest over `oracle_share` x rollouts alone. Harvest counts from the second minute on, losses from the start.
`uncounted` are requests lost beyond those that the device itself counted as breaches.

The loads `worst` and `edge` draw 95 to 110 % of capacity, and nine tenths of that, anew every ten seconds.
HTTP is not simulated. Nothing here is a measurement of a machine; `coserve.py` is.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import harness
from coserving.calibrate import steady_rate
from coserving.traffic import at_rate, cut, sample, scaled, worst_case

from rose.core.admission import Mode
from rose.core.slo import Budgets
from rose.engines.base import Request, Sampling
from rose.engines.profiles import load_profile
from rose.load.traces import Trace, capped, read_trace
from rose.sim.shapes import SCALES, SHAPES, Losses, named_losses
from rose.sim.simulated_device import DEFAULT_BUDGETS, SEQUENCES, STEP_TOKENS, Device, DeviceReport, DeviceWorld

TRACES = ("azure2023_conv", "servegen_r1_busyhour")
GPU_CONTEXT_TOKENS, CPU_CONTEXT_TOKENS = 8192, 4096  # lengths as recorded up to this; or all of them scaled to it
SATURATED = 700
LOADS = {"gpu": ("0.2", "0.5", "0.8", "0.95"), "cpu": ("0.2", "0.5", "0.8", "edge", "worst")}
OVERLOADS = {"worst": 1.0, "edge": 0.9}  # of the worst case's load
MULTIPLES = {"gpu": (1.27, 2.0, 4.0, 8.0), "cpu": (2.0,)}
COMPARED_AT = ("given",)  # budgets at which the other modes run too
OTHERS: dict[str, tuple[Mode, float]] = {"idle": ("idle", 0.7), "paper": ("paper", 1.0), "paper_0.7": ("paper", 0.7)}
FRESH = 104_729  # seeds that nothing was tuned on
CLUSTER_S = 5.0
ANSWER_S = 600.0
THRESHOLDS = (16, 24, 28, 32, 36, 40, 44, 48, 56, 63)  # of running requests, tried afterwards
SLOT_THRESHOLDS = (8, 9, 11, 13, 16)  # a burst of 50 to 56 leaves 8 to 14 of 64 slots
CELL_POINTS, POOLED_POINTS, SHAPE_POINTS = -0.5, -0.1, -0.3
OF_BOUND = {"0.2": 0.93, "0.5": 0.75, "0.8": 0.50}
LENT_SHARES = {"2x": 0.25, "4x": 0.60}
SLOTS_LENT = 0.65
COLUMNS = (
    "trace", "load", "budget", "mode", "requests", "alone", "points", "points_low", "points_high", "aa_points", "lost",
    "aa_lost", "uncounted", "ttft_p99_ms", "tpot_p99_ms", "lent_share", "oracle_share", "of_bound", "breaker_trips",
)  # fmt: skip
SHAPE_COLUMNS = (
    "profile",
    "shape",
    "mode",
    "seeds",
    "requests",
    "alone",
    "points",
    "lost",
    "aa_lost",
    "uncounted",
    "lent_share",
    "lent_later",
)


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
    """One trace on one profile at one load, in `pieces` of so many seconds."""

    folder: Path
    profile: str
    trace: str
    load: str
    pieces: int
    span_s: float
    warm_s: float

    def world(self, piece: int, **options: Any) -> DeviceWorld:
        scale = SCALES[self.profile]
        return DeviceWorld(
            traffic=Replay(_requests(self, piece)),
            until_s=self.span_s,
            warm_s=self.warm_s,
            serving=scale.serving,
            rollout=scale.rollout,
            breaks=True,
            **options,
        )


def find_trace(folder: Path, name: str) -> Path:
    found = sorted((folder / "traces").glob(f"*/{name}.csv.gz"))
    if not found:
        raise SystemExit(f"there is no trace {name} in any folder of {folder / 'traces'}; give --data or set ROSE_DATA")
    return found[0]


@cache
def _trace(folder: Path, profile: str, name: str) -> Trace:
    trace = read_trace(find_trace(folder, name))
    return scaled(trace, CPU_CONTEXT_TOKENS) if profile == "cpu" else capped(trace, GPU_CONTEXT_TOKENS)


@cache
def _capacity_rps(folder: Path, profile: str, name: str) -> float:
    """The rate at which serving alone begins to answer when more wait than it can run."""
    heap, scale = sample(_trace(folder, profile, name), SATURATED), SCALES[profile]
    world = DeviceWorld(None, Replay(heap), until_s=1.0, serving=scale.serving, rollout=scale.rollout)
    return steady_rate([served.first_token_s for served in Device(world).run().served])


def _requests(case: Case, piece: int) -> Trace:
    trace, capacity_rps = (
        _trace(case.folder, case.profile, case.trace),
        _capacity_rps(case.folder, case.profile, case.trace),
    )
    if case.load in OVERLOADS:
        return worst_case(trace, OVERLOADS[case.load] * capacity_rps, FRESH + piece, case.span_s)
    rate_rps = capacity_rps * float(case.load)
    first, count = piece * len(trace) // case.pieces, max(2, round(rate_rps * case.span_s))
    return cut(at_rate(trace, rate_rps), first, min(len(trace), first + count))


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one piece: (arrival, TTFT, TPOT) by request, and what the device lent and counted."""

    times: dict[str, tuple[float, float, float]]
    rejected: int
    window_s: float
    lent_s: float
    tokens: int
    least_s: float
    counted: int
    trips: int


def simulate(
    case: Case, mode: Mode | None, budgets: Budgets, piece: int, noise: int = 0, threshold: int | None = None
) -> Run:
    world = case.world(piece, mode=mode, budgets=budgets, seed=piece, noise_seed=noise, threshold=threshold)
    device = Device(replace(world, breaks=threshold is None))
    report = device.run()
    return Run(
        {one.request.request_id: (one.request.arrival_s, one.ttft_s, one.tpot_s) for one in report.served},
        report.rejected,
        report.window_s,
        report.window_lent_s,
        report.window_rollout_tokens,
        least_serving_s(SCALES[case.profile].serving, report),
        sum(breach.objective != "step" for breach in report.breaches),
        device.breaker.trips if device.breaker is not None else 0,
    )


def least_serving_s(profile_name: str, report: DeviceReport) -> float:
    """No schedule serves the window's work in less: all marginal costs once, in the fewest possible steps."""
    profile, work = load_profile(profile_name), report.window_work
    steps = max(work.new_tokens / STEP_TOKENS, work.sequences / SEQUENCES)
    compute_s = (
        profile.per_new_token_s * work.new_tokens
        + profile.per_new_by_context_s * work.new_by_context
        + profile.per_sequence_s * work.sequences
    )
    memory_s = profile.weights_read_s * steps + profile.per_kv_read_token_s * work.kv_read_tokens
    work_s = max(compute_s, memory_s) if profile.shape == "roofline" else compute_s + memory_s
    return profile.fixed_s * steps + work_s


@cache
def rollouts_alone_tok_s(profile: str) -> float:
    """The rollouts' pace with the device to themselves."""
    scale, span_s = SCALES[profile], 20.0
    last = Replay(Trace("one", *(_column(value) for value in (span_s, 1, 1)), prompt_p99_tokens=1.0))
    world = DeviceWorld("idle", last, until_s=span_s, serving=scale.serving, rollout=scale.rollout)
    report = Device(world).run()
    return report.rollout_tokens / report.end_s


def _column(value: float) -> Any:
    import numpy as np

    return np.array([value])


# Figures


def keeps(times: tuple[float, float, float], budgets: Budgets) -> bool:
    return times[1] <= budgets.ttft_s and times[2] <= budgets.tpot_s


def paired(alone: Sequence[Run], lent: Sequence[Run], budgets: Budgets) -> dict[str, float]:
    """Attainment of `lent` less that of `alone` in points, with its 95 % interval over clusters of arrivals."""
    clusters: dict[tuple[int, int], int] = {}
    sizes: dict[tuple[int, int], int] = {}
    kept = lost = 0
    for piece, (before, after) in enumerate(zip(alone, lent, strict=True)):
        for name, times in before.times.items():
            was, now = keeps(times, budgets), name in after.times and keeps(after.times[name], budgets)
            key = (piece, int(times[0] / CLUSTER_S))
            clusters[key] = clusters.get(key, 0) + now - was
            sizes[key] = sizes.get(key, 0) + 1
            kept, lost = kept + was, lost + (was and not now)
    requests = sum(sizes.values())
    mean = sum(clusters.values()) / requests
    error = math.sqrt(sum((total - mean * sizes[key]) ** 2 for key, total in clusters.items())) / requests
    return {
        "requests": requests,
        "alone": round(100 * kept / requests, 3),
        "points": round(100 * mean, 3),
        "points_low": round(100 * (mean - 1.96 * error), 3),
        "points_high": round(100 * (mean + 1.96 * error), 3),
        "lost": lost,
    }


def row_of(case: Case, budget: str, mode: str, alone: Sequence[Run], runs: Sequence[Run], budgets: Budgets) -> Any:
    window_s = sum(run.window_s for run in runs)
    oracle = max(0.0, 1 - sum(run.least_s for run in alone) / window_s)
    most_tok_s = oracle * rollouts_alone_tok_s(case.profile)
    figures = paired(alone, runs, budgets)
    counted = sum(run.counted for run in runs)
    tok_s = sum(run.tokens for run in runs) / window_s
    return {
        "profile": case.profile,
        "trace": case.trace,
        "load": case.load,
        "budget": budget,
        "budget_ttft_ms": round(1000 * budgets.ttft_s, 1),
        "budget_tpot_ms": round(1000 * budgets.tpot_s, 2),
        "mode": mode,
        **figures,
        "uncounted": max(0, int(figures["lost"]) - counted),
        "counted": counted,
        "ttft_p99_ms": round(1000 * _p99(times[1] for run in runs for times in run.times.values()), 1),
        "tpot_p99_ms": round(1000 * _p99(times[2] for run in runs for times in run.times.values()), 2),
        "rollout_tok_s": round(tok_s, 1),
        "lent_share": round(sum(run.lent_s for run in runs) / window_s, 4),
        "oracle_share": round(oracle, 4),
        "of_bound": round(tok_s / most_tok_s, 3) if most_tok_s else None,
        "breaker_trips": sum(run.trips for run in runs),
    }


def _p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def budgets_of(profile: str, alone: Sequence[Run]) -> dict[str, Budgets]:
    ttft_s, tpot_s = (_p99(times[i] for run in alone for times in run.times.values()) for i in (1, 2))
    given = replace(DEFAULT_BUDGETS, answer_s=ANSWER_S)
    found = {"given": given, "given_60s": DEFAULT_BUDGETS}
    for multiple in MULTIPLES[profile]:
        found[f"{multiple:g}x"] = replace(given, ttft_s=multiple * ttft_s, tpot_s=multiple * tpot_s)
    return found


def rows_of(case: Case, pool: ProcessPoolExecutor, *, is_quick: bool = False) -> list[dict[str, Any]]:
    pieces = range(case.pieces)
    one, two = (
        [run.result() for run in [pool.submit(simulate, case, None, DEFAULT_BUDGETS, piece, noise) for piece in pieces]]
        for noise in (0, 1)
    )
    rows, asked = [], []
    for budget, budgets in budgets_of(case.profile, one).items():
        modes: dict[str, tuple[Mode, float]] = {"decode": ("decode", DEFAULT_BUDGETS.slack_share)}
        if budget in COMPARED_AT and not is_quick:
            modes |= OTHERS
        rows.append(row_of(case, budget, "alone_2", one, two, budgets))
        for name, (mode, share) in modes.items():
            terms = replace(budgets, slack_share=share)
            runs = [pool.submit(simulate, case, mode, terms, piece) for piece in pieces]
            asked.append((budget, name, budgets, runs))
    for budget, name, budgets, runs in asked:
        rows.append(row_of(case, budget, name, one, [run.result() for run in runs], budgets))
    spread = {row["budget"]: row for row in rows if row["mode"] == "alone_2"}
    return [
        row | {f"aa_{name}": spread[row["budget"]][name] for name in ("points", "lost")}
        for row in rows
        if row["mode"] != "alone_2"
    ]


def hindsight_rows(case: Case, pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """Return `decode`, and lending beside up to a fixed number of requests, without a circuit breaker.

    One of the fixed numbers is the best afterwards. A device whose requests end independently of each other is a
    birth-and-death process, for which a threshold is the best of all rules that do not know the future.
    """
    alone = [pool.submit(simulate, case, None, DEFAULT_BUDGETS, piece) for piece in range(case.pieces)]
    one = [run.result() for run in alone]
    budgets = budgets_of(case.profile, one)["given"]
    asked = [
        (
            threshold,
            [pool.submit(simulate, case, "decode", budgets, piece, 0, threshold) for piece in range(case.pieces)],
        )
        for threshold in (None, *THRESHOLDS)
    ]
    return [
        row_of(case, "given", _threshold_name(threshold), one, [run.result() for run in runs], budgets)
        for threshold, runs in asked
    ]


def _threshold_name(threshold: int | None) -> str:
    return "decode" if threshold is None else f"up to {threshold}"


def matrix_bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    decode = [row for row in rows if row["mode"] == "decode"]
    bars = []
    for row in decode:
        what = f"{row['trace']} at {row['load']}, {row['budget']}: low end of the difference to serving alone, points"
        bars.append(harness.wanted(what, row["points_low"], CELL_POINTS))
    requests = sum(row["requests"] for row in decode)
    pooled = round(sum(row["points"] * row["requests"] for row in decode) / requests, 3)
    bars.append(harness.wanted(f"all cells, {requests:,} requests: mean difference, points", pooled, POOLED_POINTS))
    uncounted = sum(row["uncounted"] for row in decode)
    bars.append(harness.wanted("requests lost that were not counted", uncounted, 0, at_most=True))
    for row in decode:
        if row["profile"] == "gpu" and row["budget"] == "given" and row["load"] in OF_BOUND:
            what = f"{row['trace']} at {row['load']}: harvest over the clairvoyant bound"
            bars.append(harness.wanted(what, row["of_bound"], OF_BOUND[row["load"]]))
        if row["profile"] == "gpu" and row["load"] == "0.2" and row["budget"] in LENT_SHARES:
            what = f"{row['trace']} at {row['load']}, {row['budget']}: share of time lent"
            bars.append(harness.wanted(what, row["lent_share"], LENT_SHARES[row["budget"]]))
    return bars


# Adversarial traffic


def shape_rows(
    profiles: Sequence[str],
    seeds: int,
    first: int,
    pool: ProcessPoolExecutor,
    names: Sequence[str] = tuple(SHAPES),
    thresholds: Sequence[int | None] = (None,),
) -> list[dict[str, Any]]:
    asked = [
        (
            profile,
            name,
            threshold,
            [pool.submit(named_losses, name, profile, first + n, threshold) for n in range(seeds)],
        )
        for profile in profiles
        for name in names
        for threshold in thresholds
    ]
    rows = []
    for profile, name, threshold, runs in asked:
        rows.append(shape_row(profile, name, threshold, [run.result() for run in runs]))
        print(f"{profile}, {name}, {rows[-1]['mode']}: {rows[-1]['points']:+.2f} points", flush=True)
    return rows


def shape_row(profile: str, name: str, threshold: int | None, found: Sequence[Losses]) -> dict[str, Any]:
    requests = sum(one.requests for one in found)
    return {
        "profile": profile,
        "shape": name,
        "mode": _threshold_name(threshold),
        "seeds": len(found),
        "requests": requests,
        "alone": round(100 * sum(one.kept_alone for one in found) / requests, 2),
        "points": round(100 * sum(one.kept - one.kept_alone for one in found) / requests, 3),
        "lost": sum(one.lost for one in found),
        "aa_lost": sum(one.lost_by_noise for one in found),
        "uncounted": sum(max(0, one.lost - one.counted) for one in found),
        "lent_share": round(sum(one.lent_share for one in found) / len(found), 3),
        "lent_later": round(sum(one.lent_share_later for one in found) / len(found), 3),
    }


def shape_bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    decode = [row for row in rows if row["mode"] == "decode"]
    bars = [harness.wanted(f"{row['profile']}, {row['shape']}: points", row["points"], SHAPE_POINTS) for row in decode]
    slots = [row for row in decode if row["shape"] == "slots"]
    return bars + [
        harness.wanted(f"{row['profile']}, slots: time lent", row["lent_share"], SLOTS_LENT) for row in slots
    ]


def cases(arguments: argparse.Namespace) -> list[Case]:
    pieces, span_s, warm_s = (1, 150.0, 60.0) if arguments.quick else (arguments.pieces, 300.0, 60.0)
    if arguments.profile == "cpu":
        span_s, warm_s = (60.0, 30.0) if arguments.quick else (150.0, 60.0)
    return [
        Case(arguments.data, arguments.profile, trace, load, pieces, span_s, warm_s)
        for trace in arguments.traces
        for load in arguments.loads or LOADS[arguments.profile]
    ]


def main() -> int:
    options = harness.parser(__doc__ or "")
    data = Path(os.environ["ROSE_DATA"]) if "ROSE_DATA" in os.environ else None
    options.add_argument("--matrix", action="store_true", help="loads x budgets on recorded traffic")
    options.add_argument("--hindsight", action="store_true", help="the best of fixed thresholds")
    options.add_argument("--shapes", action="store_true", help="adversarial traffic")
    options.add_argument("--data", type=Path, default=data, metavar="FOLDER", help="where traces/ is (ROSE_DATA)")
    options.add_argument("--profile", choices=tuple(SCALES), default=None, help="gpu or cpu (the matrix: gpu)")
    options.add_argument("--traces", nargs="+", default=TRACES, metavar="NAME", help=", ".join(TRACES))
    options.add_argument("--loads", nargs="+", metavar="LOAD", help="shares of capacity, `edge`, `worst`")
    options.add_argument("--pieces", type=int, default=2, help="of each trace, in different parts of it (2)")
    options.add_argument("--seeds", type=int, default=None, help="of every shape (5)")
    arguments = options.parse_args()
    if arguments.matrix == (arguments.shapes or arguments.hindsight):
        options.error("choose --matrix, --hindsight or --shapes")
    begun = harness.machine()
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        if arguments.shapes:
            profiles = [arguments.profile] if arguments.profile else list(SCALES)
            seeds = arguments.seeds or (1 if arguments.quick else 5)
            slots = (("slots",), (None, *SLOT_THRESHOLDS)) if arguments.hindsight else ()
            rows = shape_rows(profiles, seeds, FRESH + arguments.seed, pool, *slots)
            harness.print_table(rows, SHAPE_COLUMNS)
            return harness.finish(arguments, "coserve_sim --shapes", rows, shape_bars(rows), begun)
        if arguments.data is None:
            options.error("traces are needed: give --data or set ROSE_DATA")
        arguments.profile, rows = arguments.profile or "gpu", []
        for name in arguments.traces:
            find_trace(arguments.data, name)
        for case in cases(arguments):
            rows += hindsight_rows(case, pool) if arguments.hindsight else rows_of(case, pool, is_quick=arguments.quick)
            print(f"{case.trace} at {case.load} is done", flush=True)
    if arguments.hindsight:
        harness.print_table(rows, [name for name in COLUMNS if not name.startswith("aa_")])
        return harness.finish(arguments, "coserve_sim --hindsight", rows, [], begun)
    harness.print_table(rows, COLUMNS)
    return harness.finish(arguments, "coserve_sim --matrix", rows, matrix_bars(rows), begun)


if __name__ == "__main__":
    raise SystemExit(main())
