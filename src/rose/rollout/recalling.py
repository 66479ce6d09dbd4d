"""From the rows of a ledger back to what the gateway knew.

Trajectories come back with all their turns, in the order in which they began; groups with their members, batches that
were handed out and not yet taken with the very same numbers in them. Moments are not kept, since the clock of another
life means nothing here: whoever was there is taken to have been heard of now.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rose.engines.base import Request, Sampling
from rose.rollout.ledger import Ledger
from rose.rollout.ledger_file import LedgerFile
from rose.rollout.messages import NewVersion
from rose.rollout.trajectories import Finish, Group, KeptTurn, Message, Recalled, RecalledGroup, Session

META = "SELECT name, value FROM meta"
GROUPS = "SELECT id, name, size, task, completed, batch FROM groups ORDER BY id"
SESSIONS = "SELECT id, name, group_id, task, seed, finish, turn_count, forks, is_gone FROM sessions ORDER BY id"
TURNS = (
    "SELECT session, ordinal, digest, parent, prompt, request, messages, reply, finish, cached, cut FROM turns"
    " ORDER BY session, ordinal"
)
PIECES = (
    "SELECT session, ordinal, token_ids, logprobs, version, top, worker FROM pieces ORDER BY session, ordinal, start"
)

_asked: msgspec.msgpack.Decoder[tuple[Sampling, str, int]] = msgspec.msgpack.Decoder(tuple[Sampling, str, int])
_messages: msgspec.msgpack.Decoder[tuple[int, list[Message]]] = msgspec.msgpack.Decoder(tuple[int, list[Message]])
_finish: msgspec.msgpack.Decoder[Finish] = msgspec.msgpack.Decoder(Finish)
_versions: msgspec.msgpack.Decoder[list[NewVersion]] = msgspec.msgpack.Decoder(list[NewVersion])
_tops: msgspec.msgpack.Decoder[tuple[Any, ...]] = msgspec.msgpack.Decoder(tuple[tuple[tuple[int, float], ...], ...])


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A turn that had not ended."""

    session: Session
    turn: KeptTurn
    request: Request


@dataclass(frozen=True, slots=True)
class Memory:
    trajectories: Recalled
    versions: Sequence[NewVersion]
    under_way: Sequence[UnderWay]


def recall(ledger: Ledger, now_s: float) -> Memory:
    """All that the file holds."""
    file = ledger.file
    meta = dict(file.rows(META))
    groups = [
        RecalledGroup(Group(name, size, task, number), completed, batch)
        for number, name, size, task, completed, batch in file.rows(GROUPS)
    ]
    by_number = {found.group.number: found.group for found in groups}
    sessions: dict[int, Session] = {}
    gone: list[Session] = []
    for number, name, group_number, task, seed, finish, turn_count, forks, is_gone in file.rows(SESSIONS):
        group = by_number.get(group_number)
        session = Session(name, seed, now_s, group, task, number, ledger)
        session.finish = _finish.decode(finish) if finish is not None else None
        session.turn_count, session.forks = turn_count, forks
        if is_gone:
            gone.append(session)
            continue
        sessions[number] = session
        if group is not None:
            group.members[name] = session
    under_way = _recall_turns(file, sessions)
    recalled = Recalled(list(sessions.values()), gone, groups, meta.get("batch", 0))
    return Memory(recalled, _versions.decode(meta["versions"]) if "versions" in meta else (), under_way)


def _recall_turns(file: LedgerFile, sessions: dict[int, Session]) -> list[UnderWay]:
    """Into their sessions; those that had not ended."""
    pieces = _Pieces(file)
    under_way = []
    for row in file.rows(TURNS):
        session = sessions.get(row[0])
        if session is None:
            continue
        turn = _recall_turn(session, row, pieces)
        if turn.finish_reason is None and session.finish is None:
            sampling, tenant, priority = _asked.decode(row[5])
            request = Request(f"{turn.key}#again", turn.prompt_ids, sampling, tenant, priority)
            under_way.append(UnderWay(session, turn, request))
    return under_way


def _recall_turn(session: Session, row: tuple[Any, ...], pieces: _Pieces) -> KeptTurn:
    number, ordinal, digest, parent_ordinal, prompt, _, messages, reply, finish, cached, cut = row
    parent = next((turn for turn in session.turns if turn.ordinal == parent_ordinal), None)
    before = (*parent.prompt_ids, *parent.produced.token_ids) if parent is not None else ()
    turn = session.add(ordinal, digest, (*before, *array("i", prompt)), parent)
    turn.is_noted = True
    pieces.into(turn, number)
    if cut is not None:
        turn.produced.cut(cut)
    turn.finish_reason, turn.produced.cached_tokens = finish, cached
    if messages is not None:
        shared, rest = _messages.decode(messages)
        held = list(parent.messages[:shared]) if parent is not None and parent.messages is not None else []
        turn.restore_words([*held, *rest], reply)
    return turn


class _Pieces:
    """All pieces, read beside the turns they belong to: both are in the same order."""

    def __init__(self, file: LedgerFile) -> None:
        self._rows = file.rows(PIECES)
        self._next = next(self._rows, None)

    def into(self, turn: KeptTurn, session_number: int) -> None:
        wanted = (session_number, turn.ordinal)
        while self._next is not None and self._next[:2] <= wanted:
            found, (token_ids, logprobs, version, top, worker) = self._next[:2], self._next[2:]
            if found == wanted:
                tops = _tops.decode(top) if top is not None else ()
                turn.produced.add(array("i", token_ids), array("d", logprobs), version, tops, worker)
            self._next = next(self._rows, None)
