"""Lines of a made-up run, for what reads them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rose.cost.bill import RunUsage
from rose.run import diagnostics, resume_filter, run_statistics, run_usage
from rose.run import run_report as report
from rose.run.rotating import before
from rose.run.run_records import KINDS, LendingRecord, RunRecord, Summary
from rose.run.serving_traffic import UserRequest

Line = dict[str, Any]


def step(number: int, began_s: float, *, is_borrowed: bool = True, rollout_s: float = 2.0, **changes: Any) -> Line:
    found = {
        "kind": "step",
        "step": number,
        "is_borrowed": is_borrowed,
        "began_s": began_s,
        "rollout_s": rollout_s,
        "train_s": 1.0,
        "publish_s": 0.1,
        "step_s": rollout_s + 1.1,
        "version": str(number),
        "trajectories": 64,
        "successes": 16 + number,
        "turns": 300,
        "generated_tokens": 1200,
        "turns_by_pool": {"dedicated": 100, "borrowed": 200} if is_borrowed else {"dedicated": 300, "borrowed": 0},
        "cpu_s": {"engine_borrowed": 2.5 if is_borrowed else 0.62},
        "groups_kept": 8,
        "groups_total": 11,
        "verdict": "updated",
    }
    return found | changes


def served(at_s: float, ttft_ms: float = 20.0, tpot_ms: float = 5.0) -> Line:
    return {
        "type": "served",
        "at_s": at_s,
        "outcome": "done",
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
        "attained": ttft_ms <= 500 and tpot_ms <= 150,
        "prompt_tokens": 1,
        "output_tokens": 1,
        "late_ms": 0.0,
    }


def run_lines(steps: int = 8, *, compare: bool = True) -> list[Line]:
    """A run of `steps` steps that began at second 100; half of them without the device, if it compares."""
    lines: list[Line] = [{"kind": "evaluation", "step": 0, "success_rate": 0.09, "began_s": 100.0, "took_s": 2.0}]
    lines.append(
        {"kind": "costs", "when": "begin", "at_s": 102.0, "turns": 1000, "roles": {"gateway": 1.0, "trainer": 0.5}}
    )
    at_s = 102.0
    for number in range(1, steps + 1):
        is_borrowed = not compare or number % 4 in (0, 1)
        found = step(number, at_s, is_borrowed=is_borrowed, rollout_s=2.0 if is_borrowed else 4.0)
        turns = {"dedicated": 100 * number, "borrowed": 150 * number}
        lines.append({"kind": "sample", "at_s": at_s, "turns": turns, "running": {}, "version": "1"})
        lines.append(found)
        at_s += found["step_s"]
    lines.append({"kind": "evaluation", "step": steps, "success_rate": 0.6, "began_s": at_s, "took_s": 2.0})
    roles = {"gateway": 3.0, "agent_borrowed": 1.0, "trainer": 8.5}
    lines.append({"kind": "costs", "when": "end", "at_s": at_s, "turns": 3400, "roles": roles})
    lines.append({"kind": "death", "at_s": 110.0, "role": "dedicated", "code": -9, "is_restarted": True})
    lines.append({"kind": "balance", "begun": 512, "returned": 512, "written_off": 0, "lost": 0, "doubled": 0})
    return lines


# The functions under test take records; tests write lines as they are in the files, and read figures as they are there.

MISSING: dict[str, Line] = {
    "step": step(0, 0.0),
    "evaluation": {"step": 0, "success_rate": 0.0},
    "death": {"at_s": 0.0},
    "allocation": {"name": "a"},
}
"""What tests leave out of lines, by kind."""


def record(line: Line) -> RunRecord:
    kind: type[RunRecord] = KINDS[line["kind"]]
    return msgspec.convert(MISSING.get(line["kind"], {}) | line, kind)


def records(lines: Iterable[Line]) -> list[RunRecord]:
    return [record(line) for line in lines]


def lines_of(found: Iterable[RunRecord]) -> list[Line]:
    return [msgspec.to_builtins(one) for one in found]


def requests(rows: Iterable[Line]) -> list[UserRequest]:
    missing = {"type": "served", "outcome": "done", "prompt_tokens": 1, "output_tokens": 1, "late_ms": 0.0}
    return [msgspec.convert(missing | row, UserRequest) for row in rows]


def summary_of(lines: Iterable[Line], rows: Iterable[Line], *prices: Any, **more: Any) -> Line:
    found: Line = msgspec.to_builtins(run_statistics.summary_of("it", records(lines), requests(rows), *prices, **more))
    return found


def html_report(summary: Line, lines: Iterable[Line], rows: Iterable[Line], settings: str) -> str:
    return report.html_report(msgspec.convert(summary, Summary), records(lines), requests(rows), settings)


def compared(lines: Iterable[Line]) -> Line:
    speedup, throughput = run_statistics.compared(records(lines))  # type: ignore[arg-type]
    return {
        f"{name}{end}": value
        for name, found in (("rollout_speedup", speedup), ("throughput_ratio", throughput))
        for end, value in zip(("", "_low", "_high"), found)
    }


def costs_of(lines: Iterable[Line]) -> Line:
    by_role, control_ms = run_statistics.costs_of(records(lines))  # type: ignore[arg-type]
    return {"cpu_s_by_role": by_role, "control_cpu_ms_per_turn": control_ms}


def pause_s(lines: Iterable[Line]) -> float | None:
    return run_statistics.pause_s(records(lines))  # type: ignore[arg-type]


def attainment(rows: Iterable[Line]) -> float | None:
    return run_statistics.attainment(requests(rows))


def within(rows: Sequence[Line], lines: Iterable[Line]) -> list[Line]:
    asked = requests(rows)
    kept = {id(one) for one in run_statistics.within(asked, records(lines))}  # type: ignore[arg-type]
    return [row for row, one in zip(rows, asked) if id(one) in kept]


def usage_of(lines: Iterable[Line], **more: Any) -> RunUsage:
    return run_usage.usage_of(records(lines), **more)  # type: ignore[arg-type]


def breaches_of(lent: Iterable[Line], alone: Iterable[Line], counts: dict[str, int] | None = None) -> float:
    counted_by_device = None if counts is None else LendingRecord(breaches=counts)
    return run_usage.breaches_of(requests(lent), requests(alone), counted_by_device)


def notes_of(lines: Iterable[Line]) -> list[str]:
    return diagnostics.notes_of(records(lines))


def counted(lines: Iterable[Line]) -> list[Line]:
    return lines_of(resume_filter.counted(records(lines)))


def allocation_of(lines: Iterable[Line]) -> Line:
    share, cycles = run_statistics.allocation_of(records(lines))
    return {"allocation_overhead_share": share, "borrow_cycles": cycles}


def of_kind(lines: Iterable[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a file and of its older part; the last may be torn while a run goes on."""
    older = before(path)
    data = (older.read_bytes() if older.exists() else b"") + path.read_bytes()
    lines = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines
