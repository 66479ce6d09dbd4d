"""Reads a trace file: our CSV, Azure's CSV or Mooncake's JSON lines, plain or gzip, told apart by what is in it.

    arrival_s,prompt_tokens,output_tokens          ours: seconds from the start
    TIMESTAMP,ContextTokens,GeneratedTokens        Azure: a date and time; the earliest is second 0
    {"timestamp": 0, "input_length": 6758, ...}    Mooncake: milliseconds from the start; hash_ids are not used

Columns may come in any order and beside others. Whatever cannot be read is told with the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from rose.bounds import Finite, Integer
from rose.errors import ConfigError
from rose.load.traces import Trace, made_trace

GZIP_MAGIC = b"\x1f\x8b"
TOKENS_MAX = 100_000_000  # above any context; more is a broken row

OURS = ("arrival_s", "prompt_tokens", "output_tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FORMATS_HINT = f"a trace has the columns {','.join(OURS)}, or those of Azure ({','.join(AZURE)}), or is Mooncake's JSON"

Row = tuple[float, int, int]


class _BadRow(ValueError):
    """What is wrong with one row; its line is added by the reader."""


class _MooncakeRow(msgspec.Struct):
    timestamp: Finite
    input_length: Integer
    output_length: Integer


def read_trace(path: Path) -> Trace:
    """The trace in a file; ConfigError says what is wrong with it and where."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        with (gzip.open if is_gzip else open)(path, "rt", encoding="utf-8-sig", newline="") as text:
            return _columns(path, _rows(path, text))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror or error}", hint="check the path") from error
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"trace {path} is cut off or not gzip", hint="copy it again") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not text", hint=FORMATS_HINT) from error


def _columns(path: Path, rows: Iterable[Row]) -> Trace:
    table = list(rows)
    arrivals, prompts, outputs = (np.array([row[i] for row in table]) for i in range(3))
    arrivals = arrivals.astype(np.float64) - arrivals.min(initial=0.0)
    return made_trace(path.name, arrivals, prompts.astype(np.int64), outputs.astype(np.int64))


def _rows(path: Path, text: Iterable[str]) -> Iterator[Row]:
    lines = enumerate(text, start=1)
    for number, line in lines:
        if not line.strip():
            continue
        if line.lstrip().startswith("{"):
            yield from _mooncake(path, [(number, line)])
            yield from _mooncake(path, lines)
        else:
            yield from _csv(path, number, line, text)


def _mooncake(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
            yield _arrival(row.timestamp / 1000), _tokens(row.input_length), _tokens(row.output_length)
        except (msgspec.MsgspecError, _BadRow) as error:
            _refuse(path, number, str(error))


def _csv(path: Path, first: int, header: str, text: Iterable[str]) -> Iterator[Row]:
    names = [name.strip() for name in next(csv.reader([header]))]
    places, arrival = _layout(path, first, names)
    reader = csv.reader(text)
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            _refuse(path, first + reader.line_num, str(error))
        if cells is None:
            return
        if not any(cells):
            continue
        try:
            if len(cells) != len(names):
                raise _BadRow(f"{len(cells)} columns where the header has {len(names)}")
            yield arrival(cells[places[0]]), _tokens(cells[places[1]]), _tokens(cells[places[2]])
        except _BadRow as error:
            _refuse(path, first + reader.line_num, str(error))


def _layout(path: Path, number: int, names: list[str]) -> tuple[list[int], Callable[[str], float]]:
    """Where the three columns are, and how an arrival is read."""
    lowered = [name.lower() for name in names]
    for columns, arrival in ((OURS, _arrival), (AZURE, _Since())):
        if all(column.lower() in lowered for column in columns):
            return [lowered.index(column.lower()) for column in columns], arrival
    _refuse(path, number, f"`{','.join(names)[:80]}` is not the header of a trace")


class _Since:
    """Seconds since the first date it is given."""

    def __init__(self) -> None:
        self._first: datetime | None = None

    def __call__(self, cell: str) -> float:
        try:
            when = datetime.fromisoformat(cell.strip())
            self._first = self._first or when
            return (when - self._first).total_seconds()
        except (ValueError, TypeError):
            raise _BadRow(f"`{cell}` is not a date and time like the rows before") from None


def _arrival(cell: str | float) -> float:
    try:
        seconds = float(cell)
    except ValueError:
        raise _BadRow(f"arrival `{cell}` is not a number") from None
    if not (math.isfinite(seconds) and seconds >= 0):
        raise _BadRow(f"arrival {cell} is not a time from the start")
    return seconds


def _tokens(cell: str | int) -> int:
    try:
        count = int(cell)
    except ValueError:
        raise _BadRow(f"`{cell}` is not a whole number of tokens") from None
    if not 0 <= count <= TOKENS_MAX:
        raise _BadRow(f"{count} is not a possible number of tokens")
    return count


def _refuse(path: Path, line: int, what: str) -> NoReturn:
    raise ConfigError(f"trace {path}, line {line}: {what}", hint=FORMATS_HINT) from None
