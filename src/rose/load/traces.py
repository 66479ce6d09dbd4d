"""A trace: when requests arrive, how long they and their answers are, and how it is read and fitted to a server.

A file is our CSV, Azure's CSV or Mooncake's JSON lines, plain or gzip, told apart by what is in it. Columns may come in
any order and beside others; an error names the file and the line.

    arrival_s,prompt_tokens,output_tokens          ours: seconds from the start
    TIMESTAMP,ContextTokens,GeneratedTokens        Azure: a date and time; the earliest is second 0
    {"timestamp": 0, "input_length": 6758, ...}    Mooncake: milliseconds from the start; hash_ids are not used

Every change returns a new trace and leaves a sentence in `notes`, so that a report can say what was really sent. The
order of `fitted` matters: lengths are scaled by the whole trace, so that two windows of one trace are scaled alike;
then it is cut in the trace's own time; then time is compressed; then requests are counted.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from rose.bounds import Finite, Integer
from rose.errors import ConfigError
from rose.load.statistics import mean, percentile

GZIP_MAGIC = b"\x1f\x8b"
TOKENS_MAX = 100_000_000  # above any context; more is a broken row
PROMPT_SHARE = 0.25  # of the context, for the P99 prompt: a long prompt, its answer and a few others fit together

OURS = ("arrival_s", "prompt_tokens", "output_tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FORMATS_HINT = f"a trace has the columns {','.join(OURS)}, or those of Azure ({','.join(AZURE)}), or is Mooncake's JSON"

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Lengths = Literal["shrink", "fit", "keep"]
Row = tuple[float, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival, in seconds from the start of the run; lengths are at least one token.

    Lengths are scaled by `prompt_p99_tokens`: the P99 of the whole source, of which these may be a few rows.
    """

    name: str
    arrival_s: Floats
    prompt_tokens: Integers
    output_tokens: Integers
    prompt_p99_tokens: float
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.arrival_s) == len(self.prompt_tokens) == len(self.output_tokens)
        assert np.all(np.diff(self.arrival_s) >= 0), "arrivals are in order"

    def __len__(self) -> int:
        return len(self.arrival_s)

    def facts(self) -> dict[str, Any]:
        """Return what a report shows of the trace."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return {
            "name": self.name,
            "requests": len(self),
            "span_s": round(span_s, 3),
            "requests_per_s": round((len(self) - 1) / span_s, 4) if span_s else None,
            "prompt_tokens": _lengths_summary(self.prompt_tokens),
            "output_tokens": _lengths_summary(self.output_tokens),
            "notes": list(self.notes),
        }


def made_trace(
    name: str,
    arrival_s: Floats,
    prompt_tokens: Integers,
    output_tokens: Integers,
    prompt_p99_tokens: float | None = None,
) -> Trace:
    """Return a trace from raw columns: sorted by arrival, every length at least one token, and not empty."""
    if not len(arrival_s):
        raise ConfigError(f"{name} has no requests", hint="give a trace with at least one row")
    order = np.argsort(arrival_s, kind="stable")
    prompts, outputs = (np.maximum(1, column[order]) for column in (prompt_tokens, output_tokens))
    return Trace(name, arrival_s[order], prompts, outputs, prompt_p99_tokens or percentile(prompts, 99))


def fitted(
    trace: Trace,
    context_tokens: int,
    *,
    lengths: Lengths = "shrink",
    start_s: float = 0.0,
    duration_s: float | None = None,
    rate_scale: float = 1.0,
    requests: int | None = None,
) -> Trace:
    """Return what will be sent: `duration_s` counts in the time of the run, `start_s` in the time of the trace."""
    if lengths != "keep":
        trace = with_lengths_scaled(trace, context_tokens, may_grow=lengths == "fit")
    trace = capped(trace, context_tokens)
    _check_scale(rate_scale)
    end_s = None if duration_s is None else start_s + duration_s * rate_scale
    trace = with_rate_scaled(windowed(trace, start_s, end_s), rate_scale)
    return trace if requests is None else limited(trace, requests)


def with_lengths_scaled(trace: Trace, context_tokens: int, *, may_grow: bool = True) -> Trace:
    """Scale prompts and outputs by the one factor that makes the P99 prompt a quarter of the context."""
    factor = PROMPT_SHARE * context_tokens / trace.prompt_p99_tokens
    if factor >= 1 and not may_grow:
        return trace
    return _changed(
        trace,
        f"lengths x {factor:.4g}: the P99 prompt is a quarter of the context of {context_tokens}",
        prompt_tokens=np.maximum(1, np.floor(trace.prompt_tokens * factor + 0.5)).astype(np.int64),
        output_tokens=np.maximum(1, np.floor(trace.output_tokens * factor + 0.5)).astype(np.int64),
        prompt_p99_tokens=trace.prompt_p99_tokens * factor,
    )


def capped(trace: Trace, context_tokens: int) -> Trace:
    """Cut requests to the context. A prompt leaves room for one token; the output takes what is left."""
    if context_tokens < 2:
        raise ConfigError(f"a context of {context_tokens} holds no request", hint="give --context at least 2")
    prompts = np.minimum(trace.prompt_tokens, context_tokens - 1)
    outputs = np.minimum(trace.output_tokens, context_tokens - prompts)
    cut = int(np.sum((prompts < trace.prompt_tokens) | (outputs < trace.output_tokens)))
    if not cut:
        return trace
    note = f"{cut} of {len(trace)} requests cut to the context of {context_tokens}"
    return _changed(trace, note, prompt_tokens=prompts, output_tokens=outputs)


def windowed(trace: Trace, start_s: float = 0.0, end_s: float | None = None) -> Trace:
    """Return the requests of [start_s, end_s), counted from start_s."""
    kept = (trace.arrival_s >= start_s) & (trace.arrival_s < (np.inf if end_s is None else end_s))
    shown = f"from {start_s:g} s to {'the end' if end_s is None else f'{end_s:g} s'}"
    if not kept.any():
        hint = f"its requests arrive from {trace.arrival_s[0]:g} s to {trace.arrival_s[-1]:g} s"
        raise ConfigError(f"{trace.name} has no requests {shown}", hint=hint)
    if start_s == 0 and kept.all():
        return trace
    inside = _picked(trace, kept)
    return _changed(inside, f"window {shown}", arrival_s=inside.arrival_s - start_s)


def with_rate_scaled(trace: Trace, factor: float) -> Trace:
    """Return the same requests in compressed time: `factor` times as many per second."""
    _check_scale(factor)
    if factor == 1:
        return trace
    return _changed(trace, f"rate x {factor:g}", arrival_s=trace.arrival_s / factor)


def limited(trace: Trace, requests: int) -> Trace:
    """Return the first so many requests."""
    if requests < 1:
        raise ConfigError(f"{requests} requests are none", hint="give --requests at least 1")
    if requests >= len(trace):
        return trace
    return _changed(_picked(trace, slice(requests)), f"the first {requests} requests of {len(trace)}")


def _check_scale(factor: float) -> None:
    if not (np.isfinite(factor) and factor > 0):
        raise ConfigError(f"a rate cannot be scaled by {factor:g}", hint="give --rate-scale a number above 0")


def _picked(trace: Trace, which: Any) -> Trace:
    columns = ("arrival_s", "prompt_tokens", "output_tokens")
    return replace(trace, **{column: getattr(trace, column)[which] for column in columns})


def _changed(trace: Trace, note: str, **columns: Any) -> Trace:
    return replace(trace, notes=(*trace.notes, note), **columns)


def _lengths_summary(tokens: Integers) -> dict[str, float]:
    tails = {f"p{percent}": int(percentile(tokens, percent)) for percent in (50, 99)}
    return {"mean": round(mean(tokens), 1), **tails, "max": int(tokens.max())}


class _BadRow(ValueError):
    """An error in one row; the reader adds the line number."""


class _MooncakeRow(msgspec.Struct):
    timestamp: Finite
    input_length: Integer
    output_length: Integer


def read_trace(path: Path) -> Trace:
    """Return the trace in a file. Raises ConfigError that names the line and the error."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        with (gzip.open if is_gzip else open)(path, "rt", encoding="utf-8-sig", newline="") as text:
            rows = list(_rows(path, text))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror or error}", hint="check the path") from error
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"trace {path} is cut off or not gzip", hint="copy it again") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not text", hint=FORMATS_HINT) from error
    arrivals, prompts, outputs = (np.array([row[i] for row in rows]) for i in range(3))
    arrivals = arrivals.astype(np.float64) - arrivals.min(initial=0.0)
    trace = made_trace(path.name, arrivals, prompts.astype(np.int64), outputs.astype(np.int64))
    return replace(trace, notes=tuple(_mended(arrivals, prompts, outputs)))


def _mended(arrivals: Floats, prompts: Integers, outputs: Integers) -> Iterator[str]:
    """Yield what was not as it should be, and was mended."""
    if (late := int((np.diff(arrivals) < 0).sum())) > 0:
        yield f"the rows were not in order of arrival ({late:,} places): they were sorted"
    if (empty := int(((prompts < 1) | (outputs < 1)).sum())) > 0:
        yield f"{empty:,} of {len(prompts):,} requests have a prompt or an answer of 0 tokens: counted as 1"


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
    """Return the places of the three columns, and the function that reads an arrival."""
    lowered = [name.lower() for name in names]
    for columns, arrival in ((OURS, _arrival), (AZURE, _SecondsSince())):
        if all(column.lower() in lowered for column in columns):
            return [lowered.index(column.lower()) for column in columns], arrival
    _refuse(path, number, f"`{','.join(names)[:80]}` is not the header of a trace")


class _SecondsSince:
    """Reader of dates: returns seconds since the first date that it reads."""

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
