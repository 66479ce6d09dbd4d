"""The report as people read it in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.load.report import Budget

LATE_SHARE = 0.05  # of the TTFT budget: a generator later than that colours the figures

MISSES = {"rejected": "rejected", "timed_out": "timed out", "failed": "failed"}


def table(report: dict[str, Any], budget: Budget) -> str:
    """The whole report."""
    return "\n".join([*_latencies(report, budget), "", *_counts(report), *_warnings(report, budget)])


def duration(seconds: float) -> str:
    """59 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _latencies(report: dict[str, Any], budget: Budget) -> list[str]:
    tail = report["tail"]
    head = ["ms", "P50", "P90", tail.upper(), "worst minute", "budget"]
    budgets = {"ttft": budget.ttft_s, "tpot": budget.tpot_s}
    rows = [head]
    for name in ("ttft", "tpot", "itl"):
        cells = [report[f"{name}_{percent}_ms"] for percent in ("p50", "p90", tail)]
        worst = [report.get(f"worst_minute_{name}_p99_ms"), budgets[name] * 1000 if name in budgets else None]
        rows.append([name.upper(), *map(ms, [*cells, *worst])])
    return [_line(row) for row in rows]


def _line(cells: Sequence[str]) -> str:
    widths = (6, 9, 9, 9, 14, 9)
    return "  " + cells[0].ljust(widths[0]) + "".join(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))


def _counts(report: dict[str, Any]) -> list[str]:
    missed = report["requests"] - report["attained"]
    why = ", ".join(f"{report[key]} {word}" for key, word in MISSES.items() if report[key])
    slow = missed - sum(report[key] for key in MISSES)
    parts = [part for part in (why, f"{slow} too slow" if slow else "") if part]
    attained = percent(report["attainment"]) if report["attainment"] is not None else "nothing to judge"
    rows = {
        "attained": f"{attained} ({report['attained']:,} of {report['requests']:,})",
        "missed": f"{missed:,}" + (f": {', '.join(parts)}" if parts else ""),
        "bad minutes": f"{report['violation_minutes']} of {report['minutes']} (fewer than 99 % attained)",
        "load": f"{_rate(report['offered_requests_per_s'])} requests/s offered; "
        f"{_rate(report['prompt_tok_s'])} prompt and {_rate(report['output_tok_s'])} output tokens/s served",
        "sent late": f"P99 {ms(report['late_p99_ms'])} ms, at most {ms(report['late_max_ms'])} ms",
    }
    if report.get("harvested_tokens") is not None:
        rows["harvested"] = f"{report['harvested_tokens']:,.0f} rollout tokens, {_rate(report['harvested_tok_s'])}/s"
    return [f"  {name:<13}{value}" for name, value in rows.items()]


def _warnings(report: dict[str, Any], budget: Budget) -> list[str]:
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
    notes += [f"{count:,} failed: {what}" for what, count in report["failures"].items()]
    return ["", *(f"  {note}" for note in notes)] if notes else []


def percent(share: float) -> str:
    return f"{share * 100:.2f} %"


def ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
