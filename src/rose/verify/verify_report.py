"""The report of a kit for people: one HTML page that loads nothing, and the same as text of 80 columns.

`verify_report.html.jinja` has the markup. Every value is shown with its number of observations and its interval where
it has them. The replays of users' requests are side by side in one table and one plot.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rose.errors import ConfigError
from rose.observe.plotting import RIGHT, STYLE, WIDTH, Panel, decades, powers, svg
from rose.observe.progress_line import duration
from rose.private_files import write_durable
from rose.verify.kit_results import KitFigure, KitReport, Outcome, StepResult
from rose.verify.verification_steps import STEPS

COLUMNS = 80
HTML_FILE, TEXT_FILE = "report.html", "report.txt"
PLOT_HEIGHT = 190
REPLAYS = {
    "without ROSE": ("plain", ""),
    "alone, 1": ("serving-alone", " in run 1"),
    "alone, 2": ("serving-alone", " in run 2"),
    "page calls": ("page-calls-busy", ""),
    "idle": ("idle", ""),
    "decode": ("decode", ""),
    "no gate": ("time-slices", ""),
    "no gate, MPS": ("mps", ""),
}
LATENCIES = ("TTFT", "TPOT")
MARKS: dict[Outcome, str] = {"passed": "ok", "failed": "FAILED", "not run": "-"}


class ServedRun(NamedTuple):
    """One replay of users' requests, as a row of the comparison."""

    name: str
    attainment: KitFigure
    latencies: dict[str, KitFigure]  # "TTFT P50", "TTFT P99" and so on
    rollout_tokens: KitFigure | None


def served_runs(report: KitReport) -> list[ServedRun]:
    """Return the replays that were run."""
    runs = []
    for name, (step, suffix) in REPLAYS.items():
        result = report.result(step)
        attainment = result.figure(f"attainment{suffix}") if result is not None else None
        if result is None or attainment is None:
            continue
        latencies = {
            f"{kind} P{percent}": figure
            for kind in LATENCIES
            for percent in (50, 95, 99)
            if (figure := result.figure(f"{kind} P{percent}{suffix}")) is not None
        }
        runs.append(ServedRun(name, attainment, latencies, result.figure("rollout tokens per second")))
    return runs


def value_text(figure: KitFigure) -> str:
    """Return a figure with its unit, its interval and how many observations it is from."""
    text = f"{number(figure.value)} {figure.unit}".rstrip()
    if figure.low is not None or figure.high is not None:
        text += f" ({number(figure.low)} to {number(figure.high)})"
    return f"{text}, n = {figure.n:,}" if figure.n is not None else text


def number(value: float | None) -> str:
    """Return a number with three significant digits, or four near 100."""
    if value is None:
        return "?"
    size = abs(value)
    return (
        f"{value:,.0f}"
        if size >= 1000 or value == int(value)
        else f"{value:.{1 if size >= 100 else 2 if size >= 10 else 3}f}"
    )


def opening(report: KitReport) -> str:
    """Return what was run and how it went, in a few sentences."""
    counts = {outcome: sum(result.outcome == outcome for result in report.results) for outcome in MARKS}
    settings = report.settings
    device = f"a trial on {settings.device}: it says nothing about a GPU" if settings.is_cpu else settings.device
    text = (
        f"{report.began}, ROSE {report.rose}, {device}. Steps in {duration(report.run_seconds)}: "
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['not run']} not run."
    )
    return text if report.ended else f"{text} The kit has not ended: --resume goes on."


# HTML


_environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
_environment.filters |= {"figure": value_text, "number": number, "duration": duration}
_template = _environment.from_string((Path(__file__).parent / "verify_report.html.jinja").read_text(encoding="utf-8"))


def html_report(report: KitReport) -> str:
    """Return the page."""
    runs = served_runs(report)
    return _template.render(
        report=report,
        opening=opening(report),
        shows={step.name: step.shows for step in STEPS},
        marks=MARKS,
        runs=runs,
        columns=_latency_columns(runs),
        plot=_plot(runs) if runs else "",
        plot_style=Markup(STYLE),
    )


def _latency_columns(runs: Sequence[ServedRun]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.latencies))


def _plot(runs: Sequence[ServedRun]) -> Markup:
    """Plot the time to first token of every replay: median and tail, each with its interval."""
    marks = [
        (place, figure) for place, run in enumerate(runs) for name, figure in run.latencies.items() if "TTFT" in name
    ]
    values = [
        end for _, figure in marks for end in (figure.low, figure.value, figure.high) if end is not None and end > 0
    ]
    low, high = decades(min(values, default=1.0), max(values, default=10.0))
    panel = Panel((-0.5, len(runs) - 0.5), (low, high), PLOT_HEIGHT, is_log=True)
    panel.levels(powers(low, high), "{:g} ms".format)
    for place, figure in marks:
        kind = "median" if "P50" in figure.name else "tail"
        if figure.value is not None:
            at = place + (-0.08 if kind == "median" else 0.08)
            ends = (figure.low or figure.value, figure.high or figure.value)
            panel.line([(at, ends[0]), (at, ends[1])], kind)
            panel.dots([(at, figure.value)], kind)
    for place, run in enumerate(runs):
        panel.text(panel.across(place), panel.bottom + 17, run.name, "soft middle")
    panel.text(WIDTH - RIGHT, panel.bottom + 33, "requests of users, by what ran beside them", "soft end")
    return Markup(svg("Time to first token by replay", panel.bottom + 38, panel.parts))


# Text


def text_report(report: KitReport) -> str:
    """Return the report as text of at most 80 columns."""
    lines = ["ROSE on one GPU: verification", "", *_wrapped(opening(report)), ""]
    width = max((len(result.step) for result in report.results), default=0)
    for result in report.results:
        shown = f"{MARKS[result.outcome]:<6}  {result.step:<{width}}  {duration(result.seconds):>10}"
        lines.append(f"{shown}  {result.reason.splitlines()[0]}"[:COLUMNS] if result.reason else shown)
    if runs := served_runs(report):
        lines += ["", "Users", *_served_lines(runs)]
    for result in report.results:
        lines += ["", *_step_lines(result)]
    return "\n".join(lines) + "\n"


def _served_lines(runs: Sequence[ServedRun]) -> Iterator[str]:
    for run in runs:
        yield f"  {run.name}"
        yield from _pair("in budget", value_text(run.attainment))
        for name, figure in run.latencies.items():
            yield from _pair(name, value_text(figure))
        if run.rollout_tokens is not None:
            yield from _pair("rollouts", value_text(run.rollout_tokens))


def _step_lines(result: StepResult) -> Iterator[str]:
    shows = next((step.shows for step in STEPS if step.name == result.step), "")
    yield f"{result.step}: {result.outcome}"
    yield from _wrapped(shows, "  ")
    if result.reason:
        yield from _wrapped(result.reason, "  ! ")
    for check in result.checks:
        seen = f" ({check.seen})" if check.seen else ""
        yield from _wrapped(f"{'ok' if check.is_ok else 'FAILED'}  {check.name}{seen}", "  ")
    for figure in result.figures:
        yield from _pair(figure.name, value_text(figure))
    for name, value in result.facts.items():
        yield from _pair(name, value)
    for note in result.notes:
        yield from _wrapped(note, "  * ")


def _pair(name: str, value: str) -> list[str]:
    """Return a name and its value on a line, or on two if they do not fit."""
    line = f"    {name}: {value}"
    return [line] if len(line) <= COLUMNS else _wrapped(f"{name}: {value}", "    ")


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Return the text in lines of 80 columns; the first begins with the indent, the others under its text."""
    blank = " " * len(indent)
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        first = indent if not lines else blank
        lines += textwrap.wrap(paragraph, COLUMNS, initial_indent=first, subsequent_indent=blank) or [""]
    return lines


def write_pages(folder: Path, report: KitReport) -> None:
    """Write both forms of the report. Raises ConfigError."""
    for name, text in ((HTML_FILE, html_report(report)), (TEXT_FILE, text_report(report))):
        try:
            write_durable(folder / name, text.encode())
        except OSError as error:
            raise ConfigError(f"{folder / name} cannot be written: {error.strerror}") from error
