"""The ledger: everything that the gateway must not forget, as rows of a file; and `NoLedger`, which keeps nothing.

What was received of a turn is a row before any reader gets it; so are begun and finished trajectories, published
versions and batches that were handed out. After a crash, `crash_recovery` reads the rows, and unfinished turns continue
from what was received of them. docs/gateway.md describes the rows.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rose.api.worker_messages import NewVersion
from rose.bounds import INT64_MAX
from rose.engines.base import Request, TokenEvent
from rose.errors import Unavailable
from rose.gateway.ledger_file import SET_META, LedgerFile, OnDurable, messages_to_json
from rose.gateway.turn_log import TokensLogged, TurnBegan, TurnLog, UnderWay

if TYPE_CHECKING:
    from rose.gateway.sessions import Finish, KeptTurn, Session
    from rose.gateway.trajectory_table import Group


INCARNATION_BITS = 20  # of the numbers that grow over all incarnations; the others count within one
NUMBERS_PER_INCARNATION = 1 << 40


class NoLedger:
    """The interface of a ledger, and an implementation that keeps nothing.

    `on_work` is called when there is something to commit; with True if a reader waits for it. `trouble` is why nothing
    can be kept now. `broken` is an error of this program in writing: only a new incarnation can continue.
    """

    trouble: Unavailable | None = None
    broken: Exception | None = None
    commits = 0

    def __init__(self, incarnation: int | None = None) -> None:
        """Draw the number at random if none is passed: two are then hardly ever equal."""
        self.incarnation = incarnation if incarnation is not None else secrets.randbits(INCARNATION_BITS) + 1
        self.on_work: Callable[[bool], None] = lambda is_urgent: None

    def check(self) -> None:
        """Raise Unavailable while nothing can be made durable."""
        if self.trouble is not None:
            raise self.trouble

    @property
    def first_number(self) -> int:
        return self.incarnation * NUMBERS_PER_INCARNATION + 1

    @property
    def log_bytes(self) -> int:
        """The length of the file's write-ahead log."""
        return 0

    def add_group(self, group: Group) -> None: ...

    def complete_group(self, group: Group, order: int) -> None: ...

    def add_batch(self, number: int, groups: Sequence[Group]) -> None: ...

    def drop_group(self, group: Group) -> None: ...

    def add_session(self, session: Session) -> None: ...

    def finish_session(self, session: Session, finish: Finish, turn_count: int, forks: int) -> None: ...

    def has_ended(self, trajectory_id: str) -> bool:
        """Return whether a trajectory of this id was begun and ended, not too long ago."""
        return False

    def drop_turns(self, session: Session) -> None: ...

    def drop_session(self, session: Session) -> None: ...

    def start_turn(self, turn: KeptTurn, request: Request) -> None: ...

    def stop_turn(self, turn: KeptTurn) -> None: ...

    def add_tokens(self, turn: KeptTurn, event: TokenEvent) -> None: ...

    def cut_turn(self, turn: KeptTurn) -> None: ...

    def set_reply(self, turn: KeptTurn) -> None: ...

    def set_versions(self, versions: Sequence[NewVersion]) -> None: ...

    def set_orders(self, orders: bytes) -> None: ...

    def read_orders(self) -> bytes | None:
        """Return what `set_orders` was last given, also by an earlier incarnation."""
        return None

    def when_durable(self, callback: OnDurable) -> None:
        callback(None)

    def commit(self) -> None: ...

    def checkpoint(self) -> None: ...

    def shorten(self) -> None: ...

    def close(self) -> None: ...


NO_LEDGER = NoLedger(1)


GIVEN_UP = ""  # the `finish` of a turn that does not run and has not ended

ENDED_MAX = 1 << 20  # ids of ended trajectories; 40 bytes each, 42 MB

_encoder = msgspec.msgpack.Encoder()


class Ledger(LedgerFile, NoLedger):
    """One file with the gateway's rows. Raises ConfigError for another model's, another schema's and no ledger."""

    def __init__(self, path: Path | None, model: str, *, connection: sqlite3.Connection | None = None) -> None:
        super().__init__(path, model, connection=connection)
        self._log = TurnLog(self, self.first_number, self._put)
        newest = self.fetch_one("SELECT max(value) FROM meta WHERE name = 'ended'")
        self._ended_count: int = newest[0] if newest is not None and newest[0] is not None else 0
        self._ended_lately: set[int] = set()  # noted, and perhaps not committed

    # Groups and batches

    def add_group(self, group: Group) -> None:
        statement = "INSERT INTO groups VALUES (?, ?, ?, ?, NULL, NULL)"
        self.note(statement, group.number, group.name, group.size, group.task)

    def complete_group(self, group: Group, order: int) -> None:
        self.note("UPDATE groups SET completed = ? WHERE id = ?", order, group.number)

    def add_batch(self, number: int, groups: Sequence[Group]) -> None:
        self.note(SET_META, "batch", number)
        if not groups:
            self.note(SET_META, "empty_batch", number)
        for group in groups:
            self.note("UPDATE groups SET batch = ? WHERE id = ?", number, group.number)

    def drop_group(self, group: Group) -> None:
        self.note("DELETE FROM groups WHERE id = ?", group.number)

    # Trajectories

    def add_session(self, session: Session) -> None:
        group = session.group.number if session.group is not None else None
        row = (session.number, session.trajectory_id, group, session.task, session.seed, session.secret)
        self.note("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, NULL, 0, 0, 0, ?)", *row)

    def finish_session(self, session: Session, finish: Finish, turn_count: int, forks: int) -> None:
        statement = "UPDATE sessions SET finish = ?, turn_count = ?, forks = ? WHERE id = ?"
        self.note(statement, _encoder.encode(finish), turn_count, forks, session.number)
        self._log.forget(session.turns)
        if session.secret is not None:
            ended = _short_id(session.trajectory_id)
            self._ended_lately.add(ended)
            self.note("INSERT OR REPLACE INTO ended VALUES (?, ?)", self._ended_count % ENDED_MAX, ended)
            self._ended_count += 1
            self.note(SET_META, "ended", self._ended_count)

    def has_ended(self, trajectory_id: str) -> bool:
        ended = _short_id(trajectory_id)
        return ended in self._ended_lately or self.fetch_one("SELECT 1 FROM ended WHERE id = ?", ended) is not None

    def drop_turns(self, session: Session) -> None:
        """Keep only the outcome of a trajectory."""
        self.note("UPDATE sessions SET is_gone = 1 WHERE id = ?", session.number)
        self.note("DELETE FROM turns WHERE session = ?", session.number)

    def drop_session(self, session: Session) -> None:
        self.note("DELETE FROM sessions WHERE id = ?", session.number)

    # Turns

    def start_turn(self, turn: KeptTurn, request: Request) -> None:
        """Note that a turn runs from now on. Raises RequestRefused, and then nothing is noted."""
        parent = turn.parent
        known = parent.sequence_tokens if parent is not None else 0
        began = TurnBegan(
            (turn.session_number, turn.ordinal),
            turn.digest,
            parent.ordinal if parent is not None else None,
            array("i", turn.prompt_ids[known:]).tobytes(),
            (request.sampling, request.tenant, request.priority),
            _encode_messages(turn),
        )
        if turn.is_stopped:
            statement = "UPDATE turns SET finish = NULL, asked = ? WHERE session = ? AND ordinal = ?"
            self.note(statement, _encoder.encode(began.asked), *began.turn)
            self._log.resume(turn, began)
        else:
            self._log.begin(turn, began)

    def adopt(self, turn: KeptTurn, under_way: UnderWay) -> None:
        """Continue a turn of an earlier incarnation, which is in the file already."""
        self._log.adopt(turn, under_way)

    def stop_turn(self, turn: KeptTurn) -> None:
        """Note that a turn does not run any more and has not ended."""
        if not self._log.is_under_way(turn):
            return
        if turn.produced:
            self._put(turn, self._log.end(turn), GIVEN_UP)
        elif self._log.drop(turn):
            self.note("DELETE FROM turns WHERE session = ? AND ordinal = ?", turn.session_number, turn.ordinal)

    def add_tokens(self, turn: KeptTurn, event: TokenEvent) -> None:
        """Note the tokens that `event` has added to the turn, or its whole answer if they end it."""
        if event.finish_reason is not None:
            self._put(turn, self._log.end(turn), event.finish_reason)
        elif event.token_ids:
            self._log.append(
                TokensLogged(
                    (turn.session_number, turn.ordinal),
                    len(turn.produced) - len(event.token_ids),
                    event.token_ids,
                    event.logprobs,
                    event.version,
                    event.top_logprobs,
                    event.workers,
                    event.prompt_logprobs,
                )
            )

    def cut_turn(self, turn: KeptTurn) -> None:
        """Note that a turn ends with the tokens that it has now."""
        if self._log.is_under_way(turn):
            self._put(turn, self._log.end(turn), "stop")
        else:
            statement = "UPDATE turns SET finish = 'stop', answer = ? WHERE session = ? AND ordinal = ?"
            self.note(statement, _encoder.encode(turn.produced), turn.session_number, turn.ordinal)

    def set_reply(self, turn: KeptTurn) -> None:
        """Note and commit a reply at once: the client is about to get it, and will quote it in the next turn."""
        statement = "UPDATE turns SET messages = ?, reply = ? WHERE session = ? AND ordinal = ?"
        self.note(statement, _encode_messages(turn), turn.reply_text, turn.session_number, turn.ordinal)
        self.commit()

    def _put(self, turn: KeptTurn, began: TurnBegan, finish: str | None) -> None:
        """Write the turn's own row. `finish` is None for a turn that is under way."""
        self.note(
            "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *began.turn,
            began.digest,
            began.parent,
            began.prompt,
            began.messages,
            turn.reply_text,
            finish,
            turn.produced.cached_tokens,
            _encoder.encode(turn.produced),
            _encoder.encode(began.asked) if finish is None else None,
        )

    def set_versions(self, versions: Sequence[NewVersion]) -> None:
        self.note(SET_META, "versions", _encoder.encode(versions))

    def set_orders(self, orders: bytes) -> None:
        self.note(SET_META, "orders", orders)

    def read_orders(self) -> bytes | None:
        row = self.fetch_one("SELECT value FROM meta WHERE name = 'orders'")
        return row[0] if row is not None else None

    def commit(self) -> None:
        super().commit()
        if self.trouble is None:
            self._ended_lately.clear()


def _encode_messages(turn: KeptTurn) -> bytes | None:
    """Encode how many messages the turn shares with its parent, and the rest."""
    if turn.messages is None:
        return None
    before = (turn.parent.messages if turn.parent is not None else None) or ()
    shared = len(before) if list(turn.messages[: len(before)]) == list(before) else 0
    return messages_to_json((shared, list(turn.messages[shared:])))


def _short_id(trajectory_id: str) -> int:
    """Return a 63-bit hash of the id; a new id collides with one of a million once in ten trillion times."""
    digest = hashlib.blake2b(trajectory_id.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & INT64_MAX
