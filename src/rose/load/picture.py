"""One run as one picture: latency against its budget, the load, and what was harvested, over the same time.

A self-contained SVG, written by hand: no fonts, scripts or files from elsewhere, light and dark by the reader's own
setting. Latencies are on a logarithmic axis, since a tail is often ten times its median and the budget ten times that;
rates start at 0. What is over budget is red, and nothing else is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

import numpy as np

from rose.load.harvest import Harvest
from rose.load.records import Record
from rose.load.report import Budget
from rose.load.series import Series, series_of
from rose.load.traces import Floats

WIDTH, LEFT, RIGHT = 960, 76, 24
HEAD, PANEL, GAP, FOOT = 88, 112, 42, 44
PLOT = WIDTH - LEFT - RIGHT
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
TICKS_MAX = 10

STYLE = """
  .paper { fill: #ffffff }
  text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f }
  text.title { font-size: 17px; font-weight: 600 } text.name { font-weight: 600 }
  .soft { fill: #6e7781 } .end { text-anchor: end } .middle { text-anchor: middle }
  .grid { stroke: #d8dee4; stroke-width: 1 } .budget { stroke: #cf222e; stroke-width: 1.2; stroke-dasharray: 5 4 }
  .band { fill: #0969da; opacity: .16 } .tail { stroke: #0969da; stroke-width: 1.8; fill: none }
  .median { stroke: #0969da; stroke-width: 1.2; fill: none; opacity: .55 }
  .over, .red { fill: #cf222e } .load { fill: #8250df; opacity: .65 } .out { fill: #bf8700; opacity: .7 }
  .harvest { fill: #1a7f37; opacity: .65 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117 } text { fill: #e6edf3 } .soft { fill: #8b949e } .grid { stroke: #30363d }
    .band, .tail, .median { fill: none; stroke: #58a6ff } .band { fill: #58a6ff; stroke: none }
    .budget { stroke: #ff7b72 } .over, .red { fill: #ff7b72 }
    .load { fill: #a371f7 } .out { fill: #d29922 } .harvest { fill: #3fb950 }
  }
"""


def draw(records: Sequence[Record], budget: Budget, *, title: str, harvest: Harvest) -> str:
    """The whole SVG, as text. A harvest that was never seen has no panel."""
    series = series_of(records, budget, harvest)
    panels = [
        *[_latency(series, *row) for row in _latency_rows(series, budget)],
        *[_rate(series, *row) for row in _rate_rows(series)],
    ]
    parts = []
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {HEAD + number * (PANEL + GAP)})">')
        parts += [*panel, "</g>"]
    bottom = HEAD + len(panels) * (PANEL + GAP) - GAP
    return "\n".join([*_frame(bottom + FOOT, title, _summary(series)), *parts, *_clock(series, bottom), "</svg>", ""])


def _latency_rows(series: Series, budget: Budget) -> list[tuple[str, Floats, Floats, float]]:
    return [
        ("Time to first token", series.ttft_p50_s, series.ttft_p99_s, budget.ttft_s),
        ("Time per token", series.tpot_p50_s, series.tpot_p99_s, budget.tpot_s),
    ]


def _rate_rows(series: Series) -> list[tuple[str, Floats, str]]:
    rows = [
        ("Load, requests per second", series.requests, "load"),
        ("Served, output tokens per second", series.output_tokens, "out"),
    ]
    if series.harvested_tokens is not None:
        rows.append(("Harvested, rollout tokens per second", series.harvested_tokens, "harvest"))
    return rows


def _summary(series: Series) -> str:
    if not series.judged:
        return "no request has ended"
    return f"{series.judged:,} requests, {series.attained / series.judged * 100:.2f} % in budget"


def _frame(height: float, title: str, subtitle: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        _text(LEFT, 26, title, "title"),
        _text(LEFT, 45, subtitle, "soft"),
    ]


def _latency(series: Series, name: str, median_s: Floats, tail_s: Floats, budget_s: float) -> Iterator[str]:
    """Median and P99 of each bin, with everything between, and the budget across."""
    low_ms, high_ms = _decades(np.concatenate([median_s, tail_s, [budget_s]]) * 1000)

    def y(ms: float) -> float:
        share = math.log(max(ms, low_ms) / low_ms) / math.log(high_ms / low_ms)
        return PANEL * (1 - share)

    yield _text(LEFT, -9, name, "name")
    yield _text(WIDTH - RIGHT, -9, f"P50 to P99 of each {_duration(series.bin_s)}; red is over budget", "soft end")
    yield from _grid([(y(ms), _latency_text(ms)) for ms in _powers(low_ms, high_ms)])
    for run in _runs(tail_s):
        middles = [_x(series, (place + 0.5) * series.bin_s) for place in run]
        lower, upper = [y(median_s[place] * 1000) for place in run], [y(tail_s[place] * 1000) for place in run]
        yield _polygon("band", [*zip(middles, upper), *reversed([*zip(middles, lower)])])
        yield _line("median", zip(middles, lower))
        yield _line("tail", zip(middles, upper))
    for place in np.flatnonzero(tail_s > budget_s):
        yield _dot("over", _x(series, (place + 0.5) * series.bin_s), y(tail_s[place] * 1000))
    level = y(budget_s * 1000)
    yield f'<line class="budget" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>'
    yield _text(WIDTH - RIGHT - 4, level - 4, f"budget {_latency_text(budget_s * 1000)}", "red end")


def _rate(series: Series, name: str, values: Floats, kind: str) -> Iterator[str]:
    """Bars from 0; a bin that is not known has none."""
    high = _round_up(float(np.nanmax(values, initial=0.0)))
    mean = float(np.nanmean(values)) if np.any(~np.isnan(values)) else 0.0
    yield _text(LEFT, -9, name, "name")
    yield _text(WIDTH - RIGHT, -9, f"mean {_short(mean)}", "soft end")
    yield from _grid([(PANEL * (1 - share), _short(high * share)) for share in (0.0, 0.5, 1.0)])
    width = PLOT / len(values)
    gap = min(2.0, width * 0.1)
    bars = []
    for place, value in enumerate(values):
        if value > 0:
            height = PANEL * value / high
            bars.append(f"M{LEFT + place * width:.1f} {PANEL}v{-height:.1f}h{width - gap:.2f}v{height:.1f}z")
    yield f'<path class="{kind}" d="{"".join(bars)}"/>'


def _clock(series: Series, bottom: float) -> Iterator[str]:
    """The time under the lowest panel, and the requests that got no answer."""
    step_s = next((tick for tick in TICKS_S if series.duration_s / tick <= TICKS_MAX), TICKS_S[-1])
    for number in range(math.floor(series.duration_s / step_s) + 1):
        yield _text(_x(series, number * step_s), bottom + 17, _duration(number * step_s), "soft middle")
    misses = int(series.misses.sum())
    if misses:
        for place in np.flatnonzero(series.misses):
            x = _x(series, (place + 0.5) * series.bin_s)
            yield f'<path class="over" d="M{x - 3:.1f} {HEAD + 1}h6l-3 6z"/>'
        yield _text(LEFT, bottom + 35, f"▼ {misses} requests without an answer: refused, timed out or failed", "red")


def _runs(values: Floats) -> Iterator[list[int]]:
    """Neighbouring bins that have a value; a gap in the data is a gap in the line."""
    run: list[int] = []
    for place, value in enumerate(values):
        if not math.isnan(value):
            run.append(place)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _grid(levels: Sequence[tuple[float, str]]) -> Iterator[str]:
    for y, label in levels:
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(LEFT - 8, y + 4, label, "soft end")


def _line(kind: str, points: Iterable[tuple[float, float]]) -> str:
    """A single point is drawn as a short dash, or it could not be seen."""
    found = list(points)
    if len(found) == 1:
        (x, y), half = found[0], 3.0
        found = [(x - half, y), (x + half, y)]
    return f'<polyline class="{kind}" points="{_points(found)}"/>'


def _polygon(kind: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polygon class="{kind}" points="{_points(points)}"/>'


def _dot(kind: str, x: float, y: float) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _x(series: Series, at_s: float) -> float:
    return LEFT + PLOT * at_s / series.duration_s


def _decades(values_ms: Floats) -> tuple[float, float]:
    """Powers of ten around everything that is known."""
    known = values_ms[values_ms > 0]  # NaN is not
    low, high = math.floor(math.log10(known.min())), math.ceil(math.log10(known.max() * 1.05))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _powers(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]


def _round_up(value: float) -> float:
    """To a number whose half reads well too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 3, 4, 6, 8, 10) if value <= step * power * (1 + 1e-9))


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _latency_text(ms: float) -> str:
    return f"{_short(ms / 1000)} s" if ms >= 1000 else f"{_short(ms)} ms"


def _duration(seconds: float) -> str:
    if seconds < 120 and seconds % 60:
        return f"{seconds:g} s"
    if seconds < 7200:
        return f"{seconds / 60:g} min" if seconds else "0"
    return f"{seconds / 3600:g} h"
