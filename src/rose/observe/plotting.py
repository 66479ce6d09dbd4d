"""SVG plots, written by hand: panels with axes, and lines, dots, areas, bars and blocks inside them.

A plot loads nothing from elsewhere. `STYLE` has the classes of the frame, in light and dark by the reader's own
setting. The class of a mark names its kind, and the caller gives each kind a `color`; plain CSS, because not every
viewer of SVG knows variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, LEFT, RIGHT = 960, 76, 24
LOG_MIN = 1e-9  # what a logarithmic axis takes 0 for
TICKS = 5
DASH = 3.0  # half the length of a line with a single point
Point = tuple[float, float]

STYLE = """
text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f }
text.soft { fill: #6e7781 } text.warn { fill: #cf222e } .end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: #d8dee4 } .budget { stroke: #cf222e; stroke-width: 1.2; stroke-dasharray: 5 4 }
.line { fill: none; stroke: currentColor; stroke-width: 1.8 } .dot { fill: currentColor }
.area { fill: currentColor; opacity: .8 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } text.soft { fill: #8b949e } text.warn { fill: #ff7b72 }
  .grid { stroke: #30363d } .budget { stroke: #ff7b72 }
}
"""


@dataclass(slots=True)
class Panel:
    """A frame with axes; `x` and `y` are the ranges of the data. Drawing appends to `parts`."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: float
    top: float = 14
    is_log: bool = False  # of the y axis
    parts: list[str] = field(default_factory=list)

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / ((high - low) or 1.0)

    def up(self, value: float) -> float:
        """Return the height of a value; one out of range stays in the frame."""
        low, high, at = (math.log10(max(edge, LOG_MIN)) if self.is_log else edge for edge in (*self.y, value))
        return self.bottom - self.height * min(1.0, max(0.0, (at - low) / ((high - low) or 1.0)))

    def line(self, points: Sequence[Point], kind: str) -> None:
        places = [(self.across(x), self.up(y)) for x, y in points]
        if len(places) == 1:  # a single point would be invisible
            (x, y) = places[0]
            places = [(x - DASH, y), (x + DASH, y)]
        if places:
            self.parts.append(f'<polyline class="line {kind}" points="{_joined(places)}"/>')

    def dots(self, points: Iterable[Point], kind: str, radius: float = 3.5) -> None:
        for x, y in points:
            place = f'cx="{self.across(x):.1f}" cy="{self.up(y):.1f}"'
            self.parts.append(f'<circle class="dot {kind}" {place} r="{radius}"/>')

    def area(self, upper: Sequence[Point], lower: Sequence[Point], kind: str) -> None:
        if len(upper) > 1:
            places = [(self.across(x), self.up(y)) for x, y in [*upper, *reversed(lower)]]
            self.parts.append(f'<polygon class="area {kind}" points="{_joined(places)}"/>')

    def bars(self, values: Sequence[float], kind: str) -> None:
        """Draw one bar per value, side by side over the whole width; a value that is NaN or 0 has none."""
        width = (WIDTH - LEFT - RIGHT) / len(values)
        gap = min(2.0, width * 0.1)
        bars = []
        for place, value in enumerate(values):
            if value > 0:
                height = self.bottom - self.up(value)
                bars.append(
                    f"M{LEFT + place * width:.1f} {self.bottom:g}v{-height:.1f}h{width - gap:.2f}v{height:.1f}z"
                )
        self.parts.append(f'<path class="area {kind}" d="{"".join(bars)}"/>')

    def block(self, begin: float, end: float, low: float, high: float, kind: str, title: str) -> None:
        left, top = self.across(begin), self.up(high)
        width, height = max(0.6, self.across(end) - left), max(1.0, self.up(low) - top)
        self.parts.append(
            f'<rect class="area {kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}">'
            f"<title>{escape(title)}</title></rect>"
        )

    def budget(self, value: float, label: str) -> None:
        """Draw a level that should not be exceeded."""
        y = self.up(value)
        self.parts.append(f'<line class="budget" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        self.text(WIDTH - RIGHT - 4, y - 4, label, "end warn")

    def mark(self, x: float, title: str) -> None:
        """Draw an event as a line from top to bottom."""
        at = self.across(x)
        self.parts.append(
            f'<line class="budget" x1="{at:.1f}" x2="{at:.1f}" y1="{self.top:g}" y2="{self.bottom:g}">'
            f"<title>{escape(title)}</title></line>"
        )

    def text(self, x: float, y: float, text: str, kind: str) -> None:
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def levels(self, values: Iterable[float], label: Callable[[float], str]) -> None:
        """Draw the grid and the labels of the y axis."""
        for value in values:
            y = self.up(value)
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(LEFT - 8, y + 4, label(value), "soft end")

    def times(self, values: Iterable[float], label: Callable[[float], str]) -> None:
        """Draw the labels of the x axis."""
        for value in values:
            self.text(self.across(value), self.bottom + 17, label(value), "soft middle")


def svg(title: str, height: float, parts: Iterable[str], *, style: str | None = None) -> str:
    """Return a plot: for a page that has the styles, or with `style` for a file of its own."""
    own = [] if style is None else [f"<style>{style}</style>"]
    name = "" if style is None else ' xmlns="http://www.w3.org/2000/svg"'
    opening = f'<svg{name} viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
    return "\n".join([opening, f"<title>{escape(title)}</title>", *own, *parts, "</svg>", ""])


def steps(low: float, high: float) -> list[float]:
    """Return a handful of round numbers from low to high."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if raw <= factor * power * (1 + 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def powers(low: float, high: float) -> list[float]:
    """Return the powers of ten from low to high."""
    return [10.0**power for power in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def decades(low: float, high: float) -> tuple[float, float]:
    """Return the powers of ten around two values, at least one apart."""
    begin, end = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return 10.0**begin, 10.0 ** max(end, begin + 1)


def round_up(value: float) -> float:
    """Return the next number whose half reads well too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 3, 4, 6, 8, 10) if value <= factor * power * (1 + 1e-9))


def _joined(places: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
