"""The plan as one HTML page with pictures in SVG, which loads nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from rose.observe.plotting import STYLE, WIDTH, Panel, round_up, steps, svg
from rose.plan.economics import MORE_ROLLOUTS
from rose.plan.planning import PlanReport
from rose.plan.windows import Estimate, HourResult

HEIGHT, FOOT = 190.0, 44.0
PERCENT_LABELS = (0.0, 0.25, 0.5, 0.75, 1.0)


def page_of(report: PlanReport) -> str:
    """Return the page."""
    return _template.render(
        report=report, more_rollouts=MORE_ROLLOUTS, plot_style=STYLE,
        curve=curve_plot(report), hours=hours_plot(report.hours),
        reasons=[(reason, share) for reason, share in report.held_back.items() if share >= 0.0005],
    )  # fmt: skip


def curve_plot(report: PlanReport) -> str:
    """Return steps a day over borrowed devices, with its interval."""
    points = [(float(point.devices), point.steps_per_day) for point in report.points]
    most = round_up(max(estimate.high for _, estimate in points))
    panel = Panel((0.0, max(1.0, points[-1][0])), (0.0, most), HEIGHT)
    panel.levels(steps(0.0, most), lambda value: f"{value:g}")
    panel.area([(x, e.high) for x, e in points], [(x, e.low) for x, e in points], "band")
    panel.line([(x, e.value) for x, e in points], "lent")
    panel.dots([(x, e.value) for x, e in points], "lent")
    panel.times([x for x, _ in points], lambda value: f"{value:.0f}")
    panel.text(WIDTH / 2, panel.bottom + 36, "borrowed GPUs", "soft middle")
    return svg("Steps a day by borrowed GPUs", panel.bottom + FOOT, panel.parts)


def hours_plot(hours: Sequence[HourResult]) -> str:
    """Return the lent share by hour of the day; hours without data have no bar."""
    shares = [0.0] * 24
    for hour in hours:
        shares[hour.hour] = hour.lent_share.value
    panel = Panel((0.0, 24.0), (0.0, 1.0), HEIGHT)
    panel.levels(PERCENT_LABELS, lambda value: f"{value:.0%}")
    panel.bars(shares, "lent")
    panel.times(range(0, 25, 3), lambda value: f"{value:.0f} h")
    panel.text(WIDTH / 2, panel.bottom + 36, "hour of the day", "soft middle")
    return svg("Share of the time lent, by hour of the day", panel.bottom + FOOT, panel.parts)


def _percent(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}%}"


def _interval(estimate: Estimate, digits: int = 2) -> str:
    if math.isnan(estimate.value):
        return "no requests"
    ends = f"{estimate.low:.{digits}%} to {estimate.high:.{digits}%}"
    return f"{estimate.value:.{digits}%} ({ends}), n = {estimate.n:,}"


def _duration(seconds: float) -> str:
    return "-" if math.isinf(seconds) else f"{seconds:,.1f} s"


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


_environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
_environment.filters |= {"percent": _percent, "interval": _interval, "duration": _duration, "usd": _usd}
_template = _environment.from_string((Path(__file__).parent / "plan_page.html.jinja").read_text(encoding="utf-8"))
