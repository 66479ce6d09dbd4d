"""The ledger: what the gateway must not forget, as rows of a file.

It is the truth of the gateway. What was received of a turn is a row before anybody is told of it; so are begun and
finished trajectories, published versions and batches that were handed out. When the gateway dies, at whatever moment,
the next one reads the rows (`rose.rollout.recalling`) and goes on: turns that were under way are run again from what
was received of them, and whoever did not get an answer asks again and gets the one there is.

A turn has a row when it has ended, with its whole answer; until then it is told of in the log (`rollout.turn_log`),
piece by piece as it comes. One that takes long has a row before it ends (its `finish` is NULL), and so has one that was
given up with some tokens (`finish` is empty): it runs again only when it is asked for again. Log-probabilities come
back to the last bit. Of a prompt only what its predecessor in the trajectory does not hold is kept. The rows of a
trajectory go when the trainer says that it has the batch. The outcome of the last ten thousand is remembered, and the
ids of the last million as numbers of 63 bits: a trajectory that was learnt from is not played again.

`NoLedger` keeps nothing, and everything it is told counts as durable: for gateways that may forget.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from rose.bounds import INT64_MAX, ITEMS_MAX, TOKENS_MAX, LogProbability, Name, TokenId
from rose.engines.base import SPANS_MAX, FinishReason, Request, Span, TokenEvent
from rose.errors import Unavailable
from rose.rollout.ledger_file import SET_META, LedgerFile, Told
from rose.rollout.ledger_migrations import messages_to_json
from rose.rollout.messages import Alternatives, NewVersion
from rose.rollout.turn_log import Began, Came, TurnLog, UnderWay

if TYPE_CHECKING:
    from rose.rollout.sessions import Finish, KeptTurn, Session
    from rose.rollout.trajectories import Group

LIFE_BITS = 20  # of the numbers that grow from life to life; the others count within a life
NUMBERS_PER_LIFE = 1 << 40

ADD_GROUP = "INSERT INTO groups VALUES (?, ?, ?, ?, NULL, NULL)"
COMPLETE_GROUP = "UPDATE groups SET completed = ? WHERE id = ?"
BATCH_GROUP = "UPDATE groups SET batch = ? WHERE id = ?"
DROP_GROUP = "DELETE FROM groups WHERE id = ?"
ADD_SESSION = "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, NULL, 0, 0, 0, ?)"
FINISH_SESSION = "UPDATE sessions SET finish = ?, turn_count = ?, forks = ? WHERE id = ?"
SESSION_GONE = "UPDATE sessions SET is_gone = 1 WHERE id = ?"
DROP_SESSION = "DELETE FROM sessions WHERE id = ?"
DROP_TURNS = "DELETE FROM turns WHERE session = ?"
DROP_TURN = "DELETE FROM turns WHERE session = ? AND ordinal = ?"
PUT_TURN = "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
RUN_TURN = "UPDATE turns SET finish = NULL, asked = ? WHERE session = ? AND ordinal = ?"
CUT_TURN = "UPDATE turns SET finish = 'stop', answer = ? WHERE session = ? AND ordinal = ?"
REPLY_TURN = "UPDATE turns SET messages = ?, reply = ? WHERE session = ? AND ordinal = ?"
PUT_ENDED = "INSERT OR REPLACE INTO ended VALUES (?, ?)"
HAS_ENDED = "SELECT 1 FROM ended WHERE id = ?"
GIVEN_UP = ""  # the `finish` of a turn that does not run and has not ended

ENDED_MAX = 1 << 20  # ids of ended trajectories; 40 bytes each, 42 MB

_encoder = msgspec.msgpack.Encoder()


class Answer(msgspec.Struct, array_like=True):
    """All that a turn came to, as `Produced` has it."""

    token_ids: Annotated[list[TokenId], Meta(max_length=TOKENS_MAX)]
    logprobs: Annotated[list[LogProbability], Meta(max_length=TOKENS_MAX)]
    spans: Annotated[list[Span], Meta(max_length=SPANS_MAX)]
    top_logprobs: Annotated[list[Alternatives], Meta(max_length=TOKENS_MAX)]
    workers: Annotated[list[Name], Meta(max_length=ITEMS_MAX)]


class NoLedger:
    """Keeps nothing. Also what every ledger can be told."""

    def __init__(self, life: int | None = None) -> None:
        """Lives that are not counted are drawn, so that two are hardly ever alike."""
        self.life = life if life is not None else secrets.randbits(LIFE_BITS) + 1

    @property
    def trouble(self) -> Unavailable | None:
        """Why nothing can be kept now."""
        return None

    @property
    def broken(self) -> Exception | None:
        """An error of this program in writing: only another life can go on."""
        return None

    @property
    def commits(self) -> int:
        return 0

    @property
    def log_bytes(self) -> int:
        """Length of the file's write-ahead log."""
        return 0

    @property
    def first_number(self) -> int:
        """Tickets and leases of this life are counted from here; no other life has the same."""
        return self.life * NUMBERS_PER_LIFE + 1

    def group(self, group: Group) -> None: ...

    def completed(self, group: Group, order: int) -> None: ...

    def batched(self, number: int, groups: Iterable[Group]) -> None: ...

    def taken(self, group: Group) -> None: ...

    def began(self, session: Session) -> None: ...

    def finished(self, session: Session, finish: Finish, turn_count: int, forks: int) -> None: ...

    def has_ended(self, trajectory_id: str) -> bool:
        """Whether a trajectory of this id was begun and ended, not too long ago."""
        return False

    def let_go(self, session: Session) -> None: ...

    def forgotten(self, session: Session) -> None: ...

    def turn(self, turn: KeptTurn, request: Request) -> None: ...

    def stopped(self, turn: KeptTurn) -> None: ...

    def produced(self, turn: KeptTurn, event: TokenEvent) -> None: ...

    def cut(self, turn: KeptTurn, tokens: int) -> None: ...

    def replied(self, turn: KeptTurn) -> None: ...

    def published(self, versions: Sequence[NewVersion]) -> None: ...

    def then(self, told: Told) -> None:
        told(None)

    def commit(self) -> None: ...

    def checkpoint(self) -> None: ...

    def shorten(self) -> None: ...

    def listen(self, on_work: Callable[[bool], None]) -> None: ...

    def close(self) -> None: ...


NO_LEDGER = NoLedger(1)


class Ledger(NoLedger):
    """One file. Raises ConfigError if it is another model's, another schema's or no ledger."""

    def __init__(self, path: Path | None, model: str, *, connection: sqlite3.Connection | None = None) -> None:
        self.file = LedgerFile(path, model, connection=connection)
        super().__init__(self.file.life)
        self._note = self.file.note
        self._log = TurnLog(self.file, self.first_number, self._save)
        newest = self.file.one("SELECT max(value) FROM meta WHERE name = 'ended'")
        self._ended_count: int = newest[0] if newest is not None and newest[0] is not None else 0
        self._ended_lately: set[int] = set()  # noted, and perhaps not committed

    @property
    def trouble(self) -> Unavailable | None:
        return self.file.trouble

    @property
    def broken(self) -> Exception | None:
        return self.file.broken

    @property
    def commits(self) -> int:
        return self.file.commits

    @property
    def log_bytes(self) -> int:
        return self.file.log_bytes

    # Groups and batches

    def group(self, group: Group) -> None:
        self._note(ADD_GROUP, group.number, group.name, group.size, group.task)

    def completed(self, group: Group, order: int) -> None:
        self._note(COMPLETE_GROUP, order, group.number)

    def batched(self, number: int, groups: Iterable[Group]) -> None:
        self._note(SET_META, "batch", number)
        for group in groups:
            self._note(BATCH_GROUP, number, group.number)

    def taken(self, group: Group) -> None:
        """The trainer has it."""
        self._note(DROP_GROUP, group.number)

    # Trajectories

    def began(self, session: Session) -> None:
        group = session.group.number if session.group is not None else None
        self._note(
            ADD_SESSION, session.number, session.trajectory_id, group, session.task, session.seed, session.secret
        )

    def finished(self, session: Session, finish: Finish, turn_count: int, forks: int) -> None:
        self._note(FINISH_SESSION, _encoder.encode(finish), turn_count, forks, session.number)
        self._log.forget(session.turns)
        if session.secret is not None:
            ended = _short_id(session.trajectory_id)
            self._ended_lately.add(ended)
            self._note(PUT_ENDED, self._ended_count % ENDED_MAX, ended)
            self._ended_count += 1
            self._note(SET_META, "ended", self._ended_count)

    def has_ended(self, trajectory_id: str) -> bool:
        found = _short_id(trajectory_id)
        return found in self._ended_lately or self.file.one(HAS_ENDED, found) is not None

    def let_go(self, session: Session) -> None:
        """Of what it said nothing is needed any more."""
        self._note(SESSION_GONE, session.number)
        self._note(DROP_TURNS, session.number)

    def forgotten(self, session: Session) -> None:
        self._note(DROP_SESSION, session.number)

    # Turns

    def turn(self, turn: KeptTurn, request: Request) -> None:
        """It runs from now on. Raises RequestRefused, and then nothing is noted."""
        parent = turn.parent
        known = parent.sequence_tokens if parent is not None else 0
        began = Began(
            (turn.session_number, turn.ordinal),
            turn.digest,
            parent.ordinal if parent is not None else None,
            array("i", turn.prompt_ids[known:]).tobytes(),
            (request.sampling, request.tenant, request.priority),
            _messages_of(turn),
        )
        if turn.is_stopped:
            self._note(RUN_TURN, _encoder.encode(began.asked), *began.turn)
            self._log.resumed(turn, began)
        else:
            self._log.began(turn, began)

    def adopt(self, turn: KeptTurn, under_way: UnderWay) -> None:
        """A turn that an earlier life began; it is in the file already."""
        self._log.adopt(turn, under_way)

    def stopped(self, turn: KeptTurn) -> None:
        """It does not run any more, and has not ended."""
        if not self._log.is_under_way(turn):
            return
        if turn.produced:
            self._put(turn, self._log.ended(turn), GIVEN_UP)
        elif self._log.dropped(turn):
            self._note(DROP_TURN, turn.session_number, turn.ordinal)

    def produced(self, turn: KeptTurn, event: TokenEvent) -> None:
        if event.finish_reason is not None:
            self._ended(turn, event.finish_reason)
        elif event.token_ids:
            self._log.came(
                Came(
                    (turn.session_number, turn.ordinal),
                    len(turn.produced) - len(event.token_ids),
                    event.token_ids,
                    event.logprobs,
                    event.version,
                    event.top_logprobs,
                    event.workers,
                )
            )

    def cut(self, turn: KeptTurn, tokens: int) -> None:
        if self._log.is_under_way(turn):
            self._ended(turn, "stop")
        else:
            self._note(CUT_TURN, _answer_of(turn), turn.session_number, turn.ordinal)

    def _ended(self, turn: KeptTurn, finish_reason: FinishReason) -> None:
        self._put(turn, self._log.ended(turn), finish_reason)

    def _save(self, turn: KeptTurn, began: Began) -> None:
        """Give a turn that is under way a row of its own."""
        self._put(turn, began, None)

    def _put(self, turn: KeptTurn, began: Began, finish: str | None) -> None:
        self._note(
            PUT_TURN,
            *began.turn,
            began.digest,
            began.parent,
            began.prompt,
            began.messages,
            turn.reply_text,
            finish,
            turn.produced.cached_tokens,
            _answer_of(turn),
            _encoder.encode(began.asked) if finish is None else None,
        )

    def replied(self, turn: KeptTurn) -> None:
        """At once: the client is about to hear it, and will say that it did."""
        self._note(REPLY_TURN, _messages_of(turn), turn.reply_text, turn.session_number, turn.ordinal)
        self.commit()

    # The rest

    def published(self, versions: Sequence[NewVersion]) -> None:
        self._note(SET_META, "versions", _encoder.encode(versions))

    def then(self, told: Told) -> None:
        self.file.then(told)

    def commit(self) -> None:
        self.file.commit()
        if self.file.trouble is None:
            self._ended_lately.clear()

    def checkpoint(self) -> None:
        self.file.checkpoint()

    def shorten(self) -> None:
        self.file.shorten()

    def listen(self, on_work: Callable[[bool], None]) -> None:
        self.file.on_work = on_work

    def close(self) -> None:
        self.file.close()


def _answer_of(turn: KeptTurn) -> bytes:
    produced = turn.produced
    answer = Answer(produced.token_ids, produced.logprobs, produced.spans, produced.top_logprobs, produced.workers)
    return _encoder.encode(answer)


def _messages_of(turn: KeptTurn) -> bytes | None:
    """How many it has in common with its parent, and the rest."""
    if turn.messages is None:
        return None
    before = (turn.parent.messages if turn.parent is not None else None) or ()
    shared = len(before) if list(turn.messages[: len(before)]) == list(before) else 0
    return messages_to_json((shared, list(turn.messages[shared:])))


def _short_id(trajectory_id: str) -> int:
    """Return a 63-bit hash of the id; a new id collides with one of a million once in ten trillion times."""
    found = hashlib.blake2b(trajectory_id.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(found, "little") & INT64_MAX
