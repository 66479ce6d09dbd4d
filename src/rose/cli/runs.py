"""`rose runs`: past runs as tables, one of them at length, or several side by side."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.launch.past_runs import PastRun

SUMMARY = "past runs: list them, show one, compare several"
FIGURES = {
    "steps": "steps",
    "success_before": "held-out success before",
    "success_after": "held-out success after",
    "trajectories": "trajectories",
    "turns": "turns",
    "step_s": "seconds per step",
    "trajectories_per_s": "trajectories per second",
    "rollout_share": "rollout share of a step",
    "borrowed_share": "share of turns borrowed",
    "throughput_ratio": "whole steps, with / without borrowing",
    "serving_attainment": "serving in budget",
    "serving_attainment_alone": "serving in budget, nothing lent",
    "serving_ttft_p99_ms": "serving TTFT P99, ms",
    "serving_tpot_p99_ms": "serving TPOT P99, ms",
    "cost_per_correct": "USD per million correct answers",
    "cost_per_correct_fixed": "the same, without borrowing",
    "weight_sync_s": "seconds until workers run new weights",
    "pause_s": "seconds that turns stand still for them",
    "staleness_max": "versions that the oldest token was behind",
    "borrow_cycles": "devices borrowed and given back",
    "allocation_overhead_share": "time lost by that",
    "control_cpu_ms_per_turn": "control plane, ms per turn",
    "restarts": "restarts",
    "resumes": "resumes",
    "lost": "lost",
    "doubled": "counted twice",
}
SHARES = ("success_before", "success_after", "rollout_share", "borrowed_share", "serving_attainment",
          "serving_attainment_alone", "allocation_overhead_share")  # fmt: skip
FINE_SHARES = ("serving_attainment", "serving_attainment_alone", "allocation_overhead_share")
MONEY = ("cost_per_correct", "cost_per_correct_fixed")
NAMES = ("name", "runs")
"""Settings in which runs differ always, and mean nothing by it."""
HEAD = ("run", "began", "environment", "steps", "success", "borrowed", "serving", "$/million right", "fixed", "state")


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the runs")
    show = actions.add_parser("show", help="the figures of one run")
    compare = actions.add_parser("compare", help="figures of several runs, and the settings in which they differ")
    show.add_argument("run", nargs="?", help="its name or folder; the newest if left out")
    compare.add_argument("run", nargs="+", help="names or folders, two and more")
    for action in (ls, show, compare):
        action.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where they are (runs)")
        action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    act = {"ls": _ls, "show": _show, "compare": _compare}[arguments.action]
    return act(arguments)


def _ls(arguments: argparse.Namespace) -> int:
    from rose.launch.past_runs import past_runs

    found = past_runs(arguments.runs)
    if arguments.json:
        print(json.dumps([run.shown() for run in found], indent=1))
        return 0
    if not found:
        print(f"There are no runs in {arguments.runs} yet.\nnext: rose run")
        return 0
    _print_table([HEAD, *map(_row, found)])
    _tell_trouble(found)
    print(f"\nnext: rose runs show {found[-1].name}{_where(arguments.runs)}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    found = _chosen(arguments)
    if arguments.json:
        print(json.dumps(found.shown() | {"settings": found.settings}, indent=1))
        return 0
    print(f"run {found.name}, {found.state}, began {_when(found.began_s)}, in {found.path}")
    if found.summary is not None:
        figures = figures_of(found)
        _print_table([(words, _value(key, figures[key])) for key, words in FIGURES.items()], right=())
    _tell_notes(found)
    _tell_trouble([found])
    if found.report is not None:
        print(f"\nreport: {found.report}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from rose.launch.past_runs import find_run

    if len(arguments.run) < 2:
        raise ConfigError("one run has nothing to be compared with", hint="name two: rose runs compare ONE OTHER")
    found = [find_run(arguments.runs, name) for name in arguments.run]
    figures = [figures_of(run) for run in found]
    differing = _differing(found)
    if arguments.json:
        listed = {key: [values[key] for values in figures] for key in FIGURES}
        print(json.dumps({"runs": [run.shown() for run in found], "figures": listed, "settings": differing}, indent=1))
        return 0
    head = ("", *(run.name for run in found), "last / first" if len(found) == 2 else "")
    rows = [_compared(key, words, figures) for key, words in FIGURES.items()]
    _print_table([head, *rows])
    print("\nsettings in which they differ:" if differing else "\nTheir settings are the same.")
    _print_table([(key, *map(_shown, values)) for key, values in differing.items()], right=())
    _tell_trouble(found)
    return 0


def _chosen(arguments: argparse.Namespace) -> PastRun:
    from rose.launch.past_runs import find_run, past_runs

    if arguments.run is not None:
        return find_run(arguments.runs, arguments.run)
    found = past_runs(arguments.runs)
    if not found:
        raise ConfigError(f"there are no runs in {arguments.runs} yet", hint="make one: rose run")
    return found[-1]


def figures_of(run: PastRun) -> dict[str, Any]:
    """Under the keys of FIGURES; None for what a run does not know."""
    summary = run.summary or {}
    found = {key: summary.get(key) for key in FIGURES}
    by_pool = summary.get("turns_by_pool")
    counts = list(by_pool.values()) if isinstance(by_pool, dict) else []
    if by_pool and all(isinstance(count, int) for count in counts) and sum(counts):
        found["borrowed_share"] = by_pool.get("borrowed", 0) / sum(counts)
    return found


def _row(run: PastRun) -> tuple[str, ...]:
    figures = figures_of(run)
    before, after, *others = (
        _value(key, figures[key])
        for key in ("success_before", "success_after", "borrowed_share", "serving_attainment", *MONEY)
    )
    environment = str(run.settings.get("environment", "-"))
    steps = _value("steps", figures["steps"])
    return (run.name, _when(run.began_s), environment, steps, f"{before} > {after}", *others, run.state)


def _compared(key: str, words: str, figures: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return (words, *(_value(key, values[key]) for values in figures), _ratio(key, figures))


def _value(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)[:20]
    if key in SHARES:
        return f"{value:.2%}" if key in FINE_SHARES else f"{value:.1%}"
    if key in MONEY:
        return f"{1e6 * value:,.0f}" if value >= 1e-4 else f"{1e6 * value:.3g}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _ratio(key: str, figures: Sequence[dict[str, Any]]) -> str:
    """Of two runs, where both have a number."""
    first, last = figures[0][key], figures[-1][key]
    if len(figures) != 2 or not all(isinstance(value, int | float) for value in (first, last)) or not first:
        return ""
    return f"x {last / first:.2f}"


def _differing(runs: Sequence[PastRun]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    listed = {key: [run.settings.get(key) for run in runs] for key in keys if key not in NAMES}
    return {key: values for key, values in listed.items() if any(value != values[0] for value in values)}


def _tell_trouble(runs: Sequence[PastRun]) -> None:
    told = [f"  {run.name}: {run.trouble}" for run in runs if run.trouble]
    if told:
        print("\nnot all is well:\n" + "\n".join(told))


def _tell_notes(run: PastRun) -> None:
    notes = (run.summary or {}).get("notes")
    if isinstance(notes, list) and notes:
        print("\nto know about it:\n" + "\n".join(f"  {note}" for note in notes))


def _when(began_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(began_s))


def _where(runs: Path) -> str:
    return "" if runs == Path("runs") else f" --runs {runs}"


def _shown(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _print_table(rows: Sequence[Sequence[str]], right: Sequence[int] | None = None) -> None:
    """Columns as wide as they need; all but the first are flush right, or those that are named."""
    if not rows:
        return
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    flush = range(1, len(widths)) if right is None else right
    for row in rows:
        cells = [
            cell.rjust(width) if place in flush else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        ]
        print("  " + "  ".join(cells).rstrip())
