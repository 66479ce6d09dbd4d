"""Rebuilds the gateway's state from the rows of its ledger.

Turns return in the order in which they began, and batches that were handed out and not confirmed with the same numbers.
Times are not kept, since another incarnation has another clock: every trajectory counts as used now.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from rose.api.worker_messages import NewVersion
from rose.bounds import UNREADABLE, Label, Priority
from rose.engines.base import Request, Sampling
from rose.errors import ConfigError, Unavailable
from rose.gateway.ledger import GIVEN_UP, Ledger
from rose.gateway.ledger_file import messages_from_json
from rose.gateway.pool import Pool
from rose.gateway.sessions import Finish, KeptTurn, Session
from rose.gateway.trajectory_table import Group, RecoveredGroup, Trajectories
from rose.gateway.turn_log import TokensLogged, TurnBegan, UnderWay, read_log
from rose.gateway.turn_state import PartialOutput

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
_answer: msgspec.msgpack.Decoder[PartialOutput] = msgspec.msgpack.Decoder(PartialOutput)

_NOT_ASKED = msgspec.msgpack.encode((Sampling(), "", 0))  # of a turn that has ended


@dataclass(frozen=True, slots=True)
class UnfinishedTurn:
    """A turn that was under way, and the request that runs it again."""

    session: Session
    turn: KeptTurn
    request: Request
    under_way: UnderWay


def recover(ledger: Ledger, pool: Pool, trajectories: Trajectories, now_s: float) -> list[UnfinishedTurn]:
    """Restore the state of pool and trajectories, and return the turns that were under way, in order of their rows.

    Raises ConfigError for a file that is damaged.
    """
    try:
        return _recover(ledger, pool, trajectories, now_s)
    except (*UNREADABLE, Unavailable) as error:
        hint = "is its disk sound? restore a copy, or start with a new file"
        raise ConfigError(f"the ledger {ledger.path} is damaged: {error}", hint=hint) from error


def _recover(ledger: Ledger, pool: Pool, trajectories: Trajectories, now_s: float) -> list[UnfinishedTurn]:
    meta = dict(ledger.fetch("SELECT name, value FROM meta"))
    groups: list[RecoveredGroup] = [
        (Group(name, size, task, number), completed, batch)
        for number, name, size, task, completed, batch in ledger.fetch(GROUPS)
    ]
    by_number = {group.number: group for group, _, _ in groups}
    sessions: dict[int, Session] = {}
    gone: list[Session] = []
    for number, name, group_number, task, seed, finish, turn_count, forks, is_gone, secret in ledger.fetch(SESSIONS):
        group = by_number.get(group_number)
        session = Session(name, seed, now_s, group, task, number, ledger, secret=secret, room=trajectories.room)
        session.finish = _finish.decode(finish) if finish is not None else None
        session.turn_count, session.forks = turn_count, forks
        if is_gone:
            gone.append(session)
            continue
        sessions[number] = session
        if group is not None:
            group.members[name] = session
    unfinished = _recover_turns(ledger, sessions)
    versions = _versions.decode(meta["versions"]) if "versions" in meta else ()
    pool.restore(versions)
    trajectories.restore(sessions.values(), gone, groups, meta.get("batch", 0), meta.get("empty_batch", 0))
    return unfinished


def _recover_turns(ledger: Ledger, sessions: dict[int, Session]) -> list[UnfinishedTurn]:
    """Add the turns to their sessions. Return those that are under way, oldest row of the log first."""
    log = read_log(ledger)
    unfinished: list[UnfinishedTurn] = []
    for number, ordinal, digest, parent, prompt, messages, reply, finish, cached, answer, asked in ledger.fetch(TURNS):
        _, logged = log.pop((number, ordinal), (None, []))
        session = sessions.get(number)
        if session is None or (session.finish is not None and not finish):
            continue  # a turn that had not ended when its trajectory did never will
        began = TurnBegan((number, ordinal), digest, parent, prompt, _asked.decode(asked or _NOT_ASKED), messages)
        turn = _add_turn(session, began, reply)
        turn.produced = _answer.decode(answer)
        turn.produced.cached_tokens = cached
        turn.is_noted, turn.is_stopped, turn.finish_reason = finish != GIVEN_UP, finish == GIVEN_UP, finish or None
        if finish is None:
            under_way = UnderWay(0, began, len(turn.produced))
            unfinished.append(_unfinished(session, turn, under_way, logged))
    for (number, _), (known, logged) in sorted(log.items(), key=lambda item: item[0]):
        session = sessions.get(number)
        if known is None or session is None or session.finish is not None or known.began.digest in session.by_digest:
            continue
        turn = _add_turn(session, known.began, None)
        turn.is_noted = True
        session.turns.sort(key=lambda turn: turn.ordinal)
        unfinished.append(_unfinished(session, turn, known, logged))
    return sorted(unfinished, key=lambda one: one.under_way.row)


def _unfinished(
    session: Session, turn: KeptTurn, under_way: UnderWay, logged: Sequence[TokensLogged]
) -> UnfinishedTurn:
    """Add the tokens of the log that the turn does not have yet, and make the request that continues it."""
    produced = turn.produced
    for piece in logged:
        if piece.start == len(produced):
            produced.add(piece.token_ids, piece.logprobs, piece.version, piece.top_logprobs)
            produced.prompt_logprobs = piece.prompt_logprobs or produced.prompt_logprobs
        produced.workers += [name for name in piece.workers if name not in produced.workers]
    sampling, tenant, priority = under_way.began.asked
    request = Request(f"{turn.key}#again", turn.prompt_ids, sampling, tenant, priority)
    return UnfinishedTurn(session, turn, request, under_way)


def _add_turn(session: Session, began: TurnBegan, reply: str | None) -> KeptTurn:
    parent = next((turn for turn in session.turns if turn.ordinal == began.parent), None)
    before = (*parent.prompt_ids, *parent.produced.token_ids) if parent is not None else ()
    turn = session.add(began.turn[1], began.digest, (*before, *array("i", began.prompt)), parent)
    if began.messages is not None:
        shared, rest = messages_from_json(began.messages)
        held = list(parent.messages[:shared]) if parent is not None and parent.messages is not None else []
        turn.restore_messages([*held, *rest], reply)
    return turn
