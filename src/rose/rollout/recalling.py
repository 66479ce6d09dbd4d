"""From the rows of a ledger back to what the gateway knew.

Trajectories come back with all their turns, in the order in which they began; groups with their members, batches that
were handed out and not yet taken with the very same numbers in them. Moments are not kept, since the clock of another
life means nothing here: whoever was there is taken to have been heard of now.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rose.engines.base import Request
from rose.rollout.ledger import Answer, Ledger
from rose.rollout.ledger_file import LedgerFile
from rose.rollout.messages import NewVersion
from rose.rollout.trajectories import Finish, Group, KeptTurn, Message, Recalled, RecalledGroup, Session
from rose.rollout.turn_log import read_log

META = "SELECT name, value FROM meta"
GROUPS = "SELECT id, name, size, task, completed, batch FROM groups ORDER BY id"
SESSIONS = "SELECT id, name, group_id, task, seed, finish, turn_count, forks, is_gone FROM sessions ORDER BY id"
TURNS = (
    "SELECT session, ordinal, digest, parent, prompt, messages, reply, finish, cached, answer FROM turns"
    " ORDER BY session, ordinal"
)

_messages: msgspec.msgpack.Decoder[tuple[int, list[Message]]] = msgspec.msgpack.Decoder(tuple[int, list[Message]])
_finish: msgspec.msgpack.Decoder[Finish] = msgspec.msgpack.Decoder(Finish)
_versions: msgspec.msgpack.Decoder[list[NewVersion]] = msgspec.msgpack.Decoder(list[NewVersion])
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


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
    _recall_ended(file, sessions)
    under_way = _recall_under_way(file, sessions)
    recalled = Recalled(list(sessions.values()), gone, groups, meta.get("batch", 0))
    return Memory(recalled, _versions.decode(meta["versions"]) if "versions" in meta else (), under_way)


def _recall_ended(file: LedgerFile, sessions: dict[int, Session]) -> None:
    for number, ordinal, digest, parent, prompt, messages, reply, finish, cached, answer in file.rows(TURNS):
        session = sessions.get(number)
        if session is None:
            continue
        turn = _recall_turn(session, ordinal, digest, parent, prompt, messages, reply)
        turn.is_noted, turn.finish_reason = True, finish
        found, produced = _answer.decode(answer), turn.produced
        produced.token_ids, produced.logprobs, produced.spans = found.token_ids, found.logprobs, found.spans
        produced.top_logprobs, produced.workers = found.top_logprobs, found.workers
        produced.cached_tokens = cached


def _recall_under_way(file: LedgerFile, sessions: dict[int, Session]) -> list[UnderWay]:
    """Of trajectories that have not finished. Whoever runs them again notes them again."""
    under_way = []
    for (number, ordinal), (began, came) in sorted(read_log(file).items()):
        session = sessions.get(number)
        if session is None or session.finish is not None or began.digest in session.by_digest:
            continue
        turn = _recall_turn(session, ordinal, began.digest, began.parent, began.prompt, began.messages, None)
        for piece in came:
            turn.produced.add(piece.token_ids, piece.logprobs, piece.version, piece.top_logprobs)
            turn.produced.workers += [name for name in piece.workers if name not in turn.produced.workers]
        session.turns.sort(key=lambda turn: turn.ordinal)
        sampling, tenant, priority = began.asked
        request = Request(f"{turn.key}#again", turn.prompt_ids, sampling, tenant, priority)
        under_way.append(UnderWay(session, turn, request))
    return under_way


def _recall_turn(
    session: Session,
    ordinal: int,
    digest: str,
    parent_ordinal: int | None,
    prompt: bytes,
    messages: bytes | None,
    reply: str | None,
) -> KeptTurn:
    """Into its session."""
    parent = next((turn for turn in session.turns if turn.ordinal == parent_ordinal), None)
    before = (*parent.prompt_ids, *parent.produced.token_ids) if parent is not None else ()
    turn = session.add(ordinal, digest, (*before, *array("i", prompt)), parent)
    if messages is not None:
        shared, rest = _messages.decode(messages)
        held = list(parent.messages[:shared]) if parent is not None and parent.messages is not None else []
        turn.restore_words([*held, *rest], reply)
    return turn
