"""What the ledger holds of turns that are under way: a log, so that a few tokens of many turns are one small write.

Turns that run grow all at once and a little at a time. As rows of its own each growth would cost a page of the file,
so everything that is noted between two commits goes into one row here, and a turn gets a row of its own when it has
ended. Read in order, the rows tell of each turn how it began and what came since; one that begins again begins anew.

A row is needed until all turns it speaks of have ended. That takes seconds, so the oldest rows can go soon. A turn that
runs for longer is noted again, whole, so that it holds up nothing; so is one that an earlier life began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from rose.coserve.messages import LENGTH_BYTES, FrameReader
from rose.engines.base import Sampling
from rose.rollout.ledger_file import LedgerFile

if TYPE_CHECKING:
    from rose.rollout.trajectories import KeptTurn

ROWS_KEPT = 256  # some seconds of a busy gateway

ADD_ROW = "INSERT INTO log VALUES (?, ?)"
DROP_ROWS = "DELETE FROM log WHERE id < ?"
ROWS = "SELECT entries FROM log ORDER BY id"

TurnId = tuple[int, int]  # number of the session, ordinal


class Began(msgspec.Struct, array_like=True, tag="b"):
    """A turn was taken. Its prompt is what its parent does not hold; `asked` are sampling, tenant and priority."""

    turn: TurnId
    digest: str
    parent: int | None
    prompt: bytes
    asked: tuple[Sampling, str, int]
    messages: bytes | None


class Came(msgspec.Struct, array_like=True, tag="c"):
    """Tokens of a turn from `start` on, drawn under one version of the weights."""

    turn: TurnId
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    workers: tuple[str, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Began | Came] = msgspec.msgpack.Decoder(Began | Came)


class TurnLog:
    """One per life; its rows are numbered from `first_row`, after those of all earlier ones.

    A life that begins runs again what was under way, all before its first commit.
    """

    def __init__(self, file: LedgerFile, first_row: int) -> None:
        self._file, self._first_row = file, first_row
        self._row = first_row - 1
        self._entries = bytearray()  # of the row that is noted and not written yet
        self._noted_at = -1  # commits before it
        self._under_way: dict[KeptTurn, tuple[int, Began]] = {}  # with the row where each begins, lowest first

    def is_under_way(self, turn: KeptTurn) -> bool:
        return turn in self._under_way

    def began(self, turn: KeptTurn, began: Began) -> None:
        """With what it had produced before, if an earlier life began it."""
        self._append(began)
        self._under_way[turn] = (self._row, began)
        produced = turn.produced
        for span in produced.spans:
            part = slice(span.start, span.end)
            workers = tuple(produced.workers) if span.start == 0 else ()
            self._append(
                Came(
                    began.turn,
                    span.start,
                    tuple(produced.token_ids[part]),
                    tuple(produced.logprobs[part]),
                    span.version,
                    tuple(produced.top_logprobs[part]),
                    workers,
                )
            )

    def came(self, came: Came) -> None:
        self._append(came)

    def ended(self, turn: KeptTurn) -> Began:
        """How it had begun."""
        return self._under_way.pop(turn)[1]

    def forget(self, turns: Iterable[KeptTurn]) -> None:
        """Those that have not ended never will."""
        for turn in turns:
            self._under_way.pop(turn, None)

    def _append(self, entry: Began | Came) -> None:
        if self._noted_at != self._file.commits:
            self._begin_row()
        data = _encoder.encode(entry)
        self._entries += len(data).to_bytes(LENGTH_BYTES, "little")
        self._entries += data

    def _begin_row(self) -> None:
        self._row, self._entries, self._noted_at = self._row + 1, bytearray(), self._file.commits
        self._file.note(ADD_ROW, self._row, self._entries)
        if self._row == self._first_row:  # whatever of an earlier life goes on is noted here again
            self._file.note(DROP_ROWS, self._first_row)
        elif self._row % ROWS_KEPT == 0:
            self._tidy(self._row - ROWS_KEPT)

    def _tidy(self, oldest: int) -> None:
        """Rows before that one go."""
        late = [turn for turn, (row, _) in self._under_way.items() if row < oldest]
        for turn in late:
            _, began = self._under_way.pop(turn)
            self.began(turn, began)
        self._file.note(DROP_ROWS, oldest)


def read_log(file: LedgerFile) -> dict[TurnId, tuple[Began, list[Came]]]:
    """Of all turns that it speaks of, also those that have ended."""
    found: dict[TurnId, tuple[Began, list[Came]]] = {}
    for entry in _entries(file):
        if isinstance(entry, Began):
            found[entry.turn] = (entry, [])
        elif entry.turn in found:  # else it ended, and the row that tells of its beginning has gone
            came = found[entry.turn][1]
            if entry.start == (came[-1].start + len(came[-1].token_ids) if came else 0):
                came.append(entry)  # else it was part of the whole when that was noted again
    return found


def _entries(file: LedgerFile) -> Iterator[Began | Came]:
    row: tuple[Any, ...]
    for row in file.rows(ROWS):
        for entry in FrameReader().push(row[0]):
            yield _decoder.decode(entry)
