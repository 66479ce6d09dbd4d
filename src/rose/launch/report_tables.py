"""The part of a run's page that is words and numbers: the headline, the cost, and the tables at the end.

Money is small in small runs, so that it is shown for as many correct answers as make it readable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from rose.config import text
from rose.launch.figures import Line, of_kind
from rose.load.table import duration

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


def usd_pair(value: float, other: float) -> tuple[str, str, str]:
    """Both at one scale, and for how many answers that is."""
    scale = next((scale for scale in SCALES if max(value, other) * scale >= 0.01), max(SCALES))
    return f"{value * scale:.3g}", f"{other * scale:.3g}", SCALES[scale]


def headline(summary: Line) -> str:
    """What a reader has to know first, as a row of tiles."""
    tiles = [_success_tile(summary), *_cost_tile(summary), _speed_tile(summary), _serving_tile(summary)]
    tiles.append(_ledger_tile(summary))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _success_tile(summary: Line) -> str:
    after = summary["success_after"] if summary["success_after"] is not None else summary["success_before"]
    return _tile(percent(after), "held-out success", f"{percent(summary['success_before'])} before learning")


def _cost_tile(summary: Line) -> list[str]:
    if summary["cost_per_correct"] is None:
        return []
    here, fixed, what = usd_pair(summary["cost_per_correct"], summary["cost_per_correct_fixed"])
    basis = summary["cost"]["fixed_basis"]
    words = f"for {what}; {fixed} without borrowing ({basis})" if basis != "same" else f"for {what}"
    return [_tile(f"$ {here}", "cost", words, is_fine=summary["cost"]["is_consistent"])]


def _speed_tile(summary: Line) -> str:
    by_pool = summary["turns_by_pool"]
    borrowed = by_pool["borrowed"] / max(1, sum(by_pool.values()))
    words = f"of {summary['turns']:,} turns ran on the serving device"
    if summary["throughput_ratio"] is None:
        return _tile(percent(borrowed, 0), "borrowed", words)
    low, high = summary["throughput_ratio_low"], summary["throughput_ratio_high"]
    interval = f"; {low:.2f} to {high:.2f}" if low is not None else ""
    return _tile(f"x {summary['throughput_ratio']:.2f}", "whole steps", f"with the borrowed device{interval}")


def _serving_tile(summary: Line) -> str:
    alone = summary["serving_attainment_alone"]
    words = f"of {summary['serving_requests_lent']:,} requests of users while the device was lent"
    words += f"; {percent(alone, 2)} with nothing lent" if alone is not None else ""
    return _tile(percent(summary["serving_attainment"], 2), "serving in budget", words)


def _ledger_tile(summary: Line) -> str:
    wrong = [summary[key] for key in ("lost", "doubled", "differing") if summary[key] is not None]
    words = f"of {summary['begun']:,} trajectories" if summary["begun"] is not None else ""
    return _tile(str(sum(wrong)) if wrong else "-", "lost or doubled", words, is_fine=not sum(wrong))


def _tile(value: str, name: str, words: str, *, is_fine: bool = True) -> str:
    kind = "tile" if is_fine else "tile trouble"
    return f'<div class="{kind}"><b>{escape(value)}</b><span>{escape(name)}</span><i>{escape(words)}</i></div>'


# The cost of a correct answer


def cost_section(summary: Line) -> list[str]:
    cost = summary["cost"]
    if not cost["total_usd"]:
        return []
    parts = ["<h2>Cost per correct answer</h2>", _cost_bars(summary), _factors(summary)]
    parts.append("<p>What was paid for:</p>")
    total = cost["total_usd"]
    parts.append(
        table([(BILL_WORDS[key], f"{value / total:.1%}, $ {value:.4g}") for key, value in cost["bill"].items()])
    )
    parts.append("<p>Three prices of a million rollout tokens:</p>")
    prices = {
        "dedicated": "on the job's own device", "serving": "on the serving device, at its full price",
        "borrowed": "on the serving device, at the margin",
    }  # fmt: skip
    parts.append(table([(words, _usd(cost["prices"][key])) for key, words in prices.items()]))
    parts.append(f"<p>Weights sent to the borrowed device: {_sent(cost['transfer_bytes'])}.</p>")
    return parts


def _sent(transfer_bytes: int | None) -> str:
    if transfer_bytes is None:
        return "not measured, and not in the bill"
    return f"{transfer_bytes / 1e6:,.1f} MB"


def _cost_bars(summary: Line) -> str:
    cost = summary["cost"]
    rows = [("this run", cost["total_usd"], cost["total_usd"] - sum(_borrowed(cost["bill"])))]
    rows.append(("without borrowing", cost["fixed_usd"], cost["fixed_usd"]))
    most = max(total for _, total, _ in rows) or 1.0
    shown = []
    for name, total, dedicated in rows:
        own, other = 100 * dedicated / most, 100 * (total - dedicated) / most
        bars = f'<i class="dedicated" style="width:{own:.2f}%"></i><i class="borrowed" style="width:{other:.2f}%"></i>'
        shown.append(f'<div class="bar"><span>{name}</span><div>{bars}</div><b>$ {total:.4g}</b></div>')
    keys = '<span class="key dedicated"></span>devices of the job<span class="key borrowed"></span>borrowed'
    basis = f"Without borrowing: {cost['fixed_basis']}, {BASES[cost['fixed_basis']]}."
    return f"<p>{escape(basis)}{keys}</p>{''.join(shown)}"


def _borrowed(bill: dict[str, float]) -> Iterable[float]:
    return (value for key, value in bill.items() if not key.startswith("dedicated"))


def _factors(summary: Line) -> str:
    factors = summary["cost"]["factors"]
    if factors is None:
        return "<p>No trajectory was correct: there is a bill and no cost of a correct answer.</p>"
    rows = [
        ("CPM, USD for a million tokens", f"{factors['cpm_usd']:.6g}"),
        ("R, million tokens of a trajectory", f"{factors['reasoning_million_tokens']:.6g}"),
        ("rho, rollouts beside the judged ones", f"{factors['rollout_ratio']:.6g}"),
        ("alpha, share of trajectories that are correct", f"{factors['accept_ratio']:.6g}"),
        ("CPM x R x (1 + rho) / alpha, USD", f"{summary['cost_per_correct']:.6g}"),
    ]
    check = "as the total over the correct trajectories says"
    if wrong := summary["cost"]["miscounted"]:
        check += f"; but counts of {' and '.join(wrong)} contradict each other: a part is greater than its whole"
    elif not summary["cost"]["is_consistent"]:
        check = "NOT what the total over the correct trajectories says"
    return table(rows) + f"<p>The factors multiply to that, {check}.</p>"


# Tables


def figures_table(summary: Line) -> str:
    by_pool = summary["turns_by_pool"]
    borrowed = by_pool["borrowed"] / max(1, sum(by_pool.values()))
    success = f"{percent(summary['success_before'])} before, {percent(summary['success_after'])} after"
    played = f"{summary['trajectories']:,} in {summary['turns']:,} turns; {borrowed:.0%} of the turns borrowed"
    attained = f"{percent(summary['serving_attainment'], 2)} of requests during rollouts with the device lent"
    rows = [
        ("steps", f"{summary['steps']}, {number(summary['step_s'])} s each"),
        ("held-out success", success),
        ("trajectories", played),
        ("actions not understood", percent(summary["invalid_share"])),
        ("rollout share of a step", percent(summary["rollout_share"])),
        ("serving in budget", attained),
        ("lost, counted twice", f"{summary['lost']}, {summary['doubled']}"),
        ("restarts", str(summary["restarts"])),
        ("weights to every worker", f"{number(summary['weight_sync_s'])} s; turns stood still for {_pause(summary)}"),
        ("borrowed and given back", _cycles(summary)),
        ("oldest token learnt from", _staleness(summary)),
        ("trainer and engine apart", f"{number(summary['logprob_gap_mean'])}, nats per token"),
        ("control plane", f"{number(summary['control_cpu_ms_per_turn'])} ms of processor time per turn"),
    ]
    if summary["throughput_ratio"] is not None:
        low, high = summary["throughput_ratio_low"], summary["throughput_ratio_high"]
        words = f"x {summary['throughput_ratio']:.2f} ({number(low)} to {number(high)})"
        speed = f"rollouts x {summary['rollout_speedup']:.2f}, whole steps {words}"
        alone = f"{percent(summary['serving_attainment_alone'], 2)} of requests in budget"
        rows.insert(5, ("with the borrowed device", speed))
        rows.insert(7, ("the same, held back", alone))
    return table(rows)


def _pause(summary: Line) -> str:
    return "a time nobody told" if summary["pause_s"] is None else f"{1000 * summary['pause_s']:.3g} ms"


def _cycles(summary: Line) -> str:
    share = summary["allocation_overhead_share"]
    if share is None:
        return "no device was"
    times = summary["borrow_cycles"]
    return f"{times} time{'' if times == 1 else 's'}; on its way for {share:.2%} of the time"


def _staleness(summary: Line) -> str:
    oldest = summary["staleness_max"]
    return "-" if oldest is None else "of the newest version" if not oldest else f"{oldest} versions old"


def steps_table(lines: Sequence[Line]) -> str:
    """Every step, folded away: who wants it opens it."""
    heads = "".join(f"<th>{escape(word)}</th>" for word in STEP_COLUMNS.values())
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _step_cells(s))}</tr>" for s in of_kind(lines, "step"))
    return f"<details><summary>Every step</summary><table><tr>{heads}</tr>{rows}</table></details>"


def _step_cells(step: Line) -> list[str]:
    made = {
        "groups": f"{step['groups_kept']}/{step['groups_total']}",
        "success": percent(step["successes"] / max(1, step["trajectories"]), 0),
        "clipped_share": percent(step.get("clipped_share")),
        "drifted_share": percent(step.get("drifted_share")),
    }
    return [escape(made[key] if key in made else _cell(step.get(key))) for key in STEP_COLUMNS]


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, float) else "-" if value is None else str(value)


def opening(summary: Line, lines: Sequence[Line], settings: str) -> str:
    """What was learnt and how, in a sentence, and another of a run that ended early."""
    steps = of_kind(lines, "step")
    ended = "".join(f" The run {_ended_words(line)}." for line in of_kind(lines, "ended")[-1:])
    if not steps:
        return f"<p>No step was finished.{ended}</p>"
    played_s = sum(step["step_s"] for step in steps)
    counts = f"{len(steps)} steps of {_job_words(settings)} in {duration(played_s)}"
    counts += f", {summary['trajectories']:,} trajectories"
    times = summary["resumes"]
    resumed = f"; it went on after {times} interruption{'s' if times > 1 else ''}" if times else ""
    return f"<p>{escape(counts)}{resumed}.{ended}</p>"


def _job_words(settings: str) -> str:
    """As the settings in force say it: what is played, by which loss, in which loop."""
    tree = text.parse(settings, "settings")
    known = tree if isinstance(tree, dict) else {}
    loss = str(known.get("train", {}).get("loss", {}).get("name", "training")).upper()
    loop = "asynchronous " if known.get("asynchrony", {}).get("is_used") else ""
    words = f"{loop}{loss} on {known.get('environment', 'a task')}"
    return f"{words}, with an agent of its own" if known.get("agent") else words


def notes_section(summary: Line) -> str:
    """What no figure says, before anybody has to look for it."""
    if not summary["notes"]:
        return ""
    shown = "".join(f"<li>{escape(note)}</li>" for note in summary["notes"])
    return f'<ul class="notes">{shown}</ul>'


def _ended_words(line: Line) -> str:
    return f"failed: {escape(line['why'])}" if line["how"] == "failed" else "was interrupted"


def table(rows: Iterable[tuple[str, str]]) -> str:
    shown = [f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows]
    return f"<table>{''.join(shown)}</table>"


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _usd(value: float | None) -> str:
    return "-" if value is None else f"$ {value:.4g}"
