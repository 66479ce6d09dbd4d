"""The journal: every fact and the decisions it led to, as JSON lines, enough to decide again.

    {"utc": "2026-11-19T23:31:58.123456Z", "t": 12.5, "fact": {"kind": "StepFeatures", "new_tokens": 64, ...},
     "decisions": [{"kind": "Grant", ...}]}

`t` is the monotonic clock, by which decisions are made; `utc` is when the line was made, for people.

One `append` is one write of one whole line, so a killed process loses nothing it appended. What a power cut or a full
disk left after the last newline is torn: the reader reports it, and the next writer cuts it off. A broken line anywhere
else means that the file was damaged. A file that would pass `file_bytes_max` becomes `NAME.000001.jsonl`, and only the
newest `files_max` of those are kept. One process writes a journal at a time, under a lock.

A record carries the name of its class as `kind`: a renamed class can no longer be read from old journals. Infinities,
which JSON cannot represent, travel as {"$float": "inf"}.
"""

from __future__ import annotations

import fcntl
import glob
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from rose.bounds import INT64_MAX
from rose.core import accountant, facts, groups, memory, shard_balance
from rose.errors import ConfigError, JournalCorrupt, Unavailable
from rose.observe.wall_clock import stamped

KIND = "kind"
_FLOAT = "$float"
UINT64_MAX = 2 * INT64_MAX + 1  # the largest that msgspec encodes again


class UnknownRecord(ValueError):
    """A tree that is no record of the vocabulary: its kind, a field or a type is wrong."""


class RecordTypes:
    """The frozen dataclasses that a journal may hold, by name; fields are checked when records are read back."""

    def __init__(self, types: Iterable[type]) -> None:
        self._types: dict[str, type] = {}
        for record in types:
            assert is_dataclass(record), f"{record} is not a dataclass"
            assert KIND not in record.__dataclass_fields__, f"{record} has a field `{KIND}`, which holds the name"
            assert self._types.setdefault(record.__name__, record) is record, f"two records named {record.__name__}"

    def to_tree(self, record: Any) -> dict[str, Any]:
        """Return a record as plain values that JSON can represent."""
        kind = type(record).__name__
        assert self._types.get(kind) is type(record), f"{kind} is not in this vocabulary"
        return {KIND: kind, **_with_named_floats(msgspec.to_builtins(record))}

    def from_tree(self, tree: Any) -> Any:
        """Return the record in a tree of plain values; raises UnknownRecord."""
        if not isinstance(tree, dict) or not isinstance(tree.get(KIND), str):
            raise UnknownRecord("a record without a kind")
        kind = tree[KIND]
        if kind not in self._types:
            raise UnknownRecord(f"no record is called {kind}")
        values = _with_real_floats({name: value for name, value in tree.items() if name != KIND})
        try:
            record: Any = msgspec.convert(values, self._types[kind])
        except msgspec.ValidationError as error:
            raise UnknownRecord(f"{kind}: {error}") from error
        if unknown := values.keys() - self._types[kind].__dataclass_fields__.keys():  # type: ignore[attr-defined]
            raise UnknownRecord(f"{kind} has no field {min(unknown)}")
        return record


def core_vocabulary() -> RecordTypes:
    """Return the vocabulary of all facts and decisions of the core: the public dataclasses of these modules."""
    return RecordTypes(
        value
        for module in (facts, accountant, groups, memory, shard_balance)
        for value in vars(module).values()
        if is_dataclass(value) and isinstance(value, type)
        and value.__module__ == module.__name__ and not value.__name__.startswith("_")
    )  # fmt: skip


def _with_named_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_named_floats(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_named_floats(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    return value


def _with_real_floats(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and value[_FLOAT] in ("inf", "-inf", "nan"):
            return float(value[_FLOAT])
        return {name: _with_real_floats(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_real_floats(inner) for inner in value]
    if isinstance(value, int) and not -INT64_MAX - 1 <= value <= UINT64_MAX:
        raise UnknownRecord("an integer has more than 64 bits")
    return value


FILE_BYTES_MAX = 64 << 20  # a file that an editor still opens
LINE_BYTES_MAX = FILE_BYTES_MAX  # a longer line was not written by a journal
FILES_MAX = 16  # with the size above, a journal never takes more than about 1 GiB


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One line: a fact at `t_s`, and the decisions it led to."""

    path: Path
    line: int
    t_s: float
    fact: Any
    decisions: tuple[Any, ...]
    utc: str = field(default="", compare=False)  # empty in journals of 0.1


@dataclass(slots=True)
class Notes:
    """Facts about a journal beside its entries."""

    entries: int = 0
    files: int = 0
    torn_bytes: int = 0  # after the last newline of the newest file
    is_whole: bool = True  # False if the oldest files were already dropped


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    t: float
    fact: dict[str, Any]
    decisions: list[dict[str, Any]]
    utc: str = ""


_LINE = msgspec.json.Decoder(_Line)


class Journal:
    """The writer of a journal. Not thread-safe: one loop owns it. Use as a context manager, or `close` it."""

    def __init__(
        self,
        path: str | Path,
        vocabulary: RecordTypes | None = None,
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
        self.append_line(stamped(line_of(self._vocabulary, now_s, fact, decisions)))

    def append_line(self, line: bytes) -> None:
        """Write a line that another process has made by `line_of`."""
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
        """Flush everything to the disk and release the lock. A second call does nothing."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rotate(self) -> None:
        rotated = _rotated_files(self.path)
        number = _number_of(rotated[-1]) + 1 if rotated else 1
        self.path.rename(self.path.with_name(f"{self.path.stem}.{number:06d}{self.path.suffix}"))
        self.close()
        self._file, self._bytes = _open_locked(self.path), 0
        for old in _rotated_files(self.path)[: -self._files_max]:
            old.unlink()

    def _refused(self, reason: str | None) -> Unavailable:
        return Unavailable(f"journal {self.path} cannot be written: {reason}", hint="make room on its disk")


def read(path: str | Path, vocabulary: RecordTypes | None = None, notes: Notes | None = None) -> Iterator[JournalEntry]:
    """Yield every entry, oldest first, rotated files included. `notes` is filled meanwhile."""
    path, vocabulary, notes = Path(path), vocabulary or core_vocabulary(), notes or Notes()
    rotated = _rotated_files(path)
    notes.is_whole = not rotated or _number_of(rotated[0]) == 1
    files = [*rotated, path] if path.exists() else rotated
    if not files:
        raise ConfigError(f"there is no journal {path}", hint="check the path; runs keep theirs in the run folder")
    for file in files:
        notes.files += 1
        yield from _read_file(file, vocabulary, notes, may_be_torn=file == files[-1])


def line_of(vocabulary: RecordTypes, now_s: float, fact: Any, decisions: Sequence[Any]) -> bytes:
    """Return one line of a journal, without the wall-clock time; `stamped` adds that."""
    trees = [vocabulary.to_tree(decision) for decision in decisions]
    return msgspec.json.encode({"t": now_s, "fact": vocabulary.to_tree(fact), "decisions": trees}) + b"\n"


def _read_file(file: Path, vocabulary: RecordTypes, notes: Notes, may_be_torn: bool) -> Iterator[JournalEntry]:
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


def _entry_of(file: Path, number: int, line: bytes, vocabulary: RecordTypes) -> JournalEntry:
    try:
        entry = _LINE.decode(line)
        decisions = tuple(vocabulary.from_tree(decision) for decision in entry.decisions)
        return JournalEntry(file, number, entry.t, vocabulary.from_tree(entry.fact), decisions, entry.utc)
    except (msgspec.MsgspecError, UnknownRecord, UnicodeError, RecursionError) as error:
        raise _corrupt(file, number, str(error)) from error


def _corrupt(file: Path, number: int, why: str) -> JournalCorrupt:
    return JournalCorrupt(
        f"line {number} of journal {file} cannot be read: {why}",
        hint="if another version of ROSE wrote it, read it with that one; else the file is damaged from here on",
    )


def _open_locked(path: Path) -> int:
    """Open a file for appending, and cut off a torn end. Closing the file releases the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise Unavailable(f"journal {path} is being written by another process", hint="give each its own") from error
    os.ftruncate(file, end_of_last_line(file))
    return file


def end_of_last_line(file: int, block_bytes: int = 1 << 16) -> int:
    """Return the offset after the last newline: everything behind it is torn."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - block_bytes)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _rotated_files(path: Path) -> list[Path]:
    digits = "[0-9]" * 6
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}.{digits}{glob.escape(path.suffix)}"))


def _number_of(rotated: Path) -> int:
    return int(rotated.stem.rsplit(".", 1)[-1])
