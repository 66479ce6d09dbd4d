"""The report of a run as one HTML page: headline figures, then plots, then tables. The page loads nothing.

`report.html.jinja` has the markup and its text; this module has what the page shows. The plots have their axes in
common: learning is over steps; turns by pool, the latency of serving against its budget, and who ran what are over the
seconds of the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from msgspec import UNSET

from rose.config import yaml_text
from rose.cost.bill import Cost
from rose.observe.plotting import LEFT, RIGHT, STYLE, WIDTH, Panel, decades, powers, round_up, steps, svg
from rose.observe.progress_line import duration
from rose.run.run_records import (
    DeathRecord,
    EndedRecord,
    EvaluationRecord,
    OriginRecord,
    RunRecord,
    SampleRecord,
    StepRecord,
    Summary,
    of_kind,
)
from rose.run.run_statistics import kept_text, percentile
from rose.run.serving_traffic import UserRequest

BINS_MAX = 48
BIN_S_MIN = 2.0
COLUMNS = 400  # of a row of blocks: two points of the plot each, however long the run was
PLOT_HEIGHT, LOW_PLOT_HEIGHT = 192, 142
POOLS = ("borrowed", "dedicated")
KINDS = {"weights": "publishing"}  # colours of rows that are not named like their row
LATENCY_MS_MIN = 0.01  # where a logarithmic axis begins at the latest
Block = tuple[float, float, Any]
"""From when to when, and what ran: turns as a number, all else in words."""

SCALES = {1: "one correct answer", 1000: "1,000 correct answers", 1_000_000: "a million correct answers"}
BASES = {
    "measured": "from the steps without the device",
    "estimated": "if the dedicated worker had played all turns at its own pace",
    "rented": "with a rented device in place of the borrowed one",
    "same": "nothing was borrowed",
}
BILL_WORDS = {
    "dedicated_rollouts": "devices of the job, during rollouts",
    "dedicated_training": "devices of the job, during learning and publishing",
    "energy": "borrowed: energy, as if the device had been busy throughout",
    "transfer": "borrowed: weights sent to the device",
    "headroom": "borrowed: memory kept free for serving",
    "slo_risk": "borrowed: requests of users that came late for it",
}
STEP_COLUMNS = {
    "step": "step", "verdict": "verdict", "groups": "groups", "success": "success", "rollout_s": "rollout s",
    "train_s": "train s", "publish_s": "publish s", "loss": "loss", "entropy": "entropy", "logprob_gap_mean": "gap",
    "rollout_kl": "KL", "reference_kl": "KL ref.", "clipped_share": "clipped", "drifted_share": "drifted",
    "staleness_max": "stale",
}  # fmt: skip


class Tile(NamedTuple):
    """One headline figure."""

    value: str
    name: str
    text: str
    is_fine: bool = True


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def usd(value: float | None) -> str:
    return "-" if value is None else f"$ {value:.4g}"


_environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
_environment.filters["usd"] = usd
_template = _environment.from_string((Path(__file__).parent / "report.html.jinja").read_text(encoding="utf-8"))


def html_report(summary: Summary, lines: Sequence[RunRecord], served: Sequence[UserRequest], settings: str) -> str:
    """Return the page. A run without a step has figures and no plots."""
    tree = yaml_text.parse(settings, "settings")
    known = tree if isinstance(tree, dict) else {}
    has_steps = bool(of_kind(lines, StepRecord))
    cost = summary.cost
    return _template.render(
        summary=summary,
        settings=settings,
        plot_style=Markup(STYLE),
        title=_title(summary, known),
        opening=_opening(summary, lines, known),
        origin=_origin_rows(lines),
        tiles=_tiles(summary) if has_steps else [],
        plots=_plots(lines, served, known) if has_steps else {},
        bases=BASES,
        bill=_bill_rows(cost) if cost is not None and cost.total_usd else [],
        factors=_factor_rows(cost) if cost is not None else [],
        check=_factor_check(cost) if cost is not None else "",
        figures=_figure_rows(summary),
        step_columns=STEP_COLUMNS.values(),
        step_rows=[_step_cells(step) for step in of_kind(lines, StepRecord)],
    )


def usd_pair(value: float, other: float) -> tuple[str, str, str]:
    """Return two prices for as many correct answers as make them readable, and how many answers that is."""
    scale = next((scale for scale in SCALES if max(value, other) * scale >= 0.01), max(SCALES))
    return f"{value * scale:.3g}", f"{other * scale:.3g}", SCALES[scale]


def _title(summary: Summary, settings: dict[str, Any]) -> str:
    """Return what was learnt, and the name of the run."""
    loss = str(settings.get("train", {}).get("loss", {}).get("name", "")).upper()
    return " ".join(filter(None, (loss, "on", str(settings.get("environment", "a task")), "·", summary.name)))


def _origin_rows(lines: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return where the run comes from; of a run that was resumed also each command after the first."""
    origins = of_kind(lines, OriginRecord)
    if not origins:
        return []
    first = origins[0]
    resumed = [("resumed", f"{each.began_utc}: {each.command}") for each in origins[1:]]
    machine = ("machine", first.machine)
    return [
        ("command", first.command),
        *resumed,
        machine,
        ("began", first.began_utc),
        ("version", f"ROSE {first.version}"),
    ]


def _opening(summary: Summary, lines: Sequence[RunRecord], settings: dict[str, Any]) -> str:
    """Return what was learnt and how in a sentence, and why a run ended early in another."""
    ended = ""
    for line in of_kind(lines, EndedRecord)[-1:]:
        ended = f" The run failed: {line.why}." if line.how == "failed" else " The run was interrupted."
    played = of_kind(lines, StepRecord)
    if not played:
        return f"No step was finished.{ended}"
    loss = str(settings.get("train", {}).get("loss", {}).get("name", "training")).upper()
    loop = "asynchronous " if settings.get("asynchrony", {}).get("is_used") else ""
    agent = ", with an agent of its own" if settings.get("agent") else ""
    job = f"{loop}{loss} on {settings.get('environment', 'a task')}{agent}"
    times = summary.resumes
    resumed = f"; it went on after {times} interruption{'s' if times > 1 else ''}" if times else ""
    took = duration(sum(step.step_s for step in played))
    return f"{len(played)} steps of {job} in {took}, {summary.trajectories:,} trajectories{resumed}.{ended}"


def _tiles(summary: Summary) -> list[Tile]:
    after = summary.success_after if summary.success_after is not None else summary.success_before
    tiles = [Tile(percent(after), "held-out success", f"{percent(summary.success_before)} before learning")]
    if summary.cost and summary.cost_per_correct is not None and summary.cost_per_correct_fixed is not None:
        here, fixed, what = usd_pair(summary.cost_per_correct, summary.cost_per_correct_fixed)
        basis = summary.cost.fixed_basis
        text = f"for {what}; {fixed} without borrowing ({basis})" if basis != "same" else f"for {what}"
        tiles.append(Tile(f"$ {here}", "cost", text, summary.cost.is_consistent))

    if summary.throughput_ratio is None:
        text = f"of {summary.turns:,} turns ran on the serving device"
        tiles.append(Tile(percent(summary.borrowed_share or 0.0, 0), "borrowed", text))
    else:
        low, high = summary.throughput_ratio_low, summary.throughput_ratio_high
        text = "with the borrowed device" + (f"; {low:.2f} to {high:.2f}" if low is not None else "")
        tiles.append(Tile(f"x {summary.throughput_ratio:.2f}", "whole steps", text))

    kept = kept_text(summary.serving_attainment, summary.serving_requests_lent, "requests")
    alone = kept_text(summary.serving_attainment_alone, summary.serving_requests_alone, "requests")
    share, _, interval = kept.partition(" requests ")
    text = f"requests of users while the device was lent {interval}" if kept else "no request of users was judged"
    text += f"; with nothing lent {alone}" if alone else ""
    tiles.append(Tile(share or "-", "serving in budget", text))

    wrong = [count for count in (summary.lost, summary.doubled, summary.differing) if count is not None]
    text = f"of {summary.begun:,} trajectories" if summary.begun is not None else ""
    tiles.append(Tile(str(sum(wrong)) if wrong else "-", "lost or doubled", text, not sum(wrong)))
    return tiles


def _bill_rows(cost: Cost) -> list[tuple[str, str]]:
    bill = asdict(cost.bill).items()
    return [(BILL_WORDS[key], f"{value / cost.total_usd:.1%}, {usd(value)}") for key, value in bill]


def _factor_rows(cost: Cost) -> list[tuple[str, str]]:
    factors = cost.factors
    if factors is None:
        return []
    return [
        ("CPM, USD for a million tokens", f"{factors.cpm_usd:.6g}"),
        ("R, million tokens of a trajectory", f"{factors.reasoning_million_tokens:.6g}"),
        ("rho, rollouts beside the judged ones", f"{factors.rollout_ratio:.6g}"),
        ("alpha, share of trajectories that are correct", f"{factors.accept_ratio:.6g}"),
        ("CPM x R x (1 + rho) / alpha, USD", f"{cost.cost_per_correct:.6g}"),
    ]


def _factor_check(cost: Cost) -> str:
    check = "as the total over the correct trajectories says"
    if wrong := cost.miscounted:
        return f"{check}; but counts of {' and '.join(wrong)} contradict each other: a part is greater than its whole"
    return check if cost.is_consistent else "NOT what the total over the correct trajectories says"


def _figure_rows(summary: Summary) -> list[tuple[str, str]]:
    pause, share, oldest = summary.pause_s, summary.allocation_overhead_share, summary.staleness_max
    paused = "an unknown time" if pause is None else f"{1000 * pause:.3g} ms"
    cycles = f"{summary.borrow_cycles} time{'' if summary.borrow_cycles == 1 else 's'}"
    age = "-" if oldest is None else f"{oldest} versions old" if oldest else "of the newest version"
    kept = kept_text(summary.serving_attainment, summary.serving_requests_lent, "requests")
    turns = f"{summary.turns:,} turns; {summary.borrowed_share or 0.0:.0%} of the turns borrowed"
    rows = [
        ("steps", f"{summary.steps}, {number(summary.step_s)} s each"),
        ("held-out success", f"{percent(summary.success_before)} before, {percent(summary.success_after)} after"),
        ("trajectories", f"{summary.trajectories:,} in {turns}"),
        ("actions not understood", percent(summary.invalid_share)),
        ("rollout share of a step", percent(summary.rollout_share)),
        ("serving in budget", f"{kept or '-'} during rollouts with the device lent"),
        ("lost, counted twice", f"{summary.lost}, {summary.doubled}"),
        ("restarts", str(summary.restarts)),
        ("weights to every worker", f"{number(summary.weight_sync_s)} s; turns stood still for {paused}"),
        (
            "borrowed and given back",
            "no device was" if share is None else f"{cycles}; on its way for {share:.2%} of the time",
        ),
        ("oldest token learnt from", age),
        ("trainer and engine apart", f"{number(summary.logprob_gap_mean)}, nats per token"),
        ("control plane", f"{number(summary.control_cpu_ms_per_turn)} ms of processor time per turn"),
    ]
    if summary.throughput_ratio is not None:
        low, high = summary.throughput_ratio_low, summary.throughput_ratio_high
        speed = f"rollouts x {summary.rollout_speedup:.2f}, whole steps x {summary.throughput_ratio:.2f}"
        rows.insert(5, ("with the borrowed device", f"{speed} ({number(low)} to {number(high)})"))
        alone = kept_text(summary.serving_attainment_alone, summary.serving_requests_alone, "requests in budget")
        rows.insert(7, ("the same, held back", alone or "-"))
    return rows


def _step_cells(step: StepRecord) -> list[str]:
    cells = {
        "groups": "-" if step.groups_total is None else f"{step.groups_kept}/{step.groups_total}",
        "success": percent(step.successes / max(1, step.trajectories), 0),
        "clipped_share": percent(step.clipped_share),
        "drifted_share": percent(step.drifted_share),
    }
    for key in STEP_COLUMNS.keys() - cells.keys():
        value = getattr(step, key)
        cells[key] = number(value) if value is None or isinstance(value, float) else str(value)
    return [cells[key] for key in STEP_COLUMNS]


# Plots


def _plots(lines: Sequence[RunRecord], served: Sequence[UserRequest], settings: dict[str, Any]) -> dict[str, Markup]:
    played, evaluations = of_kind(lines, StepRecord), of_kind(lines, EvaluationRecord)
    moments = [sample.at_s for sample in of_kind(lines, SampleRecord)]
    for step in played:
        moments += [step.began_s, step.began_s + step.step_s]
    for evaluation in evaluations:
        moments += [evaluation.began_s, evaluation.began_s + evaluation.took_s]
    begin_s, end_s = min(moments), max(max(moments), min(moments) + 1e-3)
    budgets = settings.get("serving", {}).get("lend", {})
    ttft_ms, tpot_ms = budgets.get("ttft_ms") or 500.0, budgets.get("tpot_ms") or 150.0
    return {
        "learning": _learning(played, evaluations),
        "throughput": _throughput(of_kind(lines, SampleRecord), begin_s, end_s),
        "ttft": _latency("Time to first token, ms", served, "ttft_ms", ttft_ms, begin_s, end_s),
        "tpot": _latency("Time per token, ms", served, "tpot_ms", tpot_ms, begin_s, end_s),
        "activity": _activity(lines, begin_s, end_s),
    }


def _plot(title: str, panel: Panel, unit: str) -> Markup:
    panel.times(steps(*panel.x), "{:g}".format)
    panel.text(WIDTH - RIGHT, panel.bottom + 30, unit, "soft end")
    return Markup(svg(title, panel.bottom + 34, panel.parts))


def _learning(played: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> Markup:
    panel = Panel(
        (0, max([*(line.step for line in played), *(line.step for line in evaluations)])), (0, 1), PLOT_HEIGHT
    )
    panel.levels(steps(0, 1), "{:.0%}".format)
    panel.line([(step.step, step.successes / max(1, step.trajectories)) for step in played], "learning")
    held_out = [(float(evaluation.step), evaluation.success_rate) for evaluation in evaluations]
    panel.line(held_out, "heldout")
    panel.dots(held_out, "heldout")
    return _plot("Learning curve", panel, "step")


def _throughput(samples: Sequence[SampleRecord], begin_s: float, end_s: float) -> Markup:
    """Plot the stacked turns per second: the borrowed device on top of the dedicated worker."""
    bins, width_s = _bins(begin_s, end_s)
    dedicated, both = [0.0] * bins, [0.0] * bins
    for before, after in itertools.pairwise(samples):
        place = int(((before.at_s + after.at_s) / 2 - begin_s) / width_s)  # turns belong to the middle of two samples
        if before.at_s < after.at_s and 0 <= place < bins:
            own, borrowed = (after.turns[kind] - before.turns[kind] for kind in ("dedicated", "borrowed"))
            dedicated[place] += own / width_s
            both[place] += (own + borrowed) / width_s
    panel = Panel((0, end_s - begin_s), (0, round_up(max(both))), PLOT_HEIGHT)
    panel.levels(steps(*panel.y), "{:g}".format)
    middles_s = [(place + 0.5) * width_s for place in range(bins)]
    panel.area([*zip(middles_s, dedicated)], [(at_s, 0.0) for at_s in middles_s], "dedicated")
    panel.area([*zip(middles_s, both)], [*zip(middles_s, dedicated)], "borrowed")
    return _plot("Throughput by pool", panel, "seconds")


def _latency(
    title: str, served: Sequence[UserRequest], key: str, budget_ms: float, begin_s: float, end_s: float
) -> Markup:
    bins, width_s = _bins(begin_s, end_s)
    values: list[list[float]] = [[] for _ in range(bins)]
    for request in served:
        place = int((request.at_s - begin_s) / width_s)
        if 0 <= place < bins and (value := getattr(request, key)) is not None:
            values[place].append(value)

    def curve(share: int) -> list[tuple[float, float]]:
        known = [((place + 0.5) * width_s, percentile(values[place], share)) for place in range(bins)]
        return [(at_s, max(1e-3, value)) for at_s, value in known if value is not None]

    tails, medians = curve(99), curve(50)
    shown = [value for _, value in tails + medians] + [budget_ms]
    panel = Panel(
        (0, end_s - begin_s), decades(max(LATENCY_MS_MIN, min(shown)), max(shown)), LOW_PLOT_HEIGHT, is_log=True
    )
    panel.levels(powers(*panel.y), "{:g}".format)
    panel.line(medians, "median")
    panel.line(tails, "learning")
    panel.dots([(at_s, value) for at_s, value in tails if value > budget_ms], "heldout")
    panel.budget(budget_ms, f"budget {budget_ms:g} ms")
    return _plot(title, panel, "seconds")


def _activity(lines: Sequence[RunRecord], begin_s: float, end_s: float) -> Markup:
    rows = _blocks(lines)
    panel = Panel((0, end_s - begin_s), (0, len(rows)), LOW_PLOT_HEIGHT)
    for place, (row, blocks) in enumerate(reversed(rows.items())):
        panel.text(LEFT - 8, panel.up(place + 0.5) + 4, row, "soft end")
        for from_s, to_s, what in _joined(blocks, (end_s - begin_s) / COLUMNS):
            title = f"{sum(what)} turns" if row in POOLS else " to ".join(dict.fromkeys((what[0], what[-1])))
            panel.block(from_s - begin_s, to_s - begin_s, place + 0.15, place + 0.85, KINDS.get(row, row), title)
    for death in of_kind(lines, DeathRecord):
        panel.mark(death.at_s - begin_s, f"{death.role} died")
    return _plot("Who ran what when", panel, "seconds")


def _blocks(lines: Sequence[RunRecord]) -> dict[str, list[Block]]:
    """Return what ran when, by rows from top to bottom."""
    rows: dict[str, list[Block]] = {row: [] for row in (*POOLS, "trainer", "weights", "evaluation")}
    for before, after in itertools.pairwise(of_kind(lines, SampleRecord)):
        for pool in POOLS:
            if (turns := after.turns[pool] - before.turns[pool]) > 0:
                rows[pool].append((before.at_s, after.at_s, turns))
    for step in of_kind(lines, StepRecord):
        played_s = step.began_s + step.rollout_s if step.train_began_s is UNSET else step.train_began_s
        learnt_s = played_s + step.train_s
        rows["trainer"].append((played_s, learnt_s, f"step {step.step}"))
        rows["weights"].append((learnt_s, learnt_s + step.publish_s, f"version {step.version}"))
    for evaluation in of_kind(lines, EvaluationRecord):
        ended_s = evaluation.began_s + evaluation.took_s
        rows["evaluation"].append((evaluation.began_s, ended_s, f"{evaluation.success_rate:.1%}"))
    return rows


def _joined(blocks: Iterable[Block], width_s: float) -> list[tuple[float, float, list[Any]]]:
    """Join blocks that begin within `width_s` of each other: the eye sees no more, and the page stays small."""
    joined: list[tuple[float, float, list[Any]]] = []
    for from_s, to_s, what in sorted(blocks, key=lambda block: block[0]):
        if joined and from_s - joined[-1][0] < width_s:
            begin_s, end_s, parts = joined[-1]
            parts.append(what)
            joined[-1] = (begin_s, max(end_s, to_s), parts)
        else:
            joined.append((from_s, to_s, [what]))
    return joined


def _bins(begin_s: float, end_s: float) -> tuple[int, float]:
    """Return how many intervals a plot over the seconds of the run has, and their width."""
    bins = max(1, min(BINS_MAX, int((end_s - begin_s) / BIN_S_MIN)))
    return bins, (end_s - begin_s) / bins
