"""Files of a run that are appended to for as long as it goes on, and of which only the newest part is kept.

A file that would pass `bytes_max` becomes NAME.1.SUFFIX, in the place of the one before it. So two files hold at least
the newest `bytes_max` bytes, and never more than twice as many.
"""

from __future__ import annotations

import os
from pathlib import Path

from rose.observe.journal import end_of_last_line


def before(path: Path) -> Path:
    """Return where the older part of a file is, if it has grown so large."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


class RotatingFile:
    """A file of lines. A line is written whole, or cut off again and refused. Not thread-safe."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        """Raises OSError."""
        self._path, self._bytes_max = path, bytes_max
        self._file = _opened(path)
        self._bytes = end_of_last_line(self._file)
        os.ftruncate(self._file, self._bytes)  # a power cut leaves half a line

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def write(self, line: bytes) -> None:
        """Append one line with its newline. Raises OSError; the file is then as before."""
        if self._bytes and self._bytes + len(line) > self._bytes_max:
            self._rotate()
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, self._bytes)
            raise OSError(0, "the disk is full")
        self._bytes += written

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _rotate(self) -> None:
        os.replace(self._path, before(self._path))
        self.close()
        self._file, self._bytes = _opened(self._path), 0


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
