"""Trajectories and groups, in memory: every turn once, every trajectory finished once, every group handed out once.

A turn is known by its key: the trajectory's id and a hash of what was asked (prompt ids, sampling, ordinal). A request
that comes again, because its answer was lost on the way, finds its turn by that hash and gets the same answer, running
or done. Whoever wants another answer to the same prompt asks with another seed or in another session.

A turn that goes on from an earlier one begins with that one's prompt and answer, token by token. One that does not is a
*fork*: the trajectory then has more than one branch, and each sampled token carries a loss in one branch only.

Groups are complete when all their members have finished. Batches are numbered from 1; the trainer says which one it has
got (`after`), and until then the next one is handed out as often as it is asked for.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rose.core.trajectory import NO_VERSION, Trajectory
from rose.coserve.mailbox import Mailbox
from rose.engines.base import FinishReason, Sampling, TokenEvent
from rose.errors import QueueFull, RequestRefused, RoseError
from rose.rollout.produced import Produced

DIGEST_BYTES = 12
SEED_BYTES = 8
SEED_MASK = 2**63 - 1
REMEMBERED_MAX = 10_000  # trajectories whose end is remembered after they were handed out

Message = dict[str, Any]
_encoder = msgspec.msgpack.Encoder()


class KeptTurn:
    """One turn of a trajectory, and whoever reads it now. A `Sink` of the scheduler."""

    def __init__(self, key: str, ordinal: int, prompt_ids: tuple[int, ...], parent: KeptTurn | None) -> None:
        self.key = key
        self.ordinal = ordinal
        self.prompt_ids = prompt_ids
        self.parent = parent
        self.produced = Produced()
        self.finish_reason: FinishReason | None = None
        self.is_running = False
        self.run_id = ""  # by which the scheduler knows its newest try
        self.messages: Sequence[Message] | None = None  # of a chat turn
        self.reply_text: str | None = None
        self.readers: dict[str, Mailbox] = {}  # by request id, those who want every token as it comes
        self.waiters: dict[str, Mailbox] = {}  # those who want the whole answer when it is there
        self.tries = 0

    @property
    def sequence_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.produced)

    def is_prefix_of(self, prompt_ids: tuple[int, ...]) -> bool:
        start = len(self.prompt_ids)
        end = start + len(self.produced)
        return (
            self.finish_reason is not None
            and len(prompt_ids) >= end
            and prompt_ids[:start] == self.prompt_ids
            and prompt_ids[start:end] == tuple(self.produced.token_ids)
        )

    def put(self, event: TokenEvent) -> None:
        for request_id, mailbox in self.readers.items():
            mailbox.put(event if event.request_id == request_id else _relabelled(event, request_id))
        if event.finish_reason is not None:
            self.finish_reason, self.is_running = event.finish_reason, False
            for request_id, mailbox in self.waiters.items():
                self.replay(request_id, mailbox, event.version)
            self.readers.clear()
            self.waiters.clear()

    def fail(self, error: RoseError) -> None:
        """What was produced stays: the same request again goes on from there."""
        self.is_running = False
        for mailbox in (*self.readers.values(), *self.waiters.values()):
            mailbox.fail(error)
        self.readers.clear()
        self.waiters.clear()

    def replay(self, request_id: str, mailbox: Mailbox, version: str) -> None:
        """Everything so far, for one reader."""
        for event in self.produced.events(request_id, version, self.finish_reason):
            mailbox.put(event)

    def forget(self, request_id: str) -> None:
        self.readers.pop(request_id, None)
        self.waiters.pop(request_id, None)


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory. Without a group it is a session of a client that trains elsewhere, or not at all."""

    trajectory_id: str
    seed: int
    touched_s: float
    group_id: str | None = None
    task: str = ""
    turns: list[KeptTurn] = field(default_factory=list)
    by_digest: dict[str, KeptTurn] = field(default_factory=dict)
    finish: Finish | None = None
    turn_count: int = 0  # this and the next are known when it has finished
    forks: int = 0

    def close(self, finish: Finish) -> None:
        self.finish = finish
        self.turn_count = len(self.turns)
        self.forks = max(0, len(_leaves(self.turns)) - 1)

    def turn_of(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int | None, stops: Sequence[str] = ()
    ) -> tuple[KeptTurn, int]:
        """The turn that this request asks for, new or known, and the seed of its dice."""
        asked = digest(prompt_ids, sampling, seed, stops)
        turn = self.by_digest.get(asked)
        if turn is None:
            parent = next((turn for turn in reversed(self.turns) if turn.is_prefix_of(prompt_ids)), None)
            ordinal = len(self.turns)
            turn = KeptTurn(f"{self.trajectory_id}/{ordinal}-{asked}", ordinal, prompt_ids, parent)
            self.by_digest[asked] = turn
            self.turns.append(turn)
        return turn, self._seed_of(turn.ordinal) if seed is None else seed & SEED_MASK

    def _seed_of(self, ordinal: int) -> int:
        text = f"{self.seed}/{ordinal}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=SEED_BYTES).digest(), "little") & SEED_MASK


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a trajectory ended. One that is lost counts for its group's completeness and is not handed out."""

    reward: float = 0.0
    is_success: bool = False
    invalid_turns: int = 0
    is_lost: bool = False


class FinishedGroup(msgspec.Struct, frozen=True):
    group: str
    task: str
    trajectories: tuple[Trajectory, ...]
    lost: int = 0


class Batch(msgspec.Struct, frozen=True):
    batch: int
    groups: tuple[FinishedGroup, ...]


@dataclass(slots=True, eq=False)
class _Group:
    size: int
    task: str
    members: dict[str, Session] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.size and all(member.finish is not None for member in self.members.values())


class Trajectories:
    """The books of one gateway."""

    def __init__(self, most: int, idle_s: float) -> None:
        self._most, self._idle_s = most, idle_s
        self._sessions: dict[str, Session] = {}
        self._groups: dict[str, _Group] = {}
        self._complete: dict[str, _Group] = {}
        self._gone: dict[str, Session] = {}
        self._batches: dict[int, Batch] = {}
        self._numbers = itertools.count(1)
        self.finished = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, trajectory_id: str) -> Session | None:
        return self._sessions.get(trajectory_id)

    def open(self, trajectory_id: str, now_s: float) -> Session:
        """The session of a request, made if it is new. Raises QueueFull, and RequestRefused if it has finished."""
        session = self._sessions.get(trajectory_id)
        if session is None:
            session = self._add(Session(trajectory_id, _seed_from(trajectory_id), now_s))
        if session.finish is not None:
            raise RequestRefused(f"trajectory `{trajectory_id}` has finished", hint="begin another one")
        session.touched_s = now_s
        return session

    def begin(
        self, trajectory_id: str, now_s: float, *, group: str | None, group_size: int, task: str, seed: int | None
    ) -> Session:
        """A trajectory to train on; the same words again find the same one. Raises QueueFull, RequestRefused."""
        known = self._sessions.get(trajectory_id)
        if known is not None:
            if known.group_id != group:
                raise RequestRefused(f"trajectory `{trajectory_id}` belongs to another group: {known.group_id}")
            return known
        session = Session(trajectory_id, _seed_from(trajectory_id) if seed is None else seed, now_s, group, task)
        if group is not None:
            self._join(session, group, group_size, task)
        return self._add(session)

    def finish(self, trajectory_id: str, finish: Finish, now_s: float) -> Session:
        """Raises KeyError, and RequestRefused if it finished otherwise before."""
        session = self._sessions.get(trajectory_id) or self._gone[trajectory_id]
        if session.finish is not None:
            if session.finish != finish:
                raise RequestRefused(f"trajectory `{trajectory_id}` has finished with another outcome")
            return session
        session.close(finish)
        session.touched_s = now_s
        self.finished += 1
        if session.group_id is None:
            self._let_go(session)
        elif self._groups[session.group_id].is_complete:
            self._complete[session.group_id] = self._groups.pop(session.group_id)
        return session

    def batch(self, groups: int, after: int) -> Batch | None:
        """The batch after that one, once so many groups are complete. Raises RequestRefused for one not made yet."""
        for number in [number for number in self._batches if number <= after]:
            del self._batches[number]
        known = self._batches.get(after + 1)
        if known is not None:
            return known
        if self._batches:
            waiting = min(self._batches)
            raise RequestRefused(f"batch {waiting} has not been taken", hint=f"ask for it with after={waiting - 1}")
        if len(self._complete) < groups:
            return None
        number = next(self._numbers)
        names = list(itertools.islice(self._complete, groups))
        batch = Batch(number, tuple(self._hand_out(name) for name in names))
        self._batches[number] = batch
        return batch

    @property
    def complete_groups(self) -> int:
        return len(self._complete)

    def idle(self, now_s: float) -> list[Session]:
        """What nobody has touched for long; to be finished as lost, so that it does not hold up its group."""
        return [
            session
            for session in self._sessions.values()
            if session.finish is None and now_s - session.touched_s > self._idle_s
        ]

    def _add(self, session: Session) -> Session:
        if len(self._sessions) >= self._most:
            raise QueueFull(f"{len(self._sessions)} trajectories are open", hint="finish some", retry_after_s=5.0)
        self._sessions[session.trajectory_id] = session
        return session

    def _let_go(self, session: Session) -> None:
        """Only how it ended is remembered, for a while: whoever finishes it again is told the same."""
        del self._sessions[session.trajectory_id]
        self._gone[session.trajectory_id] = session
        session.turns, session.by_digest = [], {}
        if len(self._gone) > REMEMBERED_MAX:
            del self._gone[next(iter(self._gone))]

    def _join(self, session: Session, name: str, size: int, task: str) -> None:
        group = self._groups.get(name)
        if name in self._complete or (group is not None and len(group.members) >= group.size):
            raise RequestRefused(f"group `{name}` has all its members", hint="give every group its own name")
        if group is None:
            group = self._groups[name] = _Group(size, task)
        if group.size != size:
            raise RequestRefused(f"group `{name}` has size {group.size}, not {size}")
        group.members[session.trajectory_id] = session

    def _hand_out(self, name: str) -> FinishedGroup:
        group = self._complete.pop(name)
        records: list[Trajectory] = []
        lost = 0
        for member in group.members.values():
            assert member.finish is not None
            found = [] if member.finish.is_lost else branches(member, name)
            self._let_go(member)
            records += found
            lost += not found
        return FinishedGroup(name, group.task, tuple(records), lost)


def digest(prompt_ids: tuple[int, ...], sampling: Sampling, seed: int | None, stops: Sequence[str]) -> str:
    """Of what was asked; `seed` as the caller gave it."""
    asked = [getattr(sampling, name) for name in _ASKED]
    found = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=DIGEST_BYTES)
    found.update(_encoder.encode((asked, seed, tuple(stops))))
    return found.hexdigest()


_ASKED = tuple(name for name in Sampling.__slots__ if name != "seed")


def branches(session: Session, group_id: str) -> list[Trajectory]:
    """Every line of turns from a first prompt to an answer that nothing goes on from."""
    counted: set[KeptTurn] = set()
    found = []
    for number, leaf in enumerate(_leaves(session.turns)):
        name = session.trajectory_id if number == 0 else f"{session.trajectory_id}~{number}"
        found.append(_branch(session, name, group_id, _line(leaf), counted))
    return found


def _leaves(turns: Sequence[KeptTurn]) -> list[KeptTurn]:
    ended = [turn for turn in turns if turn.finish_reason is not None]
    parents = {turn.parent for turn in ended}
    return [turn for turn in ended if turn not in parents]


def _line(leaf: KeptTurn) -> list[KeptTurn]:
    line = [leaf]
    while line[-1].parent is not None:
        line.append(line[-1].parent)
    return line[::-1]


def _branch(session: Session, name: str, group_id: str, line: Sequence[KeptTurn], counted: set[KeptTurn]) -> Trajectory:
    assert session.finish is not None
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[str] = []
    for turn in line:
        context = turn.prompt_ids[len(ids) :]
        produced = turn.produced
        ids += [*context, *produced.token_ids]
        mask += [False] * len(context) + [turn not in counted] * len(produced)
        logprobs += [0.0] * len(context) + produced.logprobs
        versions += [NO_VERSION] * len(context)
        versions += [span.version for span in produced.spans for _ in range(span.start, span.end)]
    counted.update(line)
    finish = session.finish
    return Trajectory(
        name,
        group_id,
        tuple(ids),
        tuple(mask),
        tuple(logprobs),
        tuple(versions),
        finish.reward,
        finish.is_success,
        len(line),
        finish.invalid_turns,
    )


def _relabelled(event: TokenEvent, request_id: str) -> TokenEvent:
    return TokenEvent(
        request_id,
        event.token_ids,
        event.logprobs,
        event.version,
        event.finish_reason,
        event.top_logprobs,
        event.cached_tokens,
    )


def _seed_from(trajectory_id: str) -> int:
    found = hashlib.blake2b(trajectory_id.encode(), digest_size=SEED_BYTES).digest()
    return int.from_bytes(found, "little") & SEED_MASK
