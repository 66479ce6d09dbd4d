"""From the rows of a ledger back to what the gateway knew.

Trajectories come back with all their turns, in the order in which they began; groups with their members, batches that
were handed out and not yet taken with the very same numbers in them. Moments are not kept, since the clock of another
life means nothing here: whoever was there is taken to have been heard of now.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from rose.bounds import UNREADABLE, Label, Priority
from rose.engines.base import Request, Sampling
from rose.errors import ConfigError, Unavailable
from rose.rollout.ledger import GIVEN_UP, Answer, Ledger
from rose.rollout.ledger_file import LedgerFile
from rose.rollout.ledger_migrations import messages_from_json
from rose.rollout.messages import NewVersion
from rose.rollout.room import Room
from rose.rollout.sessions import Finish, KeptTurn, Session
from rose.rollout.trajectories import Group, RecalledGroup, RecalledTrajectories
from rose.rollout.turn_log import Began, Came, UnderWay, read_log

META = "SELECT name, value FROM meta"
GROUPS = "SELECT id, name, size, task, completed, batch FROM groups ORDER BY id"
SESSIONS = "SELECT id, name, group_id, task, seed, finish, turn_count, forks, is_gone, secret FROM sessions ORDER BY id"
TURNS = (
    "SELECT session, ordinal, digest, parent, prompt, messages, reply, finish, cached, answer, asked FROM turns"
    " ORDER BY session, ordinal"
)
VERSIONS_MAX = 1 << 16

_finish: msgspec.msgpack.Decoder[Finish] = msgspec.msgpack.Decoder(Finish)
_versions: msgspec.msgpack.Decoder[list[NewVersion]] = msgspec.msgpack.Decoder(
    Annotated[list[NewVersion], Meta(max_length=VERSIONS_MAX)]
)
_asked: msgspec.msgpack.Decoder[tuple[Sampling, str, int]] = msgspec.msgpack.Decoder(tuple[Sampling, Label, Priority])
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class Recalled:
    """A turn that had not ended."""

    session: Session
    turn: KeptTurn
    request: Request
    under_way: UnderWay


@dataclass(frozen=True, slots=True)
class Memory:
    trajectories: RecalledTrajectories
    versions: Sequence[NewVersion]
    under_way: Sequence[Recalled]


def recall(ledger: Ledger, room: Room, now_s: float) -> Memory:
    """All that the file holds. Raises ConfigError for a file that is damaged."""
    try:
        return _recall(ledger, room, now_s)
    except (*UNREADABLE, Unavailable) as error:
        hint = "is its disk sound? restore a copy, or start with a new file"
        raise ConfigError(f"the ledger {ledger.file.path} is damaged: {error}", hint=hint) from error


def _recall(ledger: Ledger, room: Room, now_s: float) -> Memory:
    file = ledger.file
    meta = dict(file.rows(META))
    groups = [
        RecalledGroup(Group(name, size, task, number), completed, batch)
        for number, name, size, task, completed, batch in file.rows(GROUPS)
    ]
    by_number = {found.group.number: found.group for found in groups}
    sessions: dict[int, Session] = {}
    gone: list[Session] = []
    for number, name, group_number, task, seed, finish, turn_count, forks, is_gone, secret in file.rows(SESSIONS):
        group = by_number.get(group_number)
        session = Session(name, seed, now_s, group, task, number, ledger, secret=secret, room=room)
        session.finish = _finish.decode(finish) if finish is not None else None
        session.turn_count, session.forks = turn_count, forks
        if is_gone:
            gone.append(session)
            continue
        sessions[number] = session
        if group is not None:
            group.members[name] = session
    under_way = _recall_turns(file, sessions)
    recalled = RecalledTrajectories(list(sessions.values()), gone, groups, meta.get("batch", 0))
    return Memory(recalled, _versions.decode(meta["versions"]) if "versions" in meta else (), under_way)


def _recall_turns(file: LedgerFile, sessions: dict[int, Session]) -> list[Recalled]:
    """Of all sessions; returns those that are under way, oldest row of the log first."""
    log = read_log(file)
    found: list[Recalled] = []
    for number, ordinal, digest, parent, prompt, messages, reply, finish, cached, answer, asked in file.rows(TURNS):
        _, came = log.pop((number, ordinal), (None, []))
        session = sessions.get(number)
        if session is None or (session.finish is not None and not finish):
            continue  # nothing more comes of a turn that had not ended when its trajectory did
        turn = _recall_turn(session, ordinal, digest, parent, prompt, messages, reply)
        _restore(turn, _answer.decode(answer), cached)
        turn.is_noted, turn.is_stopped, turn.finish_reason = finish != GIVEN_UP, finish == GIVEN_UP, finish or None
        if finish is None:
            began = Began((number, ordinal), digest, parent, prompt, _asked.decode(asked), messages)
            under_way = UnderWay(0, began, len(turn.produced))
            _extend(turn, came)
            found.append(_under_way(session, turn, under_way))
    for (number, ordinal), (known, came) in sorted(log.items(), key=lambda item: item[0]):
        session = sessions.get(number)
        if known is None or session is None or session.finish is not None or known.began.digest in session.by_digest:
            continue
        began = known.began
        turn = _recall_turn(session, ordinal, began.digest, began.parent, began.prompt, began.messages, None)
        turn.is_noted = True
        _extend(turn, came)
        session.turns.sort(key=lambda turn: turn.ordinal)
        found.append(_under_way(session, turn, known))
    return sorted(found, key=lambda one: one.under_way.row)


def _under_way(session: Session, turn: KeptTurn, under_way: UnderWay) -> Recalled:
    sampling, tenant, priority = under_way.began.asked
    request = Request(f"{turn.key}#again", turn.prompt_ids, sampling, tenant, priority)
    return Recalled(session, turn, request, under_way)


def _restore(turn: KeptTurn, answer: Answer, cached_tokens: int | None) -> None:
    produced = turn.produced
    produced.token_ids, produced.logprobs, produced.spans = answer.token_ids, answer.logprobs, answer.spans
    produced.top_logprobs, produced.workers = answer.top_logprobs, answer.workers
    produced.cached_tokens = cached_tokens


def _extend(turn: KeptTurn, came: Sequence[Came]) -> None:
    """With the tokens of the log that the turn does not have yet."""
    produced = turn.produced
    for piece in came:
        if piece.start == len(produced):
            produced.add(piece.token_ids, piece.logprobs, piece.version, piece.top_logprobs)
        produced.workers += [name for name in piece.workers if name not in produced.workers]


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
        shared, rest = messages_from_json(messages)
        held = list(parent.messages[:shared]) if parent is not None and parent.messages is not None else []
        turn.restore_words([*held, *rest], reply)
    return turn
