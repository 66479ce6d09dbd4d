"""The journal: every fact and the decisions it led to, as JSON lines, enough to replay the day.

    {"t": 12.5, "fact": {"kind": "StepFeatures", "new_tokens": 64, ...}, "decisions": [{"kind": "Grant", ...}]}

One `append` is one write of one whole line, so a killed process loses nothing it appended. A line counts once its
newline is written: what a power cut or a full disk left after the last newline is torn, told to the reader, and cut
off by the next writer. A broken line anywhere else means the file was damaged, and that is JournalCorrupt, with the
line's number.

Size is bounded: a file that would pass `file_bytes_max` becomes `NAME.000001.jsonl`, and only the newest
`files_max` of those are kept. One process writes a journal at a time; a lock says so.
"""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rose.errors import ConfigError, JournalCorrupt, Unavailable
from rose.observe.records import UnknownRecord, Vocabulary, core_vocabulary

FILE_BYTES_MAX = 64 << 20  # a file that an editor still opens
LINE_BYTES_MAX = FILE_BYTES_MAX  # a longer line was not written by a journal
FILES_MAX = 16  # with the size above, a journal never takes more than about 1 GiB

Decide = Callable[[Any, float], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: at `t_s` this happened, and this was decided."""

    path: Path
    line: int
    t_s: float
    fact: Any
    decisions: tuple[Any, ...]


@dataclass(slots=True)
class Notes:
    """What a reader has to say beside the entries."""

    entries: int = 0
    files: int = 0
    torn_bytes: int = 0  # after the last newline of the newest file
    is_whole: bool = True  # False if the oldest files were already dropped


@dataclass(frozen=True, slots=True)
class Difference:
    """The first entry at which another decision was taken than the recorded one."""

    entry: Entry
    decided: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    notes: Notes
    difference: Difference | None = None


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    t: float
    fact: dict[str, Any]
    decisions: list[dict[str, Any]]


_LINE = msgspec.json.Decoder(_Line)


class Journal:
    """The writer. Not thread-safe: one loop owns it. Use as a context manager, or `close` it."""

    def __init__(
        self,
        path: str | Path,
        vocabulary: Vocabulary | None = None,
        *,
        file_bytes_max: int = FILE_BYTES_MAX,
        files_max: int = FILES_MAX,
    ) -> None:
        assert file_bytes_max > 0 and files_max > 0
        self.path = Path(path)
        self._vocabulary = vocabulary or core_vocabulary()
        self._file_bytes_max, self._files_max = file_bytes_max, files_max
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_locked(self.path)
        self._bytes = os.fstat(self._file).st_size

    def append(self, now_s: float, fact: Any, decisions: Sequence[Any] = ()) -> None:
        """Write one line. Raises Unavailable if the disk does not take it; the journal is then as before."""
        self.append_line(line_of(self._vocabulary, now_s, fact, decisions))

    def append_line(self, line: bytes) -> None:
        """The same for a line that another process has made by `line_of`."""
        try:
            if self._bytes and self._bytes + len(line) > self._file_bytes_max:
                self._rotate()
            written = os.write(self._file, line)
        except OSError as error:
            raise self._refused(error.strerror) from error
        if written < len(line):
            os.ftruncate(self._file, self._bytes)
            raise self._refused("the disk is full")
        self._bytes += written

    def close(self) -> None:
        """Everything to the disk, and the lock given back. A second call does nothing."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rotate(self) -> None:
        rotated = _rotated(self.path)
        number = _number_of(rotated[-1]) + 1 if rotated else 1
        self.path.rename(self.path.with_name(f"{self.path.stem}.{number:06d}{self.path.suffix}"))
        self.close()
        self._file, self._bytes = _open_locked(self.path), 0
        for old in _rotated(self.path)[: -self._files_max]:
            old.unlink()

    def _refused(self, reason: str | None) -> Unavailable:
        return Unavailable(f"journal {self.path} cannot be written: {reason}", hint="make room on its disk")


def read(path: str | Path, vocabulary: Vocabulary | None = None, notes: Notes | None = None) -> Iterator[Entry]:
    """Every entry, oldest first, rotated files included. `notes` is filled as reading goes on."""
    path, vocabulary, notes = Path(path), vocabulary or core_vocabulary(), notes or Notes()
    rotated = _rotated(path)
    notes.is_whole = not rotated or _number_of(rotated[0]) == 1
    files = [*rotated, path] if path.exists() else rotated
    if not files:
        raise ConfigError(f"there is no journal {path}", hint="check the path; runs keep theirs in the run folder")
    for file in files:
        notes.files += 1
        yield from _read_file(file, vocabulary, notes, may_be_torn=file == files[-1])


def replay(path: str | Path, decide: Decide, vocabulary: Vocabulary | None = None) -> Replay:
    """Feed the recorded facts, in order, to `decide(fact, now_s)`; stops at the first decision that differs."""
    notes, vocabulary = Notes(), vocabulary or core_vocabulary()
    for entry in read(path, vocabulary, notes):
        decided = tuple(decide(entry.fact, entry.t_s))
        # As text: what was recorded has been through it, and NaN is not equal to itself.
        if line_of(vocabulary, 0.0, entry.fact, decided) != line_of(vocabulary, 0.0, entry.fact, entry.decisions):
            return Replay(notes, Difference(entry, decided))
    return Replay(notes)


def line_of(vocabulary: Vocabulary, now_s: float, fact: Any, decisions: Sequence[Any]) -> bytes:
    """One line of a journal."""
    made = [vocabulary.to_tree(decision) for decision in decisions]
    tree = {"t": now_s, "fact": vocabulary.to_tree(fact), "decisions": made}
    return msgspec.json.encode(tree) + b"\n"


def _read_file(file: Path, vocabulary: Vocabulary, notes: Notes, may_be_torn: bool) -> Iterator[Entry]:
    try:
        stream = file.open("rb")
    except OSError as error:
        raise ConfigError(f"journal {file} cannot be read: {error.strerror}") from error
    with stream:
        for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX + 1), b""), start=1):
            if len(line) > LINE_BYTES_MAX:
                raise _corrupt(file, number, f"it has more than {LINE_BYTES_MAX} bytes")
            if not line.endswith(b"\n") and may_be_torn:
                notes.torn_bytes = len(line)
                return
            yield _entry_of(file, number, line, vocabulary)
            notes.entries += 1


def _entry_of(file: Path, number: int, line: bytes, vocabulary: Vocabulary) -> Entry:
    try:
        found = _LINE.decode(line)
        decisions = tuple(vocabulary.from_tree(decision) for decision in found.decisions)
        return Entry(file, number, found.t, vocabulary.from_tree(found.fact), decisions)
    except (msgspec.MsgspecError, UnknownRecord, UnicodeError, RecursionError) as error:
        raise _corrupt(file, number, str(error)) from error


def _corrupt(file: Path, number: int, why: str) -> JournalCorrupt:
    return JournalCorrupt(
        f"line {number} of journal {file} cannot be read: {why}",
        hint="if another version of ROSE wrote it, read it with that one; else the file is damaged from here on",
    )


def _open_locked(path: Path) -> int:
    """For appending, with what is torn cut off. The lock goes when the file is closed or its process dies."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise Unavailable(f"journal {path} is being written by another process", hint="give each its own") from error
    os.ftruncate(file, end_of_last_line(file))
    return file


def end_of_last_line(file: int, block_bytes: int = 1 << 16) -> int:
    """The offset behind the last newline: everything after it is torn."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - block_bytes)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _rotated(path: Path) -> list[Path]:
    digits = "[0-9]" * 6
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}.{digits}{glob.escape(path.suffix)}"))


def _number_of(rotated: Path) -> int:
    return int(rotated.stem.rsplit(".", 1)[-1])
