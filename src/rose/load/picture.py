"""Picture of a load run: latency against its budget, the load and the harvested tokens, over the same time.

A self-contained SVG. Latencies are on a logarithmic axis, since a tail is often ten times its median and the budget ten
times that; rates start at 0. What is over budget is red, and nothing else is.

Latencies belong to the bin in which their request should have arrived, tokens to the bin in which they came. A bin is
as wide as it must be for at most `BINS_MAX` of them, and its width is a round number. Its P99 is often simply
its slowest request; a bin without requests has no latency, which is not the same as a latency of 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rose.load.driver import Record, RequestOutcome
from rose.load.harvest import Harvest
from rose.load.load_report import LatencyBudget, measure, seen
from rose.load.statistics import percentile
from rose.load.traces import Floats
from rose.observe.intervals import share_text
from rose.observe.plotting import LEFT, RIGHT, STYLE, WIDTH, Panel, decades, powers, round_up, svg

HEAD, PANEL, GAP, FOOT = 88, 112, 42, 44
BINS_MAX = 120  # seven pixels each: narrower ones are noise to the eye
WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
TICKS_MAX = 10
MISSES = (RequestOutcome.REJECTED, RequestOutcome.TIMED_OUT, RequestOutcome.FAILED)

OWN_STYLE = """
.paper { fill: #ffffff } text.title { font-size: 17px; font-weight: 600 } text.name { font-weight: 600 }
.tail, .median, .band { color: #0969da } .over { color: #cf222e; fill: currentColor }
.load { color: #8250df } .out { color: #bf8700 } .harvest { color: #1a7f37 }
.line.median { stroke-width: 1.2; opacity: .55 } .area { opacity: .65 } .area.band { opacity: .16 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117 } .tail, .median, .band { color: #58a6ff } .over { color: #ff7b72 }
  .load { color: #a371f7 } .out { color: #d29922 } .harvest { color: #3fb950 }
}
"""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One value per bin; NaN where there is nothing to show. Rates are per second."""

    bin_s: float
    ttft_p50_s: Floats
    ttft_p99_s: Floats
    tpot_p50_s: Floats
    tpot_p99_s: Floats
    misses: Floats  # requests without their answer
    requests: Floats
    output_tokens: Floats
    harvested_tokens: Floats | None
    judged: int
    attained: int

    @property
    def duration_s(self) -> float:
        return self.bin_s * len(self.requests)


def series_of(records: Sequence[Record], budget: LatencyBudget, harvest: Harvest) -> Series:
    """Return the series from second 0 to the last token or arrival."""
    ended = [record for record in records if record.outcome is not None]
    measures = measure(ended, budget)
    stamps = np.concatenate([np.empty(0), *(np.asarray(record.token_s) for record in ended)])
    last_s = max(float(stamps.max(initial=0.0)), float(measures.at_s.max(initial=0.0)))
    bin_s = width_s(last_s)
    bins = math.floor(last_s / bin_s) + 1
    places = (measures.at_s // bin_s).astype(np.int64)
    verdicts = seen(measures.attained)
    is_miss = np.array([record.outcome in MISSES for record in ended], dtype=bool)

    def rate(at_s: Floats) -> Floats:
        return np.bincount((at_s // bin_s).astype(np.int64), minlength=bins) / bin_s

    def tails(values_s: Floats, percent: int) -> Floats:
        return np.array([percentile(seen(values_s[places == place]), percent) for place in range(bins)])

    return Series(
        bin_s=bin_s,
        ttft_p50_s=tails(measures.ttft_s, 50),
        ttft_p99_s=tails(measures.ttft_s, 99),
        tpot_p50_s=tails(measures.tpot_s, 50),
        tpot_p99_s=tails(measures.tpot_s, 99),
        misses=np.bincount(places[is_miss], minlength=bins).astype(np.float64),
        requests=rate(measures.at_s),
        output_tokens=rate(stamps),
        harvested_tokens=_harvested(harvest, bin_s, bins),
        judged=verdicts.size,
        attained=int(verdicts.sum()),
    )


def width_s(duration_s: float) -> float:
    """Return the narrowest width that needs at most `BINS_MAX` bins."""
    return next((float(width) for width in WIDTHS_S if duration_s / width < BINS_MAX), duration_s / (BINS_MAX - 1))


def draw(records: Sequence[Record], budget: LatencyBudget, *, title: str, harvest: Harvest) -> str:
    """Return the SVG. Without samples of the harvest there is no panel for it."""
    series = series_of(records, budget, harvest)
    tops = itertools.count(HEAD, PANEL + GAP)
    panels = [
        _latency(next(tops), series, "Time to first token", series.ttft_p50_s, series.ttft_p99_s, budget.ttft_s),
        _latency(next(tops), series, "Time per token", series.tpot_p50_s, series.tpot_p99_s, budget.tpot_s),
        _rate(next(tops), series, "Load, requests per second", series.requests, "load"),
        _rate(next(tops), series, "Served, output tokens per second", series.output_tokens, "out"),
    ]
    if series.harvested_tokens is not None:
        name = "Harvested, rollout tokens per second"
        panels.append(_rate(next(tops), series, name, series.harvested_tokens, "harvest"))

    last = panels[-1]
    step_s = next((tick for tick in TICKS_S if series.duration_s / tick <= TICKS_MAX), TICKS_S[-1])
    last.times([number * step_s for number in range(math.floor(series.duration_s / step_s) + 1)], _duration)
    if misses := int(series.misses.sum()):
        for place in np.flatnonzero(series.misses):
            x = last.across((place + 0.5) * series.bin_s)
            last.parts.append(f'<path class="over" d="M{x - 3:.1f} {HEAD + 1}h6l-3 6z"/>')
        text = f"▼ {misses} requests without an answer: refused, timed out or failed"
        last.text(LEFT, last.bottom + 35, text, "warn")

    height = last.bottom + FOOT
    attained = share_text(series.attained, series.judged, "requests in budget")
    head = Panel((0, 1), (0, 1), HEAD)
    head.parts.append(f'<rect class="paper" width="{WIDTH}" height="{height:g}"/>')
    head.text(LEFT, 26, title, "title")
    head.text(LEFT, 45, attained if series.judged else "no request has ended", "soft")
    parts = [part for panel in (head, *panels) for part in panel.parts]
    return svg(title, height, parts, style=STYLE + OWN_STYLE)


def _latency(top: int, series: Series, name: str, median_s: Floats, tail_s: Floats, budget_s: float) -> Panel:
    """Return the panel of a latency: median and P99 of each bin, the band between them, and the budget."""
    known_ms = 1000 * seen(np.concatenate([median_s, tail_s, [budget_s]]))
    known_ms = known_ms[known_ms > 0]
    y_ms = decades(float(known_ms.min()), float(known_ms.max()) * 1.05)
    panel = Panel((0, series.duration_s), y_ms, PANEL, top, is_log=True)
    panel.text(LEFT, top - 9, name, "name")
    panel.text(WIDTH - RIGHT, top - 9, f"P50 to P99 of each {_duration(series.bin_s)}; red is over budget", "soft end")
    panel.levels(powers(*y_ms), _latency_text)
    for run in _runs(tail_s):
        middles_s = [(place + 0.5) * series.bin_s for place in run]
        medians = [*zip(middles_s, (1000 * median_s[run]).tolist())]
        tails = [*zip(middles_s, (1000 * tail_s[run]).tolist())]
        panel.area(tails, medians, "band")
        panel.line(medians, "median")
        panel.line(tails, "tail")
    late = np.flatnonzero(tail_s > budget_s)
    panel.dots([((place + 0.5) * series.bin_s, 1000 * tail_s[place]) for place in late], "over", 3)
    panel.budget(budget_s * 1000, f"budget {_latency_text(budget_s * 1000)}")
    return panel


def _rate(top: int, series: Series, name: str, values: Floats, kind: str) -> Panel:
    """Return the bars of a rate from 0; a bin without a value has none."""
    high, known = round_up(float(np.nanmax(values, initial=0.0))), seen(values)
    panel = Panel((0, series.duration_s), (0, high), PANEL, top)
    panel.text(LEFT, top - 9, name, "name")
    panel.text(WIDTH - RIGHT, top - 9, f"mean {_short(float(known.mean()) if known.size else 0.0)}", "soft end")
    panel.levels((0.0, high / 2, high), _short)
    panel.bars(values.tolist(), kind)
    return panel


def _runs(values: Floats) -> Iterator[list[int]]:
    """Yield runs of neighbouring bins that have a value; a gap in the data is a gap in the line."""
    for is_known, run in itertools.groupby(range(len(values)), key=lambda place: not math.isnan(values[place])):
        if is_known:
            yield list(run)


def _harvested(harvest: Harvest, bin_s: float, bins: int) -> Floats | None:
    """Return tokens per second, spread evenly between samples; bins before the first and after the last are NaN."""
    if len(harvest.tokens) < 2:
        return None
    at_s = np.array(harvest.at_s)
    # A counter that fell began again with its process: what it shows then is not known to be new, and counts as none.
    gained = np.concatenate([[0.0], np.cumsum(np.maximum(0.0, np.diff(harvest.tokens)))])
    edges_s = np.arange(bins + 1) * bin_s
    begins_s, ends_s = np.clip(edges_s[:-1], at_s[0], at_s[-1]), np.clip(edges_s[1:], at_s[0], at_s[-1])
    looked_s = ends_s - begins_s
    tokens = np.interp(ends_s, at_s, gained) - np.interp(begins_s, at_s, gained)
    return np.divide(tokens, looked_s, out=np.full(bins, math.nan), where=looked_s > 0)


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
