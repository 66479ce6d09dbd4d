"""The ledger's log of turns under way: a few tokens of many turns are one small write.

Running turns grow all at once and a little at a time. As rows of their own each growth would cost a page of the file,
so everything noted between two commits goes into one row of the log, and a turn gets its own row when it has ended.
Read in order, the log holds for each turn how it began and what came since; a turn that begins again replaces itself.

A row of the log is needed until all its turns have rows of their own. A turn that takes longer than `ROWS_KEPT` rows
gets one early, with what it has by then, so the log stays short; a growing turn is written again when it falls behind
again. Each commit does a bounded part of this work. Rows are bounded too: SQLite has a largest blob, and a row that
could never be written would stop the gateway for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from rose.api.frames import LENGTH_BYTES, FrameReader
from rose.api.worker_messages import Alternatives, PromptLogprobs
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
from rose.engines.base import Sampling
from rose.gateway.ledger_file import ROW_BYTES_MAX, LedgerFile

if TYPE_CHECKING:
    from rose.gateway.sessions import KeptTurn

ROWS_KEPT = 256  # some seconds of a busy gateway
ROWS_DROPPED = 32  # at least, at once
ROW_BYTES = 4 << 20  # a row is closed when it has this much
MOVED_BYTES = 256 << 10  # about what one commit moves out of the log: a millisecond of writing
TOKEN_BYTES = 16  # about, of one token with its log-probability


TurnId = tuple[Serial, Count]  # number of the session, ordinal
Prompt = Annotated[bytes, Meta(max_length=4 * TOKENS_MAX)]
Messages = Annotated[bytes, Meta(max_length=ROW_BYTES_MAX)]


class TurnBegan(msgspec.Struct, array_like=True, tag="b"):
    """The beginning of a turn: the prompt that its parent does not hold, and sampling, tenant and priority."""

    turn: TurnId
    digest: Name
    parent: Count | None
    prompt: Prompt
    asked: tuple[Sampling, Label, Priority]
    messages: Messages | None


class TokensLogged(msgspec.Struct, array_like=True, tag="c"):
    """Tokens of a turn from `start` on, sampled under one version of the weights."""

    turn: TurnId
    start: Count
    token_ids: TokenIds
    logprobs: LogProbabilities
    version: VersionName
    top_logprobs: Annotated[tuple[Alternatives, ...], Meta(max_length=TOKENS_MAX)]
    workers: Annotated[tuple[Name, ...], Meta(max_length=ITEMS_MAX)]
    prompt_logprobs: PromptLogprobs = ()


class TurnDropped(msgspec.Struct, array_like=True, tag="d"):
    """The end of a turn that was refused or given up before it had a token; it counts as never begun."""

    turn: TurnId


Entry = TurnBegan | TokensLogged | TurnDropped

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


@dataclass(slots=True)
class UnderWay:
    """The oldest row of the log that has entries of the turn, and how many tokens its own row has; -1 without one."""

    row: int
    began: TurnBegan
    saved: int = -1


class TurnLog:
    """The log of one incarnation. Its rows are numbered from `first_row`, after those of all earlier ones.

    `save` writes a turn that is under way into its own row.
    """

    def __init__(self, file: LedgerFile, first_row: int, save: Callable[[KeptTurn, TurnBegan, None], None]) -> None:
        self._file, self._save = file, save
        self._row = first_row - 1
        self._dropped = 0  # rows before this one are gone
        self._entries = bytearray()  # of the row that is noted and not written yet
        self._noted_at = -1  # commits before it
        self._under_way: dict[KeptTurn, UnderWay] = {}  # lowest row first

    def is_under_way(self, turn: KeptTurn) -> bool:
        return turn in self._under_way

    def begin(self, turn: KeptTurn, began: TurnBegan) -> None:
        self.append(began)
        self._under_way[turn] = UnderWay(self._row, began)

    def adopt(self, turn: KeptTurn, under_way: UnderWay) -> None:
        """Add a turn that an earlier incarnation began, or that has its own row already; lowest row first."""
        self._under_way[turn] = under_way

    def resume(self, turn: KeptTurn, began: TurnBegan) -> None:
        """Add a turn that has its own row and runs again."""
        self._under_way[turn] = UnderWay(self._row, began, len(turn.produced))

    def end(self, turn: KeptTurn) -> TurnBegan:
        """Remove a turn that gets its own row. Return how it began."""
        return self._under_way.pop(turn).began

    def drop(self, turn: KeptTurn) -> bool:
        """Remove a turn without tokens. Return whether it has its own row."""
        under_way = self._under_way.pop(turn)
        self.append(TurnDropped(under_way.began.turn))
        return under_way.saved >= 0

    def forget(self, turns: Iterable[KeptTurn]) -> None:
        """Remove turns whose trajectory is over; those that have not ended never will."""
        for turn in turns:
            self._under_way.pop(turn, None)

    def append(self, entry: Entry) -> None:
        """Add an entry to the row of the next commit."""
        data = _encoder.encode(entry)
        size, is_new_commit = len(data), self._noted_at != self._file.commits
        if is_new_commit or len(self._entries) + size > ROW_BYTES:
            self._begin_row(is_new_commit)
        self._entries += size.to_bytes(LENGTH_BYTES, "little")
        self._entries += data

    def _begin_row(self, is_new_commit: bool) -> None:
        self._row, self._entries, self._noted_at = self._row + 1, bytearray(), self._file.commits
        self._file.note("INSERT INTO log VALUES (?, ?)", self._row, self._entries)
        if is_new_commit:
            self._move_out()

    def _move_out(self) -> None:
        """Give turns that fell behind their own rows, as many as one commit should; then drop older rows."""
        left = MOVED_BYTES
        while left > 0 and self._under_way:
            turn, under_way = next(iter(self._under_way.items()))
            if under_way.row >= self._row - ROWS_KEPT:
                break
            if under_way.saved != len(turn.produced):
                self._save(turn, under_way.began, None)
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
            self._file.note("DELETE FROM log WHERE id < ?", needed)


def read_log(file: LedgerFile) -> dict[TurnId, tuple[UnderWay | None, list[TokensLogged]]]:
    """Return how each turn of the log began and its tokens, also of turns that have ended.

    A turn without a beginning has its own row, and these are tokens that may be missing there.
    """
    turns: dict[TurnId, tuple[UnderWay | None, list[TokensLogged]]] = {}
    for row, entries in file.fetch("SELECT id, entries FROM log ORDER BY id"):
        for frame in FrameReader().push(entries):
            match entry := _decoder.decode(frame):
                case TurnBegan():
                    turns[entry.turn] = (UnderWay(row, entry), [])
                case TokensLogged():
                    turns.setdefault(entry.turn, (None, []))[1].append(entry)
                case TurnDropped():
                    turns.pop(entry.turn, None)
    return turns
