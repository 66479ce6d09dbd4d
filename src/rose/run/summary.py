"""Summary of a run at its end: summary.json, report.html, and a few lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from rose.config import yaml_text as text
from rose.config.loading import RESOLVED_NAME
from rose.cost.bill import CostSettings
from rose.run.resume_filter import counted
from rose.run.run_folder import RunFolder
from rose.run.run_records import Summary, read_records, read_served, summary_text
from rose.run.run_report import html_report, usd_pair
from rose.run.run_statistics import kept_text, summary_of


def sum_up(folder: RunFolder) -> Iterator[str]:
    """Write summary.json and report.html, and yield the lines to print."""
    lines, served = counted(read_records(folder.path / "metrics.jsonl")), read_served(folder.path / "serving.jsonl")
    summary = summary_of(folder.name, lines, served, *priced_by(folder.path / RESOLVED_NAME))
    folder.write("summary.json", summary_text(summary))
    settings = (folder.path / RESOLVED_NAME).read_text(encoding="utf-8")
    report = folder.write("report.html", html_report(summary, lines, served, settings))
    yield from words_of(summary)
    yield f"report: {report}"


def priced_by(settings: Path) -> tuple[CostSettings, float]:
    """Return the prices of a run and the share of memory that its lent device kept free, from its settings.

    Prices that a run did not know yet are the defaults.
    """
    tree = text.read_file(settings) or {}
    known = {field.name for field in fields(CostSettings)}
    prices = {key: value for key, value in tree.get("cost", {}).items() if key in known}
    headroom_share = tree.get("serving", {}).get("lend", {}).get("headroom_share", 0.0)
    return CostSettings(**prices), float(headroom_share)


def words_of(summary: Summary) -> Iterator[str]:
    if not summary.steps:
        yield "no step was finished"
        return
    before, after = summary.success_before, summary.success_after
    if before is not None and after is not None:
        yield f"held-out success: {before:.1%} before, {after:.1%} after {summary.steps} steps"
    share = summary.borrowed_share or 0.0
    counts = f"{summary.trajectories:,} trajectories, {summary.turns:,} turns"
    yield f"rollouts: {counts}, {share:.0%} of them borrowed"
    if kept := kept_text(summary.serving_attainment, summary.serving_requests_lent, "requests in budget"):
        yield f"serving during rollouts: {kept}"
    if alone := kept_text(summary.serving_attainment_alone, summary.serving_requests_alone, "requests in budget"):
        yield f"serving with nothing lent: {alone}"
    if summary.throughput_ratio is not None:
        low, high = summary.throughput_ratio_low, summary.throughput_ratio_high
        interval = f" ({low:.2f} to {high:.2f})" if low is not None else ""
        yield (
            f"with the borrowed device: rollouts x {summary.rollout_speedup:.2f}, "
            f"whole steps x {summary.throughput_ratio:.2f}{interval}"
        )
    if summary.cost is not None and summary.cost_per_correct is not None and summary.cost_per_correct_fixed is not None:
        here, fixed, what = usd_pair(summary.cost_per_correct, summary.cost_per_correct_fixed)
        is_measured = summary.cost.fixed_basis == "measured"  # an estimate is in the report, with its assumptions
        yield f"cost: USD {here} for {what}" + (f", {fixed} without borrowing" if is_measured else "")
    yield f"trajectories lost: {summary.lost}, counted twice: {summary.doubled}"
