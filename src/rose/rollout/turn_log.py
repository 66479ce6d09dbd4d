"""What the ledger holds of turns that are under way: a log, so that a few tokens of many turns are one small write.

Turns that run grow all at once and a little at a time. As rows of its own each growth would cost a page of the file, so
everything that is noted between two commits goes into one row of the log, and a turn gets a row of its own when it has
ended. Read in order, the log tells of each turn how it began and what came since; one that begins again begins anew.

A row of the log is needed until all turns it speaks of have a row of their own. A turn that takes longer than
`ROWS_KEPT` rows gets one early, with what it has by then, so the log stays short. A turn that waits costs nothing more
after that; one that grows is written again when it falls behind again. Each commit does a bounded part of this work.

Rows are bounded too: SQLite has a largest blob, and a row that could never be written would stop the gateway for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from rose.bounds import (
    ITEMS_MAX,
    TOKENS_MAX,
    Count,
    Label,
    LogProbabilities,
    Name,
    Priority,
    Serial,
    TokenIds,
    VersionName,
)
from rose.coserve.messages import LENGTH_BYTES, FrameReader
from rose.engines.base import Sampling
from rose.rollout.ledger_file import ROW_BYTES_MAX, LedgerFile
from rose.rollout.messages import Alternatives

if TYPE_CHECKING:
    from rose.rollout.sessions import KeptTurn

ROWS_KEPT = 256  # some seconds of a busy gateway
ROWS_DROPPED = 32  # at least, at once
ROW_BYTES = 4 << 20  # a row is closed when it has this much
MOVED_BYTES = 256 << 10  # about what one commit moves out of the log: a millisecond of writing
TOKEN_BYTES = 16  # about, of one token with its log-probability

ADD_ROW = "INSERT INTO log VALUES (?, ?)"
DROP_ROWS = "DELETE FROM log WHERE id < ?"
ROWS = "SELECT id, entries FROM log ORDER BY id"

TurnId = tuple[Serial, Count]  # number of the session, ordinal
Prompt = Annotated[bytes, Meta(max_length=4 * TOKENS_MAX)]
Messages = Annotated[bytes, Meta(max_length=ROW_BYTES_MAX)]


class Began(msgspec.Struct, array_like=True, tag="b"):
    """A turn was taken. Its prompt is what its parent does not hold; `asked` are sampling, tenant and priority."""

    turn: TurnId
    digest: Name
    parent: Count | None
    prompt: Prompt
    asked: tuple[Sampling, Label, Priority]
    messages: Messages | None


class Came(msgspec.Struct, array_like=True, tag="c"):
    """Tokens of a turn from `start` on, drawn under one version of the weights."""

    turn: TurnId
    start: Count
    token_ids: TokenIds
    logprobs: LogProbabilities
    version: VersionName
    top_logprobs: Annotated[tuple[Alternatives, ...], Meta(max_length=TOKENS_MAX)]
    workers: Annotated[tuple[Name, ...], Meta(max_length=ITEMS_MAX)]


class Dropped(msgspec.Struct, array_like=True, tag="d"):
    """The turn was refused or given up before it had a token: it never was."""

    turn: TurnId


Entry = Began | Came | Dropped

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


@dataclass(slots=True)
class UnderWay:
    """`row` is the oldest of the log that speaks of the turn; `saved` are the tokens in its own row, -1 without one."""

    row: int
    began: Began
    saved: int = -1


class TurnLog:
    """One per life; its rows are numbered from `first_row`, after those of all earlier ones.

    `save` writes a turn into its own row.
    """

    def __init__(self, file: LedgerFile, first_row: int, save: Callable[[KeptTurn, Began], None]) -> None:
        self._file, self._save = file, save
        self._row = first_row - 1
        self._dropped = 0  # rows before this one are gone
        self._entries = bytearray()  # of the row that is noted and not written yet
        self._noted_at = -1  # commits before it
        self._under_way: dict[KeptTurn, UnderWay] = {}  # lowest row first

    def is_under_way(self, turn: KeptTurn) -> bool:
        return turn in self._under_way

    def began(self, turn: KeptTurn, began: Began) -> None:
        self._append(began)
        self._under_way[turn] = UnderWay(self._row, began)

    def adopt(self, turn: KeptTurn, under_way: UnderWay) -> None:
        """A turn that an earlier life began, or that has a row of its own already; lowest row first."""
        self._under_way[turn] = under_way

    def resumed(self, turn: KeptTurn, began: Began) -> None:
        """A turn that has its own row runs again."""
        self._under_way[turn] = UnderWay(self._row, began, len(turn.produced))

    def came(self, came: Came) -> None:
        self._append(came)

    def ended(self, turn: KeptTurn) -> Began:
        """How it had begun."""
        return self._under_way.pop(turn).began

    def dropped(self, turn: KeptTurn) -> bool:
        """Forget a turn without tokens. Returns whether it has a row of its own."""
        under_way = self._under_way.pop(turn)
        self._append(Dropped(under_way.began.turn))
        return under_way.saved >= 0

    def forget(self, turns: Iterable[KeptTurn]) -> None:
        """Those that have not ended never will."""
        for turn in turns:
            self._under_way.pop(turn, None)

    def _append(self, entry: Entry) -> None:
        data = _encoder.encode(entry)
        if self._noted_at != self._file.commits or len(self._entries) + len(data) > ROW_BYTES:
            self._begin_row()
        self._entries += len(data).to_bytes(LENGTH_BYTES, "little")
        self._entries += data

    def _begin_row(self) -> None:
        is_new_commit = self._noted_at != self._file.commits
        self._row, self._entries, self._noted_at = self._row + 1, bytearray(), self._file.commits
        self._file.note(ADD_ROW, self._row, self._entries)
        if is_new_commit:
            self._move_out()

    def _move_out(self) -> None:
        """Give turns that fell behind a row of their own, as many as one commit should; then drop older rows."""
        left = MOVED_BYTES
        while left > 0 and self._under_way:
            turn, under_way = next(iter(self._under_way.items()))
            if under_way.row >= self._row - ROWS_KEPT:
                break
            if under_way.saved != len(turn.produced):
                self._save(turn, under_way.began)
                under_way.saved = len(turn.produced)
                left -= len(under_way.began.prompt) + len(under_way.began.messages or b"")
                left -= TOKEN_BYTES * len(turn.produced)
            left -= TOKEN_BYTES
            del self._under_way[turn]
            under_way.row = self._row
            self._under_way[turn] = under_way
        oldest = next(iter(self._under_way.values())).row if self._under_way else self._row
        needed = min(oldest, self._row - ROWS_KEPT)
        if needed - self._dropped >= ROWS_DROPPED:
            self._dropped = needed
            self._file.note(DROP_ROWS, needed)


def read_log(file: LedgerFile) -> dict[TurnId, tuple[UnderWay | None, list[Came]]]:
    """What the log says of each turn, also of those that have ended.

    Without how it began, it has a row of its own, and these are tokens that may be missing there.
    """
    found: dict[TurnId, tuple[UnderWay | None, list[Came]]] = {}
    for row, entry in _entries(file):
        match entry:
            case Began():
                found[entry.turn] = (UnderWay(row, entry), [])
            case Came():
                found.setdefault(entry.turn, (None, []))[1].append(entry)
            case Dropped():
                found.pop(entry.turn, None)
    return found


def _entries(file: LedgerFile) -> Iterator[tuple[int, Entry]]:
    row: tuple[Any, ...]
    for row in file.rows(ROWS):
        for entry in FrameReader().push(row[1]):
            yield row[0], _decoder.decode(entry)
