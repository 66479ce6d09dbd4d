"""`rose runs`: past runs as tables, one of them at length, several side by side, or the bill between lender and run."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.cli.options import print_table
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.run.past_runs import PastRun

SUMMARY = "list past runs, show one, compare several"
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
SHARES = ("success_before", "success_after", "rollout_share", "borrowed_share", "allocation_overhead_share")
FINE_SHARES = ("allocation_overhead_share",)
JUDGED = {  # shares of requests -> how many requests they are of
    "serving_attainment": "serving_requests_lent",
    "serving_attainment_alone": "serving_requests_alone",
}
MONEY = ("cost_per_correct", "cost_per_correct_fixed")
NAMES = ("name", "runs")  # settings that differ between any two runs
HEAD = ("run", "began", "environment", "steps", "success", "borrowed", "serving", "$/million right", "fixed", "state")


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the runs")
    show = actions.add_parser("show", help="the figures of one run")
    bill = actions.add_parser("bill", help="who lent how much to the run, at which price")
    compare = actions.add_parser("compare", help="figures of several runs, and the settings in which they differ")
    show.add_argument("run", nargs="?", help="its name or folder; the newest if left out")
    bill.add_argument("run", help="its name or folder")
    compare.add_argument("run", nargs="+", help="names or folders, two and more")
    for action in (ls, show, bill, compare):
        action.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where they are (runs)")
        action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    {"ls": _ls, "show": _show, "bill": _bill, "compare": _compare}[arguments.action](arguments)
    return 0


def _ls(arguments: argparse.Namespace) -> None:
    from rose.run.past_runs import past_runs

    runs = [] if _is_new_here(arguments.runs) else past_runs(arguments.runs)
    if arguments.json:
        print(json.dumps([run.shown() for run in runs], indent=1))
        return
    if not runs:
        print(f"There are no runs in {arguments.runs} yet.\nnext: rose run")
        return
    _print_figures([HEAD, *map(_row, runs)])
    _print_trouble(runs)
    where = "" if arguments.runs == Path("runs") else f" --runs {arguments.runs}"
    print(f"\nnext: rose runs show {runs[-1].name}{where}")


def _is_new_here(folder: Path) -> bool:
    """Return whether no run was ever made here: the usual folder is missing."""
    return folder == Path("runs") and not folder.exists()


def _show(arguments: argparse.Namespace) -> None:
    from rose.run.past_runs import find_run, past_runs

    if arguments.run is not None:
        run = find_run(arguments.runs, arguments.run)
    elif runs := past_runs(arguments.runs):
        run = runs[-1]
    else:
        raise ConfigError(f"there are no runs in {arguments.runs} yet", hint="make one: rose run")
    if arguments.json:
        print(json.dumps(run.shown() | {"settings": run.settings}, indent=1))
        return
    print(f"run {run.name}, {run.state}, began {_when(run.began_s)}, in {run.path}")
    if run.summary is not None:
        figures = figures_of(run)
        print_table([(words, _shown(run, key, figures[key])) for key, words in FIGURES.items()], indent="  ")
        notes = run.summary.get("notes")
        if isinstance(notes, list) and notes:
            print("\nnotes:\n" + "\n".join(f"  {note}" for note in notes))
    _print_trouble([run])
    if run.report is not None:
        print(f"\nreport: {run.report}")


def _bill(arguments: argparse.Namespace) -> None:
    import msgspec

    from rose.run.chargeback import bill_of_folder
    from rose.run.past_runs import find_run

    run = find_run(arguments.runs, arguments.run)
    bill = bill_of_folder(run.name, run.path)
    if arguments.json:
        shown = msgspec.to_builtins(bill) | {"borne_usd": bill.borne_usd, "due_usd": bill.due_usd}
        print(json.dumps(shown, indent=1))
        return
    count = f"{bill.lent_s:,.1f} s" if bill.lent_s is not None else "not recorded by this run"
    if bill.lent_tokens is not None:
        count += (
            f", {bill.lent_tokens:,} tokens in {bill.lent_steps or 0:,} steps ({bill.evicted_tokens or 0:,} evicted)"
        )
    rows = [
        ("borrowed", f"{bill.borrowed_s:,.1f} s in {bill.steps:,} steps, {bill.borrowed_rollout_s:,.1f} s of rollouts"),
        ("lent", count),
        ("turns", f"{bill.turns:,}"),
        ("lost", f"{bill.lost:,.1f} requests of users, {bill.ambiguous:,} ambiguous ({bill.losses_basis})"),
        *((words, f"USD {usd:.6g}") for words, usd in (
            ("energy", bill.energy_usd), ("transfer", bill.transfer_usd), ("headroom", bill.headroom_usd),
            ("losses", bill.losses_usd), ("charged time", bill.charged_usd), ("due", bill.due_usd),
        )),
    ]  # fmt: skip
    print(f"device {bill.lender} to run {bill.borrower}")
    print_table(rows, indent="  ")
    print("\nprices: `cost` in the run's settings (docs/economics.md)")


def _compare(arguments: argparse.Namespace) -> None:
    from rose.run.past_runs import find_run

    if len(arguments.run) < 2:
        raise ConfigError("one run has nothing to be compared with", hint="name two: rose runs compare ONE OTHER")
    runs = [find_run(arguments.runs, name) for name in arguments.run]
    figures = [figures_of(run) for run in runs]
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in NAMES)
    settings = {key: [run.settings.get(key) for run in runs] for key in keys}
    differing = {key: values for key, values in settings.items() if any(value != values[0] for value in values)}
    if arguments.json:
        listed = {key: [values[key] for values in figures] for key in FIGURES}
        print(json.dumps({"runs": [run.shown() for run in runs], "figures": listed, "settings": differing}, indent=1))
        return
    rows = [("", *(run.name for run in runs), "last / first" if len(runs) == 2 else "")]
    for key, words in FIGURES.items():
        rows.append(
            (words, *(_row_value(run, key, values[key]) for run, values in zip(runs, figures)), _ratio(key, figures))
        )
    _print_figures(rows)
    print("\nsettings in which they differ:" if differing else "\nTheir settings are the same.")
    print_table([(key, *map(_setting, values)) for key, values in differing.items()], indent="  ")
    _print_trouble(runs)


def figures_of(run: PastRun) -> dict[str, Any]:
    """Return the figures of a run by the keys of FIGURES; None for what it does not know."""
    summary = run.summary or {}
    figures = {key: summary.get(key) for key in FIGURES}
    by_pool = summary.get("turns_by_pool")
    counts = list(by_pool.values()) if isinstance(by_pool, dict) else []
    if by_pool and all(isinstance(count, int) for count in counts) and sum(counts):
        figures["borrowed_share"] = by_pool.get("borrowed", 0) / sum(counts)
    return figures


def _row(run: PastRun) -> tuple[str, ...]:
    figures = figures_of(run)
    before, after, *others = (
        _row_value(run, key, figures[key])
        for key in ("success_before", "success_after", "borrowed_share", "serving_attainment", *MONEY)
    )
    environment = str(run.settings.get("environment", "-"))
    steps = _value("steps", figures["steps"])
    return (run.name, _when(run.began_s), environment, steps, f"{before} > {after}", *others, run.state)


def _in_budget(run: PastRun, key: str, *, is_short: bool = False) -> str:
    """Return how many requests kept their budgets, of how many; with an interval unless it has to be short."""
    from rose.run.run_statistics import kept_text

    summary = run.summary or {}
    share, count = summary.get(key), summary.get(JUDGED[key])
    if not isinstance(share, int | float) or not isinstance(count, int) or not count:
        return "-"
    return f"{round(share * count):,}/{count:,}" if is_short else kept_text(share, count, "requests")


def _row_value(run: PastRun, key: str, value: Any) -> str:
    return _in_budget(run, key, is_short=True) if key in JUDGED else _value(key, value)


def _shown(run: PastRun, key: str, value: Any) -> str:
    return _in_budget(run, key) if key in JUDGED else _value(key, value)


def _value(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)[:20]
    if key in SHARES:
        return f"{value:.2%}" if key in FINE_SHARES else f"{value:.1%}"
    if key in MONEY:
        return f"{1e6 * value:,.0f}" if value >= 1e-4 else f"{1e6 * value:.3g}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _ratio(key: str, figures: Sequence[dict[str, Any]]) -> str:
    """Return the ratio of two runs, where both have a number."""
    if key in JUDGED:
        return ""
    first, last = figures[0][key], figures[-1][key]
    if len(figures) != 2 or not all(isinstance(value, int | float) for value in (first, last)) or not first:
        return ""
    return f"x {last / first:.2f}"


def _setting(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _when(began_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(began_s))


def _print_figures(rows: Sequence[Sequence[str]]) -> None:
    print_table(rows, right=range(1, len(rows[0])), indent="  ")


def _print_trouble(runs: Iterable[PastRun]) -> None:
    lines = [f"  {run.name}: {run.trouble}" for run in runs if run.trouble]
    if lines:
        print("\nproblems:\n" + "\n".join(lines))
