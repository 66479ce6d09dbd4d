"""The end of a run: reads what it wrote, and makes of it a summary, a report, and a few words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from rose.config import text
from rose.config.load import RESOLVED_NAME
from rose.cost.settings import CostSettings
from rose.launch.figures import summary_of
from rose.launch.folder import RunFolder
from rose.launch.report import html_report
from rose.launch.report_tables import usd_pair
from rose.launch.rotating import before
from rose.launch.superseding import counted


def sum_up(folder: RunFolder) -> Iterator[str]:
    """Writes summary.json and report.html; yields what to tell people."""
    lines, served = counted(read_lines(folder.path / "metrics.jsonl")), read_lines(folder.path / "serving.jsonl")
    summary = {"name": folder.name, **summary_of(lines, served, *priced_by(folder.path / RESOLVED_NAME))}
    folder.write("summary.json", json.dumps(summary, indent=1) + "\n")
    settings = (folder.path / RESOLVED_NAME).read_text(encoding="utf-8")
    report = folder.write("report.html", html_report(summary, lines, served, settings))
    yield from words_of(summary)
    yield f"report: {report}"


def priced_by(settings: Path) -> tuple[CostSettings, float]:
    """The prices of a run and the share of memory that its lent device kept free, as its settings in force say.

    Prices that a run did not know yet are the defaults.
    """
    tree = text.read_file(settings) or {}
    known = {field.name for field in fields(CostSettings)}
    prices = {key: value for key, value in tree.get("cost", {}).items() if key in known}
    headroom_share = tree.get("serving", {}).get("lend", {}).get("headroom_share", 0.0)
    return CostSettings(**prices), float(headroom_share)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines and of its older part; a line that is torn is left out."""
    older = before(path)
    data = (older.read_bytes() if older.exists() else b"") + path.read_bytes()
    found = []
    for line in data.split(b"\n"):
        try:
            found.append(msgspec.json.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return found


def words_of(summary: dict[str, Any]) -> Iterator[str]:
    if not summary["steps"]:
        yield "no step was finished"
        return
    before, after = summary["success_before"], summary["success_after"]
    if before is not None and after is not None:
        yield f"held-out success: {before:.1%} before, {after:.1%} after {summary['steps']} steps"
    by_pool = summary["turns_by_pool"]
    share = by_pool["borrowed"] / max(1, sum(by_pool.values()))
    counts = f"{summary['trajectories']:,} trajectories, {summary['turns']:,} turns"
    yield f"rollouts: {counts}, {share:.0%} of them borrowed"
    if summary["serving_attainment"] is not None:
        words = f"serving: {summary['serving_attainment']:.2%} of requests in budget during rollouts"
        if summary["serving_attainment_alone"] is not None:
            words += f", {summary['serving_attainment_alone']:.2%} without them"
        yield words
    if summary["throughput_ratio"] is not None:
        low, high = summary["throughput_ratio_low"], summary["throughput_ratio_high"]
        interval = f" ({low:.2f} to {high:.2f})" if low is not None else ""
        yield (
            f"with the borrowed device: rollouts x {summary['rollout_speedup']:.2f}, "
            f"whole steps x {summary['throughput_ratio']:.2f}{interval}"
        )
    if summary["cost_per_correct"] is not None:
        here, fixed, what = usd_pair(summary["cost_per_correct"], summary["cost_per_correct_fixed"])
        yield f"cost: USD {here} for {what}, {fixed} without borrowing ({summary['cost']['fixed_basis']})"
    yield f"trajectories lost: {summary['lost']}, counted twice: {summary['doubled']}"
