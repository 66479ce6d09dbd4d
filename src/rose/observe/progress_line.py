"""The line of a terminal that shows work as it goes, and times for people.

A line that is wider than its terminal would leave a row behind with each update. So each part has a rank, and the parts
of the highest ranks are left out until the line fits. A file or a pipe gets whole lines.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a line. Parts of the highest rank are left out first; rank 0 stays."""

    text: str
    rank: int = 0


class ProgressLine:
    """One line of a stream that is written over, between lines that stay."""

    def __init__(self, stream: TextIO, separator: str) -> None:
        self.is_terminal = stream.isatty()
        self._stream, self._separator = stream, separator
        self._width = 0  # of what is shown

    def whole(self, parts: Sequence[Part]) -> str:
        return self._separator.join(part.text for part in parts)

    def fitted(self, parts: Sequence[Part]) -> str:
        """Return the parts as a line that fits the terminal; all of them if the stream is no terminal."""
        if not self.is_terminal:
            return self.whole(parts)
        width = _columns(self._stream) - 1  # some terminals wrap as soon as the last column is written
        kept = list(parts)
        while len(self.whole(kept)) > width and any(part.rank for part in kept):
            last = max(part.rank for part in kept)
            kept = [part for part in kept if part.rank < last]
        return self.whole(kept)[: max(1, width)]

    def show(self, parts: Sequence[Part]) -> None:
        """Write the line over the one before it. For terminals only."""
        line = self.fitted(parts)
        self._write("\r" + line.ljust(min(self._width, _columns(self._stream) - 1)))
        self._width = len(line)

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self.clear()
        self._write(line + "\n")

    def clear(self) -> None:
        """Erase the line, before other text is written to the terminal."""
        if self._width:
            self._write("\r" + " " * min(self._width, _columns(self._stream) - 1) + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the reader has left; the work goes on
            self.is_terminal = False


def duration(seconds: float) -> str:
    """Return a duration for people: 59 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _columns(stream: TextIO) -> int:
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or shutil.get_terminal_size().columns
