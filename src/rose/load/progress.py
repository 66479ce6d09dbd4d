"""The line that shows a run as it goes: time, sent, under way, done, attainment and the tail so far.

It is fed each request once, when it ends, so that drawing it costs the run nothing that could be measured.
"""

from __future__ import annotations

import sys
from typing import TextIO

import numpy as np

from rose.load.driver import OpenLoop
from rose.load.records import Outcome, Record
from rose.load.report import Budget, judged, seen, tail_percent
from rose.load.statistics import mean, percentile
from rose.load.table import duration, ms, percent

EVERY_S = 1.0
EVERY_S_WRITTEN = 30.0  # into a file or a pipe, where lines stay


class Progress:
    """Give it every request that ends, and `show` it now and then."""

    def __init__(self, budget: Budget, stream: TextIO = sys.stderr) -> None:
        self.done = 0
        self._budget = budget
        self._stream = stream
        self._rows: list[tuple[float, float, float]] = []
        self._width = 0

    @property
    def every_s(self) -> float:
        return EVERY_S if self._stream.isatty() else EVERY_S_WRITTEN

    def add(self, record: Record) -> None:
        self.done += record.outcome is Outcome.DONE
        self._rows.append(judged(record, self._budget))

    def line(self, loop: OpenLoop) -> str:
        ttft_s, tpot_s, attained = (seen(column) for column in np.array(self._rows).reshape(-1, 3).T)
        tail = tail_percent(attained.size)
        parts = [
            duration(loop.now_s()),
            f"{len(loop.records):,} of {len(loop.trace):,} sent",
            f"{loop.running:,} running",
            f"{self.done:,} done",
        ]
        if attained.size:
            parts.append(f"{percent(mean(attained))} attained")
        for name, values_s in (("TTFT", ttft_s), ("TPOT", tpot_s)):
            if values_s.size:
                parts.append(f"{name} P{tail} {ms(percentile(values_s, tail) * 1000)} ms")
        return "  ".join(parts)

    def show(self, loop: OpenLoop) -> None:
        line = self.line(loop)
        if self._stream.isatty():
            print("\r" + line.ljust(self._width), end="", file=self._stream, flush=True)
            self._width = len(line)
        else:
            print(line, file=self._stream, flush=True)

    def clear(self) -> None:
        """Before something else is written to the terminal."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._stream, flush=True)
            self._width = 0
