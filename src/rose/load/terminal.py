"""Text for a terminal: the line that shows a run as it goes, and the report at its end.

The line is fed each request once, when it ends, so that drawing it costs the run nothing that could be measured.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO

import numpy as np

from rose.load.driver import OpenLoop, Record, RequestOutcome
from rose.load.load_report import LatencyBudget, judged, seen, tail_percent
from rose.load.statistics import mean, percentile
from rose.observe.intervals import share_text
from rose.observe.progress_line import Part, ProgressLine, duration

EVERY_S = 1.0
EVERY_S_WRITTEN = 30.0  # into a file or a pipe, where lines stay
LATE_SHARE = 0.05  # of the TTFT budget: a generator later than that colours the figures
MISSES = {"rejected": "rejected", "timed_out": "timed out", "failed": "failed"}


class LoadProgress:
    """A progress line. `add` takes every request that ends, and `show` prints the line."""

    def __init__(self, budget: LatencyBudget, stream: TextIO = sys.stderr) -> None:
        self.done = 0
        self._budget = budget
        self._line = ProgressLine(stream, "  ")
        self._rows: list[tuple[float, float, float]] = []

    @property
    def every_s(self) -> float:
        return EVERY_S if self._line.is_terminal else EVERY_S_WRITTEN

    def add(self, record: Record) -> None:
        self.done += record.outcome is RequestOutcome.DONE
        self._rows.append(judged(record, self._budget))

    def parts(self, loop: OpenLoop) -> list[Part]:
        """Return time, requests sent, under way and done, attainment and the tail so far."""
        ttft_s, tpot_s, attained = (seen(column) for column in np.array(self._rows).reshape(-1, 3).T)
        tail = tail_percent(attained.size)
        parts = [
            Part(duration(loop.now_s())),
            Part(f"{len(loop.records):,} of {len(loop.trace):,} sent"),
            Part(f"{loop.running:,} running", 3),
            Part(f"{self.done:,} done", 4),
        ]
        if attained.size:
            parts.append(Part(f"{_percent(mean(attained))} attained", 1))
        for name, values_s in (("TTFT", ttft_s), ("TPOT", tpot_s)):
            if values_s.size:
                parts.append(Part(f"{name} P{tail} {_ms(percentile(values_s, tail) * 1000)} ms", 2))
        return parts

    def show(self, loop: OpenLoop) -> None:
        if self._line.is_terminal:
            self._line.show(self.parts(loop))
        else:
            self._line.say(self._line.whole(self.parts(loop)))

    def clear(self) -> None:
        self._line.clear()


def table(report: dict[str, Any], budget: LatencyBudget) -> str:
    """Return the whole report as text."""
    tail = report["tail"]
    budgets_ms = {"ttft": budget.ttft_s * 1000, "tpot": budget.tpot_s * 1000}
    rows = [["ms", "P50", "P90", tail.upper(), "worst minute", "budget"]]
    for name in ("ttft", "tpot", "itl"):
        cells = [report[f"{name}_{percent}_ms"] for percent in ("p50", "p90", tail)]
        cells += [report.get(f"worst_minute_{name}_p99_ms"), budgets_ms.get(name)]
        rows.append([name.upper(), *map(_ms, cells)])
    widths = (9, 9, 9, 14, 9)
    lines = [f"  {name:<6}" + "".join(map(str.rjust, cells, widths)) for name, *cells in rows]
    lines += ["", *(f"  {name:<13}{value}" for name, value in _counts(report).items())]
    if notes := _warnings(report, budget):
        lines += ["", *(f"  {note}" for note in notes)]
    return "\n".join(lines)


def _counts(report: dict[str, Any]) -> dict[str, str]:
    missed = report["requests"] - report["attained"]
    reasons = [f"{report[key]} {word}" for key, word in MISSES.items() if report[key]]
    if slow := missed - sum(report[key] for key in MISSES):
        reasons.append(f"{slow} too slow")
    attained = share_text(report["attained"], report["requests"], "requests")
    rows = {
        "attained": attained if report["requests"] else "nothing to judge",
        "missed": f"{missed:,}" + (f": {', '.join(reasons)}" if reasons else ""),
        "bad minutes": f"{report['violation_minutes']} of {report['minutes']} (fewer than 99 % attained)",
        "load": f"{_rate(report['offered_requests_per_s'])} requests/s offered; "
        f"{_rate(report['prompt_tok_s'])} prompt and {_rate(report['output_tok_s'])} output tokens/s served",
        "sent late": f"P99 {_ms(report['late_p99_ms'])} ms, at most {_ms(report['late_max_ms'])} ms",
    }
    if report.get("harvested_tokens") is not None:
        rows["harvested"] = f"{report['harvested_tokens']:,.0f} rollout tokens, {_rate(report['harvested_tok_s'])}/s"
    return rows


def _warnings(report: dict[str, Any], budget: LatencyBudget) -> list[str]:
    notes = []
    if report["tail"] != "p99":
        notes.append(f"P95 and not P99: {report['requests']:,} requests are too few, P99 needs 1,000.")
    if report["cut"]:
        notes.append(f"{report['cut']:,} requests were under way when the run was stopped.")
    if report["short"]:
        notes.append(f"{report['short']:,} answers were shorter than asked for: the server ended them itself.")
    if report["held_back"]:
        notes.append(f"{report['held_back']:,} requests waited for a place here: raise --running-max.")
    if (report["late_p99_ms"] or 0.0) > LATE_SHARE * budget.ttft_s * 1000:
        notes.append("Requests left here late: this machine is too busy to measure the server. It is in their TTFT.")
    return notes + [f"{count:,} failed: {what}" for what, count in report["failures"].items()]


def _percent(share: float) -> str:
    return f"{share * 100:.2f} %"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
