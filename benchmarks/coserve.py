"""What lending a serving device costs its users, and what it brings: one trace, one load, all modes, on one core.

    python benchmarks/coserve.py --trace FILE --load busy:0.2 --budget given --json FILE

    alone_1, alone_2   serving alone, twice: on devices that could lend and lend to nobody
    decode, idle, paper   lent, under ROSE's admission in these modes
    alternate          lent without admission: a step of serving, a step of rollouts
    fcfs               lent without admission: memory is shared, steps go first come first served
    halves             two engines on one core, with half of the memory and of the time each
    rollouts_alone     no serving load

The device has one core; clients, HTTP and this program have the others. Lengths are scaled by one factor, so that the
P99 prompt is a quarter of the context; prompts are seeded random ids, outputs have the length of the trace. The load is
stated twice, both of serving alone: `busy_share` of time and `capacity_share` of saturated throughput. TTFT counts from
the scheduled arrival. Segments of the trace are replayed under every mode in turn, in rotating order, and differences
are paired per request. Rollouts are 32 trajectories of 10 turns in a closed loop, 24 new and 8-32 generated tokens a
turn. A run that was stopped goes on where it was when it is called again with the same options: see --work.

`--worst-case` replays three minutes of 95-110 % of capacity instead, for five seeds, with rollouts pending throughout.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
from coserving import figures, options, plan
from coserving.bars import bars_of, losses
from coserving.calibrate import QUICK, Calibration, Calibrator, Effort
from coserving.devices import Terms
from coserving.figures import Findings, Place
from coserving.plan import Piece, Segment
from coserving.processes import OTHER_CORES
from coserving.running import Stage
from coserving.store import Store
from coserving.traffic import WORST_S, at_rate, cut, scaled, worst_case
from msgspec import structs

from rose.errors import RoseError
from rose.load.load_report import LatencyBudget
from rose.load.picture import draw
from rose.load.terminal import duration
from rose.load.traces import Trace, read_trace
from rose.models.presets import write_preset

LIMIT_S, QUICK_LIMIT_S = 90 * 60.0, 5 * 60.0
RESERVE_S = 10.0  # for figures and for stopping the devices
QUICK_ROLLOUTS_ALONE_S = 6.0
WORST_SEEDS, QUICK_WORST_S = 5, 20.0
FRESH = 7919  # seeds of the worst case, apart from those that anything was tuned on
FOREIGN_MAX = 0.05  # of the device's core
METHOD = {
    "device": "one core; clients, HTTP and the benchmark on the others",
    "lengths": "scaled by one factor: the P99 prompt is a quarter of the context",
    "prompts": "seeded random ids, the same for every mode; output length forced",
    "ttft": "from the scheduled arrival",
    "load": "busy_share and capacity_share are of serving alone",
    "attainment": "TTFT and mean TPOT of a request both in budget; attainment and aa_spread are shares of 1",
    "differences": "paired per request, to the two runs of serving alone pooled; intervals over one-minute blocks",
    "rollouts": "closed loop of 32 trajectories, 10 turns, 24 new and 8-32 generated tokens a turn",
    "rollout_tok_s": "generated and really prefilled, less what evictions threw away; lent_tok_s is the device's count",
    "serving_time_share": "serving's steps over wall time; for halves the CPU time of its engine",
}
COLUMNS = (
    "mode", "requests", "percentile", "ttft_p99_ms", "tpot_p99_ms", "itl_p99_ms", "worst_minute_ttft_p99_ms",
    "attainment", "rollout_tok_s", "serving_time_share", "breaches", "late_requests", "ambiguous", "breaker_trips",
    "budget_used_ttft", "budget_used_tpot", "other_cores_share", "foreign_share",
)  # fmt: skip


class Run:
    """One call of the benchmark."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.begun_s = time.monotonic()
        self.limit_s = QUICK_LIMIT_S if arguments.quick else LIMIT_S
        self.worst_s = QUICK_WORST_S if arguments.quick else WORST_S
        self.modes = options.modes_of(arguments)
        self.name = options.trace_name(arguments.trace)
        self.trace = scaled(read_trace(arguments.trace), options.CONTEXT_TOKENS)
        folder = arguments.work or harness.PROJECT / "runs" / "coserve" / options.name_of(arguments)
        self.store = Store.open(folder, options.fingerprint(arguments))

    # What is measured

    def wanted(self) -> dict[str, int]:
        load = str(self.arguments.load)
        return {mode: plan.requests_wanted(self.name, load, mode, self.arguments.requests) for mode in self.modes}

    def whole(self) -> Trace:
        """The requests of the run, in the trace's own time."""
        load = str(self.arguments.load)
        most = max(plan.requests_wanted(self.name, load, mode, self.arguments.requests) for mode in plan.MODES)
        return cut(self.trace, 0, min(most, len(self.trace)))

    def calibrated(self, stage: Stage) -> Calibration:
        found = self.store.kept("calibration", Calibration)
        if found is None:
            effort = QUICK if self.arguments.quick else Effort()
            if self.arguments.search_requests is not None:
                effort = structs.replace(effort, search_requests=self.arguments.search_requests)
            calibrator = Calibrator(stage.alone, self.whole(), effort, self.arguments.seed, self.say)
            if self.arguments.worst_case:
                load = options.Load("capacity", 1.0)
                found = calibrator.run(load, "given")
            else:
                found = calibrator.run(self.arguments.load, self.arguments.budget, self.arguments.rate_rps)
            self.store.keep("calibration", found)
        return found

    def segments(self, calibration: Calibration, start_s: float) -> list[Segment]:
        found = self.store.kept("segments", list[Segment])
        if found is None:
            is_worst = self.arguments.worst_case
            found = self._worst_segments(calibration) if is_worst else self._segments(calibration, start_s)
            self.store.keep("segments", found)
        return found

    def _segments(self, calibration: Calibration, start_s: float) -> list[Segment]:
        wanted, rate_rps = self.wanted(), calibration.rate_rps
        left_s = self.limit_s - self.elapsed_s() - RESERVE_S - start_s
        if self.arguments.quick:
            serving = [mode for mode in self.modes if mode != "rollouts_alone"]
            each_s = (left_s - QUICK_ROLLOUTS_ALONE_S) / max(1, len(serving)) - plan.PIECE_OVERHEAD_S
            return [Segment(0, 0, min(len(self.whole()), max(10, int(rate_rps * each_s))))]
        share = plan.requests_in_time(wanted, rate_rps, left_s)
        if share < 1:
            self.say(f"only {share:.0%} of the requests fit into {duration(self.limit_s)}")
        return plan.segments_of(max(10, int(len(self.whole()) * share)), rate_rps)

    def _worst_segments(self, calibration: Calibration) -> list[Segment]:
        counts = [
            len(self.worst_trace(number, calibration)) for number in range(1 if self.arguments.quick else WORST_SEEDS)
        ]
        edges = [sum(counts[:number]) for number in range(len(counts) + 1)]
        return [Segment(number, begin, end) for number, (begin, end) in enumerate(pairwise(edges))]

    def pieces(self, segments: list[Segment]) -> list[Piece]:
        total = sum(segment.requests for segment in segments)
        share = total / len(self.whole())
        everything = self.arguments.quick or self.arguments.worst_case
        wanted = {
            mode: total if everything else max(1, int(count * min(1, share))) for mode, count in self.wanted().items()
        }
        return plan.pieces_of(segments, wanted)

    def traffic(self, segment: Segment, calibration: Calibration, segments: list[Segment]) -> tuple[Trace, Place]:
        """The requests of a segment from second 0, and where it lies in the run."""
        if self.arguments.worst_case:
            return self.worst_trace(segment.number, calibration), Place(segment.number * self.worst_s, segment.begin)
        whole = at_rate(cut(self.whole(), 0, segments[-1].end), calibration.rate_rps)
        return cut(whole, segment.begin, segment.end), Place(float(whole.arrival_s[segment.begin]), segment.begin)

    def worst_trace(self, number: int, calibration: Calibration) -> Trace:
        seed = FRESH * (self.arguments.seed + 1) + number
        return worst_case(self.whole(), calibration.capacity_rps, seed, self.worst_s)

    # Measuring

    def measure(self) -> tuple[Calibration, list[Segment]]:
        folder = self.store.folder
        terms = Terms(
            self._model(self.arguments.model),
            self._model(options.ROLLOUT_MODEL),
            kv_memory_mb=self.arguments.kv_memory_mb,
        )
        with Stage(terms, folder, self.trace, self.say, shares_alone=self.arguments.quick) as stage:
            calibration = self.calibrated(stage)
            segments = self.segments(calibration, stage.planned_start_s(self.modes))
            changed = replace(terms, ttft_ms=calibration.ttft_ms, tpot_ms=calibration.tpot_ms)
            stage.change(changed)
            self._measure_all(stage, calibration, segments)
        return calibration, segments

    def _measure_all(self, stage: Stage, calibration: Calibration, segments: list[Segment]) -> None:
        rollouts_s = QUICK_ROLLOUTS_ALONE_S if self.arguments.quick else plan.ROLLOUTS_ALONE_S
        pieces = self.pieces(segments)
        left = [piece for piece in pieces if not self.store.has(piece)]
        if len(left) < len(pieces):
            self.say(f"{len(pieces) - len(left)} of {len(pieces)} pieces were measured before")
        for number, piece in enumerate(left):
            left_s = stage.planned_start_s(one.mode for one in left[number:])
            left_s += sum(plan.planned_s(one, calibration.rate_rps, rollouts_s) for one in left[number:])
            needed_s = plan.planned_s(piece, calibration.rate_rps, rollouts_s) + stage.planned_start_s([piece.mode])
            if self.elapsed_s() + needed_s > self.limit_s:
                self.say(f"out of time with {len(left) - number} pieces left: call again to go on")
                return
            self.say(
                f"segment {piece.segment.number + 1} of {len(segments)}, {piece.mode}; about {duration(left_s)} left"
            )
            trace, _ = self.traffic(piece.segment, calibration, segments)
            seed = self.arguments.seed * 1_000_003 + piece.segment.number + 1
            is_served = piece.mode != "rollouts_alone"
            self.store.write(piece, stage.measure(piece, trace if is_served else None, seed, rollouts_s))

    def _model(self, preset: str) -> Path:
        out = self.store.folder / "models" / preset
        return out if (out / "config.json").exists() else write_preset(preset, out, seed=self.arguments.seed)

    # Saying

    def findings(self, calibration: Calibration, segments: list[Segment]) -> Findings:
        pieces = [piece for piece in self.pieces(segments) if self.store.has(piece)]
        modes: dict[str, dict[int, Any]] = {mode: {} for mode in self.modes}
        for piece in pieces:
            modes[piece.mode][piece.segment.number] = self.store.read(piece)
        places = [self.traffic(segment, calibration, segments)[1] for segment in segments]
        return Findings(modes, places, LatencyBudget(calibration.ttft_ms / 1000, calibration.tpot_ms / 1000))

    def orders(self, segments: list[Segment]) -> list[list[str]]:
        """Who was measured after whom, segment by segment."""
        pieces = self.pieces(segments)
        return [[piece.mode for piece in pieces if piece.segment == segment] for segment in segments]

    def rate_rps(self, calibration: Calibration, segments: list[Segment]) -> float:
        if not self.arguments.worst_case:
            return calibration.rate_rps
        return sum(segment.requests for segment in segments) / (self.worst_s * len(segments))

    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun_s

    def say(self, words: str) -> None:
        print(f"[{duration(self.elapsed_s())}] {words}", flush=True)


def report(run: Run, calibration: Calibration, segments: list[Segment], begun: dict[str, Any]) -> int:
    arguments, findings = run.arguments, run.findings(calibration, segments)
    load = "worst-case" if arguments.worst_case else str(arguments.load)
    names = {"trace": run.name, "load": load, "budget": arguments.budget, "model": arguments.model}
    rows = [names | figures.row_of(findings, mode) for mode in run.modes]
    rate_rps = run.rate_rps(calibration, segments)
    overall = figures.overall_of(findings, rate_rps, calibration.capacity_rps)
    lost = losses(findings, [mode for mode in run.modes if mode not in (*plan.ALONE, "rollouts_alone")])
    for row in rows:
        found = lost.get(row["mode"])
        row["attainment_difference"] = dataclasses.asdict(found) if found is not None else None
    bars = bars_of(
        {row["mode"]: row for row in rows}, overall, lost, load=load, budget=arguments.budget,
        is_worst_case=arguments.worst_case,
    )  # fmt: skip
    harness.print_table(rows, COLUMNS)
    print(
        "\n" + "  ".join(f"{key} {value}" for key, value in overall.items() if key != "reasons" and value is not None)
    )
    disturbed = [row["mode"] for row in rows if (row["foreign_share"] or 0.0) > FOREIGN_MAX]
    if disturbed:
        print(f"something else ran on the device's core under {', '.join(disturbed)}: measure again on a quiet machine")
    if arguments.picture:
        draw_decode(run, findings, f"{run.name}, {load}, {arguments.model}, lent in mode decode")
    about = names | {"ttft_budget_ms": calibration.ttft_ms, "tpot_budget_ms": calibration.tpot_ms}
    about |= {"rate_rps": round(rate_rps, 4), "capacity_rps": round(calibration.capacity_rps, 4)}
    about |= {
        "method": METHOD,
        "orders": run.orders(segments),
        "segments": len(segments),
        "calibration": calibration.tried,
        "trace_notes": list(run.trace.notes),
    }
    return harness.finish(arguments, "coserve", rows, bars, begun, **about, **overall)


def draw_decode(run: Run, findings: Findings, title: str) -> None:
    """Latency against budget, load and harvest over the time of the run."""
    records = findings.records("decode")
    if not records:
        print("nothing was measured under decode: no picture")
        return
    run.arguments.picture.write_text(
        draw(records, findings.budget, title=title, harvest=findings.harvest("decode")), encoding="utf-8"
    )


def main() -> int:
    parser = harness.parser(__doc__ or "")
    options.add_options(parser)
    arguments = parser.parse_args()
    if arguments.trace is None:
        print("skipped: this benchmark replays a trace; give one with --trace FILE")
        return 0
    begun = harness.machine()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # devices are stopped on the way out
    os.sched_setaffinity(0, OTHER_CORES)
    try:
        run = Run(arguments)
        return report(run, *run.measure(), begun)
    except RoseError as error:
        print(error)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
