"""The tables of docs/benchmarks/paper.md, from a file of benchmarks/paper.py: `-m reproduction.tables FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from reproduction.comparison import RATIO_MIN, is_bound

TARGET = "within 15 %, >= {least:g}"


def _ranged(row: dict[str, Any], name: str, digits: int = 2) -> str:
    low, high = (f"{row[f'{name}_{end}']:.{digits}f}" for end in ("low", "high"))
    return f"{row[name]:.{digits}f} ({low} to {high})"


def cells(found: dict[str, Any]) -> list[str]:
    lines = [
        "| set-up | against | the paper | paper's rules here | ours here | ours over them | target | longest |",
        "|---|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in found["rows"]:
        published = row["paper_figure"]
        least = 1.0 if is_bound(row) else RATIO_MIN
        target = TARGET.format(least=least) if published else f">= {least:g}"
        ratios = " | ".join(_ranged(row, name) for name in ("paper_rules", "ours", "ours_over_paper_rules"))
        start = f"| {row['setup']} | {row['against']} | {published or '-'} |"
        lines.append(f"{start} {ratios} | {target} | {row['longest_share'] or '-'} |")
    return lines


def sharing(found: dict[str, Any]) -> list[str]:
    lines = [
        "| set-up | way | lent share | P99 TTFT, ms | P99 TPOT, ms | in budget, % | n |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in found["sharing"]:
        lines.append(
            f"| {row['setup']} | {row['way']} | {_ranged(row, 'lent_share')} | {_ranged(row, 'ttft_p99_ms', 0)} | "
            f"{_ranged(row, 'tpot_p99_ms', 0)} | {100 * row['attainment']:.2f} | {row['requests']:,} |"
        )
    return lines


def jobs(found: dict[str, Any]) -> list[str]:
    lines = [
        "| set-up | competitor | trajectories/s | rollouts, s | rollout share | allocation, % | demand varies |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in found["jobs"]:
        lines.append(
            f"| {row['setup']} | {row['competitor']} | {_ranged(row, 'trained_per_s', 3)} | {row['rollout_s']:,.0f} | "
            f"{row['rollout_share']:.2f} | {100 * row['allocation_share']:.2f} | {row['demand_ratio']:.1f} |"
        )
    return lines


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    print("\n".join([*cells(found), "", *sharing(found), "", *jobs(found)]))


if __name__ == "__main__":
    main()
