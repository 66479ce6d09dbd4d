"""Trajectories and groups: every turn once, every trajectory finished once, every group handed out once.

A turn is known by its key: the trajectory's id and a hash of what was asked (prompt ids, sampling, ordinal). A request
that comes again, because its answer was lost on the way, finds its turn by that hash and gets the same answer, running
or done. Whoever wants another answer to the same prompt asks with another seed or in another session.

A turn that goes on from an earlier one begins with that one's prompt and answer, token by token. One that does not is a
*fork*: the trajectory then has more than one branch (`rose.rollout.branches`).

Groups are complete when all their members have finished. Batches are numbered from 1; the trainer says which one it has
got (`after`), and until then the next one is handed out as often as it is asked for.

Everything that happens here is told to the ledger, and readers are told only what the ledger has.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from rose.core.trajectory import Trajectory
from rose.coserve.mailbox import Mailbox
from rose.engines.base import FinishReason, Request, Sampling, TokenEvent
from rose.errors import QueueFull, RequestRefused, RoseError, Unavailable
from rose.rollout.branches import branches, leaves
from rose.rollout.ledger import NO_LEDGER, NoLedger
from rose.rollout.produced import Produced

DIGEST_BYTES = 12
SEED_BYTES = 8
SEED_MASK = 2**63 - 1
REMEMBERED_MAX = 10_000  # trajectories whose end is remembered after they were handed out

Message = dict[str, Any]
_encoder = msgspec.msgpack.Encoder()


class KeptTurn:
    """One turn of a trajectory, and whoever reads it now. A `Sink` of the scheduler."""

    def __init__(
        self,
        key: str,
        ordinal: int,
        prompt_ids: tuple[int, ...],
        parent: KeptTurn | None,
        *,
        digest: str = "",
        session_number: int = 0,
        group_id: str | None = None,
        ledger: NoLedger | None = None,
    ) -> None:
        self.key = key
        self.ordinal = ordinal
        self.prompt_ids = prompt_ids
        self.parent = parent
        self.digest = digest
        self.session_number = session_number
        self.group_id = group_id
        self.produced = Produced()
        self.finish_reason: FinishReason | None = None
        self.is_running = False
        self.is_noted = False  # the ledger knows of it
        self.run_id = ""  # by which the scheduler knows its newest try
        self.messages: Sequence[Message] | None = None  # of a chat turn
        self.readers: dict[str, Mailbox] = {}  # by request id, those who want every token as it comes
        self.waiters: dict[str, Mailbox] = {}  # those who want the whole answer when it is there
        self.tries = 0
        self._reply_text: str | None = None
        self._ledger = ledger or NO_LEDGER

    @property
    def sequence_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.produced)

    @property
    def reply_text(self) -> str | None:
        """What the client was told, of a chat turn."""
        return self._reply_text

    @reply_text.setter
    def reply_text(self, text: str | None) -> None:
        if text != self._reply_text:
            self._reply_text = text
            self._ledger.replied(self)

    def restore_words(self, messages: Sequence[Message], reply_text: str | None) -> None:
        """As the ledger has them."""
        self.messages, self._reply_text = messages, reply_text

    def is_prefix_of(self, prompt_ids: tuple[int, ...]) -> bool:
        start = len(self.prompt_ids)
        end = start + len(self.produced)
        return (
            self.finish_reason is not None
            and len(prompt_ids) >= end
            and prompt_ids[:start] == self.prompt_ids
            and prompt_ids[start:end] == tuple(self.produced.token_ids)
        )

    def runs(self, request: Request) -> None:
        """It is given to the scheduler, in the words of this request."""
        self.is_running, self.run_id = True, request.request_id
        if not self.is_noted:
            self.is_noted = True
            self._ledger.turn(self, request)

    def put(self, event: TokenEvent) -> None:
        self._ledger.produced(self, event)
        if event.finish_reason is None and not self.readers:
            return
        told = [
            (mailbox, [event if event.request_id == name else msgspec.structs.replace(event, request_id=name)])
            for name, mailbox in self.readers.items()
        ]
        if event.finish_reason is not None:
            self.finish_reason, self.is_running = event.finish_reason, False
            told += [(mailbox, self._so_far(name, event.version)) for name, mailbox in self.waiters.items()]
            self.readers, self.waiters = {}, {}
        if told:
            self._ledger.then(partial(_deliver, told))

    def fail(self, error: RoseError) -> None:
        """What was produced stays: the same request again goes on from there."""
        self.is_running = False
        mailboxes = [*self.readers.values(), *self.waiters.values()]
        self.readers, self.waiters = {}, {}
        if mailboxes:
            self._ledger.then(partial(_fail, mailboxes, error))

    def replay(self, request_id: str, mailbox: Mailbox, version: str) -> None:
        """Everything so far, for one reader."""
        self._ledger.then(partial(_deliver, [(mailbox, self._so_far(request_id, version))]))

    def cut(self, tokens: int) -> None:
        """It ends here: its text met a stop string, which the engine knows nothing of."""
        self.is_running = False
        self.produced.cut(tokens)
        self.finish_reason = "stop"
        self._ledger.cut(self, tokens)

    def forget(self, request_id: str) -> None:
        self.readers.pop(request_id, None)
        self.waiters.pop(request_id, None)

    def _so_far(self, request_id: str, version: str) -> list[TokenEvent]:
        return self.produced.events(request_id, version, self.finish_reason)


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory. Without a group it is a session of a client that trains elsewhere, or not at all."""

    trajectory_id: str
    seed: int
    touched_s: float
    group: Group | None = None
    task: str = ""
    number: int = 0
    ledger: NoLedger = NO_LEDGER
    turns: list[KeptTurn] = field(default_factory=list)
    by_digest: dict[str, KeptTurn] = field(default_factory=dict)
    finish: Finish | None = None
    turn_count: int = 0  # this and the next are known when it has finished
    forks: int = 0

    @property
    def group_id(self) -> str | None:
        return self.group.name if self.group is not None else None

    def close(self, finish: Finish) -> None:
        self.finish = finish
        self.turn_count = len(self.turns)
        self.forks = max(0, len(leaves(self.turns)) - 1)
        self.ledger.finished(self)

    def turn_of(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int | None, stops: Sequence[str] = ()
    ) -> tuple[KeptTurn, int]:
        """The turn that this request asks for, new or known, and the seed of its dice."""
        asked = digest(prompt_ids, sampling, seed, stops)
        turn = self.by_digest.get(asked)
        if turn is None:
            parent = next((turn for turn in reversed(self.turns) if turn.is_prefix_of(prompt_ids)), None)
            ordinal = self.turns[-1].ordinal + 1 if self.turns else 0
            turn = self.add(ordinal, asked, prompt_ids, parent)
        return turn, self._seed_of(turn.ordinal) if seed is None else seed & SEED_MASK

    def add(self, ordinal: int, asked: str, prompt_ids: tuple[int, ...], parent: KeptTurn | None) -> KeptTurn:
        key = f"{self.trajectory_id}/{ordinal}-{asked}"
        turn = KeptTurn(
            key,
            ordinal,
            prompt_ids,
            parent,
            digest=asked,
            session_number=self.number,
            group_id=self.group_id,
            ledger=self.ledger,
        )
        self.by_digest[asked] = turn
        self.turns.append(turn)
        return turn

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
class Group:
    name: str
    size: int
    task: str
    number: int
    members: dict[str, Session] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.size and all(member.finish is not None for member in self.members.values())

    def hand_out(self) -> FinishedGroup:
        records: list[Trajectory] = []
        lost = 0
        for member in self.members.values():
            assert member.finish is not None
            found = [] if member.finish.is_lost else branches(member, self.name)
            records += found
            lost += not found
        return FinishedGroup(self.name, self.task, tuple(records), lost)


@dataclass(slots=True, eq=False)
class _HandedOut:
    """Until the trainer says that it has it."""

    batch: Batch
    groups: list[Group]


@dataclass(frozen=True, slots=True)
class RecalledGroup:
    """`completed` orders the groups that are complete; `batch` is the one it was handed out in."""

    group: Group
    completed: int | None
    batch: int | None


@dataclass(frozen=True, slots=True)
class Recalled:
    """What the ledger holds of an earlier life; `gone` are those of which only the end is known."""

    sessions: Sequence[Session]
    gone: Sequence[Session]
    groups: Sequence[RecalledGroup]
    batch_number: int

    def __iter__(self) -> Iterator[Session]:
        return itertools.chain(self.sessions, self.gone)


class Trajectories:
    """The books of one gateway."""

    def __init__(self, most: int, idle_s: float, ledger: NoLedger | None = None) -> None:
        self._most, self._idle_s = most, idle_s
        self._ledger = ledger or NO_LEDGER
        self._sessions: dict[str, Session] = {}
        self._groups: dict[str, Group] = {}
        self._complete: dict[str, Group] = {}
        self._held: dict[str, Session] = {}  # handed out in a batch that was not taken yet
        self._gone: dict[str, Session] = {}
        self._batches: dict[int, _HandedOut] = {}
        self._batch_number = 0  # of the last one made
        self._numbers, self._group_numbers, self._orders = itertools.count(1), itertools.count(1), itertools.count(1)
        self.finished = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, trajectory_id: str) -> Session | None:
        return self._sessions.get(trajectory_id)

    def open(self, trajectory_id: str, now_s: float) -> Session:
        """The session of a request, made if it is new. Raises QueueFull, and RequestRefused if it has finished."""
        session = self._known(trajectory_id)
        if session is None:
            session = self._add(trajectory_id, None, "", None, now_s)
        if session.finish is not None:
            raise RequestRefused(f"trajectory `{trajectory_id}` has finished", hint="begin another one")
        session.touched_s = now_s
        return session

    def begin(
        self, trajectory_id: str, now_s: float, *, group: str | None, group_size: int, task: str, seed: int | None
    ) -> Session:
        """A trajectory to train on; the same words again find the same one. Raises QueueFull, RequestRefused."""
        known = self._known(trajectory_id)
        if known is not None:
            is_past = known.finish is not None and known.group is None  # whose group is not remembered for ever
            if known.group_id != group and not is_past:
                raise RequestRefused(f"trajectory `{trajectory_id}` belongs to another group: {known.group_id}")
            return known
        self._check_room()
        found = self._group_of(group, group_size, task) if group is not None else None
        return self._add(trajectory_id, found, task, seed, now_s)

    def finish(self, trajectory_id: str, finish: Finish, now_s: float) -> Session:
        """Raises KeyError, and RequestRefused if it finished otherwise before."""
        session = self._known(trajectory_id)
        if session is None:
            raise KeyError(trajectory_id)
        if session.finish is not None:
            if session.finish != finish:
                raise RequestRefused(f"trajectory `{trajectory_id}` has finished with another outcome")
            return session
        session.close(finish)
        session.touched_s = now_s
        self.finished += 1
        group = session.group
        if group is None:
            self._let_go(self._sessions.pop(trajectory_id))
        elif group.is_complete:
            self._complete[group.name] = self._groups.pop(group.name)
            self._ledger.completed(group, next(self._orders))
        return session

    def batch(self, groups: int, after: int) -> Batch | None:
        """The batch after that one, once so many groups are complete.

        Raises RequestRefused for one that cannot be the next: another has not been taken, or it was taken before.
        """
        for number in [number for number in self._batches if number <= after]:
            self._take_off(self._batches.pop(number).groups)
        known = self._batches.get(after + 1)
        if known is not None:
            return known.batch
        if self._batches:
            waiting = min(self._batches)
            raise RequestRefused(f"batch {waiting} has not been taken", hint=f"ask for it with after={waiting - 1}")
        if after < self._batch_number:
            what = f"batch {after + 1} was taken before"
            raise RequestRefused(what, hint=f"ask for the next one with after={self._batch_number}")
        if len(self._complete) < groups:
            return None
        taken = [self._complete.pop(name) for name in list(itertools.islice(self._complete, groups))]
        self._batch_number += 1
        self._ledger.batched(self._batch_number, taken)
        return self._hand_out(self._batch_number, taken)

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

    def restore(self, recalled: Recalled) -> None:
        """What an earlier life had."""
        self._sessions = {session.trajectory_id: session for session in recalled.sessions}
        self._gone = {session.trajectory_id: session for session in recalled.gone}
        self._numbers = itertools.count(max((session.number for session in recalled), default=0) + 1)
        self._group_numbers = itertools.count(max((found.group.number for found in recalled.groups), default=0) + 1)
        self._orders = itertools.count(max((found.completed or 0 for found in recalled.groups), default=0) + 1)
        self._batch_number = recalled.batch_number
        batches: dict[int, list[Group]] = {}
        for found in sorted(recalled.groups, key=lambda found: found.completed or 0):
            if found.completed is None:
                self._groups[found.group.name] = found.group
            elif found.batch is None:
                self._complete[found.group.name] = found.group
            else:
                batches.setdefault(found.batch, []).append(found.group)
        for number in sorted(batches):
            self._hand_out(number, batches[number])

    def _known(self, trajectory_id: str) -> Session | None:
        for place in (self._sessions, self._held, self._gone):
            if trajectory_id in place:
                return place[trajectory_id]
        return None

    def _add(self, trajectory_id: str, group: Group | None, task: str, seed: int | None, now_s: float) -> Session:
        self._check_room()
        seed = _seed_from(trajectory_id) if seed is None else seed
        session = Session(trajectory_id, seed, now_s, group, task, next(self._numbers), self._ledger)
        self._sessions[trajectory_id] = session
        if group is not None:
            group.members[trajectory_id] = session
        self._ledger.began(session)
        return session

    def _check_room(self) -> None:
        if len(self._sessions) >= self._most:
            raise QueueFull(f"{len(self._sessions)} trajectories are open", hint="finish some", retry_after_s=5.0)

    def _let_go(self, session: Session) -> None:
        """Only how it ended is remembered, for a while: whoever finishes it again is told the same."""
        session.turns, session.by_digest = [], {}
        self._gone[session.trajectory_id] = session
        self._ledger.let_go(session)
        if len(self._gone) > REMEMBERED_MAX:
            oldest = self._gone.pop(next(iter(self._gone)))
            oldest.group = None
            self._ledger.forgotten(oldest)

    def _take_off(self, groups: Sequence[Group]) -> None:
        """The trainer has them."""
        for group in groups:
            self._ledger.taken(group)
            for name in group.members:
                self._let_go(self._held.pop(name))

    def _group_of(self, name: str, size: int, task: str) -> Group:
        group = self._groups.get(name)
        if name in self._complete or (group is not None and len(group.members) >= group.size):
            raise RequestRefused(f"group `{name}` has all its members", hint="give every group its own name")
        if group is None:
            group = self._groups[name] = Group(name, size, task, next(self._group_numbers))
            self._ledger.group(group)
        if group.size != size:
            raise RequestRefused(f"group `{name}` has size {group.size}, not {size}")
        return group

    def _hand_out(self, number: int, groups: list[Group]) -> Batch:
        batch = Batch(number, tuple(group.hand_out() for group in groups))
        self._batches[number] = _HandedOut(batch, groups)
        for group in groups:
            for name, member in group.members.items():
                self._held[name] = self._sessions.pop(name)
                member.turns, member.by_digest = [], {}
        return batch


def digest(prompt_ids: tuple[int, ...], sampling: Sampling, seed: int | None, stops: Sequence[str]) -> str:
    """Of what was asked; `seed` as the caller gave it."""
    asked = [getattr(sampling, name) for name in _ASKED]
    found = hashlib.blake2b(array("q", prompt_ids), digest_size=DIGEST_BYTES)
    found.update(_encoder.encode((asked, seed, tuple(stops))))
    return found.hexdigest()


_ASKED = tuple(name for name in Sampling.__struct_fields__ if name != "seed")


def _deliver(told: Sequence[tuple[Mailbox, Sequence[TokenEvent]]], trouble: Unavailable | None) -> None:
    for mailbox, events in told:
        if trouble is not None:
            mailbox.fail(trouble)
            continue
        for event in events:
            mailbox.put(event)


def _fail(mailboxes: Sequence[Mailbox], error: RoseError, trouble: Unavailable | None) -> None:
    for mailbox in mailboxes:
        mailbox.fail(error)


def _seed_from(trajectory_id: str) -> int:
    found = hashlib.blake2b(trajectory_id.encode(), digest_size=SEED_BYTES).digest()
    return int.from_bytes(found, "little") & SEED_MASK
