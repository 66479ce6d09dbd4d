"""What every benchmark shares: its options, a description of the machine, statistics, the table and the JSON file.

A claim of speed is a file in this folder that runs every competitor in the same run, interleaved, and writes one JSON
object: {benchmark, command, seed, quick, machine, rows, wanted} plus overall figures. Ratios are taken within a
repeat, where both sides met the same machine, and reported as medians with their spread.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    made.add_argument("--quick", action="store_true", help="at most five minutes: fewer repeats, the same keys")
    made.add_argument("--seed", type=int, default=0)
    return made


def machine() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def median_and_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, the lowest and the highest: with five repeats no finer statement is honest."""
    return statistics.median(values), min(values), max(values)


def put_ratio(row: dict[str, Any], name: str, values: Sequence[float]) -> None:
    middle, low, high = median_and_spread(values)
    row[name], row[f"{name}_low"], row[f"{name}_high"] = round(middle, 3), round(low, 3), round(high, 3)


def wanted(what: str, value: float | None, bar: float, *, at_most: bool = False) -> dict[str, Any]:
    ok = value is not None and (value <= bar if at_most else value >= bar)
    return {"what": what, "value": value, "bar": f"{'<=' if at_most else '>='} {bar}", "ok": ok}


def print_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """One line per row; columns that no row has are left out."""
    shown = [column for column in columns if any(row.get(column) is not None for row in rows)]
    cells = [shown, *[[_text(row.get(column)) for column in shown] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(shown))]
    for number, line in enumerate(cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        if number == 0:
            print("  ".join("-" * width for width in widths))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def finish(arguments: argparse.Namespace, name: str, rows: list[dict[str, Any]], bars: list[dict[str, Any]],
           begun: dict[str, Any], **overall: Any) -> int:  # fmt: skip
    """Print what was wanted and whether it was reached, write the file; the exit status says the same."""
    print()
    for bar in bars:
        print(f"{'ok    ' if bar['ok'] else 'MISSED'}  {bar['what']}: {_text(bar['value'])} (wanted {bar['bar']})")
    if arguments.json:
        command = " ".join([Path(sys.executable).name, *sys.argv])
        today = datetime.date.today().isoformat()
        found = {"benchmark": name, "command": command, "date": today, "seed": arguments.seed, "quick": arguments.quick,
                 "machine": begun, **overall, "rows": rows, "wanted": bars}  # fmt: skip
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written to {arguments.json}")
    return 0 if all(bar["ok"] for bar in bars) else 1
