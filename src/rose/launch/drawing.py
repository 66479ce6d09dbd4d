"""Small SVG pictures, written by hand: a frame with axes, and lines, dots, areas and blocks inside it.

Nothing is loaded from elsewhere; colours follow the reader's light or dark setting by classes of the page they are in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 920, 240
LEFT, RIGHT, TOP, BOTTOM = 74, 20, 14, 34
TICKS = 5
Point = tuple[float, float]


@dataclass(slots=True)
class Picture:
    """One frame. `x` and `y` are the ranges of the data; y may be logarithmic."""

    title: str
    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    height: int = HEIGHT
    is_log: bool = False
    y_format: str = "{:g}"
    parts: list[str] = field(default_factory=list)

    def across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / ((high - low) or 1.0)

    def up(self, value: float) -> float:
        low, high = (math.log10(max(edge, 1e-9)) if self.is_log else edge for edge in self.y)
        at = math.log10(max(value, 1e-9)) if self.is_log else value
        share = min(1.0, max(0.0, (at - low) / ((high - low) or 1.0)))
        return TOP + (self.height - TOP - BOTTOM) * (1 - share)

    def line(self, points: Sequence[Point], kind: str) -> None:
        if len(points) == 1:
            self.dots(points, kind)
        elif points:
            self.parts.append(f'<polyline class="line {kind}" points="{self._places(points)}"/>')

    def dots(self, points: Iterable[Point], kind: str, radius: float = 3.5) -> None:
        for x, y in points:
            self.parts.append(
                f'<circle class="dot {kind}" cx="{self.across(x):.1f}" cy="{self.up(y):.1f}" r="{radius}"/>'
            )

    def area(self, upper: Sequence[Point], lower: Sequence[Point], kind: str) -> None:
        if len(upper) > 1:
            places = self._places([*upper, *reversed(lower)])
            self.parts.append(f'<polygon class="area {kind}" points="{places}"/>')

    def block(self, begin: float, end: float, low: float, high: float, kind: str, words: str = "") -> None:
        left, top, foot = self.across(begin), self.up(high), self.up(low)
        width = max(0.6, self.across(end) - left)
        told = f"<title>{escape(words)}</title>" if words else ""
        self.parts.append(
            f'<rect class="area {kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{max(1.0, foot - top):.1f}">{told}</rect>'
        )

    def level(self, value: float, words: str, kind: str = "budget") -> None:
        y = self.up(value)
        self.parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        self.text(WIDTH - RIGHT - 4, y - 4, words, "end warn")

    def mark(self, x: float, words: str) -> None:
        at = self.across(x)
        self.parts.append(
            f'<line class="budget" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}">'
            f"<title>{escape(words)}</title></line>"
        )

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>')

    def svg(self, rows: Sequence[str] = ()) -> str:
        """The whole picture; with `rows`, the y axis names them instead of showing numbers."""
        grid = self._rows(rows) if rows else self._levels()
        return "\n".join(
            [
                f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(self.title)}">',
                f"<title>{escape(self.title)}</title>",
                *grid,
                *self._times(),
                *self.parts,
                "</svg>",
            ]
        )

    def _levels(self) -> list[str]:
        found = []
        for value in powers(*self.y) if self.is_log else steps(*self.y):
            y = self.up(value)
            found.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            found.append(f'<text class="end soft" x="{LEFT - 8}" y="{y + 4:.1f}">{self.y_format.format(value)}</text>')
        return found

    def _rows(self, rows: Sequence[str]) -> list[str]:
        return [
            f'<text class="end soft" x="{LEFT - 8}" y="{self.up(place + 0.5) + 4:.1f}">{escape(name)}</text>'
            for place, name in enumerate(reversed(rows))
        ]

    def _times(self) -> list[str]:
        y = self.height - BOTTOM + 16
        found = [
            f'<text class="middle soft" x="{self.across(value):.1f}" y="{y}">{value:g}</text>'
            for value in steps(*self.x)
        ]
        found.append(f'<text class="end soft" x="{WIDTH - RIGHT}" y="{y + 14}">{escape(self.x_label)}</text>')
        return found

    def _places(self, points: Iterable[Point]) -> str:
        return " ".join(f"{self.across(x):.1f},{self.up(y):.1f}" for x, y in points)


def steps(low: float, high: float) -> list[float]:
    """Round numbers from low to high, a handful."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if raw <= factor * power * (1 + 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def powers(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if value <= factor * power * (1 + 1e-9))
