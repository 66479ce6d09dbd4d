"""Trajectories and groups: every turn once, every trajectory finished once, every group handed out once.

Groups are complete when all their members have finished. Batches are numbered from 1; the trainer says which one it has
got (`after`), and until then the next one is handed out as often as it is asked for.

Everything that happens here is told to the ledger, and readers are told only what the ledger has.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from rose.bounds import ITEMS_MAX, TOKENS_MAX, Count, Label, Serial, Text
from rose.core.trajectory import Trajectory
from rose.errors import QueueFull, RequestRefused
from rose.rollout.branches import branches
from rose.rollout.ledger import NO_LEDGER, NoLedger
from rose.rollout.room import Room
from rose.rollout.sessions import SECRET_MARK, Finish, Session, is_secret_of, seed_from, session_key

REMEMBERED_MAX = 10_000  # trajectories whose outcome is remembered after they were handed out
SECRET_BYTES = 16
SECRET_PATTERN = r"^[A-Za-z0-9_-]{16,64}\Z"
SECRET = re.compile(SECRET_PATTERN)
FORK_ID = re.compile(r"~[0-9]+\Z")  # the end of what a trajectory's further branches are called


class FinishedGroup(msgspec.Struct, frozen=True):
    group: Label
    task: Text
    trajectories: Annotated[tuple[Trajectory, ...], Meta(max_length=ITEMS_MAX)]
    lost: Count = 0


class Batch(msgspec.Struct, frozen=True):
    batch: Serial
    groups: Annotated[tuple[FinishedGroup, ...], Meta(max_length=TOKENS_MAX)]


@dataclass(slots=True, eq=False)
class Group:
    name: str
    size: int
    task: str
    number: int
    members: dict[str, Session] = field(default_factory=dict)
    finished: FinishedGroup | None = None  # once it is complete

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.size and all(member.finish is not None for member in self.members.values())

    def close(self) -> None:
        """Put together what is handed out, and forget the turns: a group at a time, so that no batch is long work."""
        self.finished = self._hand_out()
        for member in self.members.values():
            member.clear()

    def _hand_out(self) -> FinishedGroup:
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
class RecalledTrajectories:
    """What the ledger holds of an earlier life; `gone` are those of which only the end is known."""

    sessions: Sequence[Session]
    gone: Sequence[Session]
    groups: Sequence[RecalledGroup]
    batch_number: int

    def __iter__(self) -> Iterator[Session]:
        return itertools.chain(self.sessions, self.gone)


class Forbidden(RequestRefused):
    """The trajectory belongs to another agent."""


class Trajectories:
    """The books of one gateway.

    A trajectory that was begun has a secret, which the agent that began it knows: requests name it by `ID.SECRET`. The
    trainer may name it by its id. A session that was not begun has no secret: its name is all there is to know, and a
    name of that kind never reaches a trajectory that was begun.
    """

    def __init__(self, most: int, idle_s: float, ledger: NoLedger | None = None, *, room: Room | None = None) -> None:
        self._most, self._idle_s = most, idle_s
        self._ledger = ledger or NO_LEDGER
        self.room = room if room is not None else Room()
        self._sessions: dict[str, Session] = {}
        self._groups: dict[str, Group] = {}
        self._complete: dict[str, Group] = {}
        self._held: dict[str, Session] = {}  # handed out in a batch that was not taken yet
        self._gone: dict[str, Session] = {}
        self._batches: dict[int, _HandedOut] = {}
        self._batch_number = 0  # of the last one made
        first = self._ledger.first_number  # no earlier life has these
        self._numbers, self._group_numbers, self._orders = (itertools.count(first) for _ in range(3))
        self.finished = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Those that are open, or complete and not handed out."""
        return iter(self._sessions.values())

    def get(self, name: str, *, is_trusted: bool = True) -> Session | None:
        """The session that a request names. Raises Forbidden."""
        session = self._known(name)
        if session is not None and is_trusted:
            return session
        if session is None and SECRET_MARK in name:
            trajectory_id, _, secret = name.rpartition(SECRET_MARK)
            session = self._known(trajectory_id) if SECRET.match(secret) else None
            if session is not None and is_secret_of(session, secret):
                return session
        if session is None:
            return self._known(session_key(name, is_begun=False))
        hint = "name it by the `session` that POST /v1/trajectories answered with"
        raise Forbidden(f"trajectory `{session.trajectory_id}` belongs to the agent that began it", hint=hint)

    def open(self, name: str, now_s: float, *, is_trusted: bool = True) -> Session:
        """The session of a request, made if it is new. Raises QueueFull, and RequestRefused if it has finished."""
        session = self.get(name, is_trusted=is_trusted)
        if session is None:
            session = self._add(name, None, "", None, now_s, None)
        if session.finish is not None:
            raise RequestRefused(f"trajectory `{session.trajectory_id}` has finished", hint="begin another one")
        session.touched_s = now_s
        return session

    def begin(
        self,
        trajectory_id: str,
        now_s: float,
        *,
        group: str | None,
        group_size: int,
        task: str,
        seed: int | None,
        secret: str | None = None,
        is_trusted: bool = True,
    ) -> Session:
        """A trajectory to train on; the same words again find the same one. Raises QueueFull, RequestRefused."""
        known = self._known(trajectory_id)
        if known is not None:
            if not is_trusted and not is_secret_of(known, secret or ""):
                what = f"trajectory `{trajectory_id}` was begun before"
                raise Forbidden(what, hint="send the `secret` that it was begun with, or begin another one")
            is_past = known.finish is not None and known.group is None  # whose group is not remembered for ever
            if known.group_id != group and not is_past:
                raise RequestRefused(f"trajectory `{trajectory_id}` belongs to another group: {known.group_id}")
            return known
        if FORK_ID.search(trajectory_id):
            raise RequestRefused(f"`{trajectory_id}` could be the name of another trajectory's branch: no ~NUMBER")
        if self._ledger.has_ended(trajectory_id):
            raise RequestRefused(f"trajectory `{trajectory_id}` has finished", hint="begin another one")
        self._check_room()
        found = self._group_of(group, group_size, task) if group is not None else None
        return self._add(trajectory_id, found, task, seed, now_s, secret or secrets.token_urlsafe(SECRET_BYTES))

    def finish(self, name: str, finish: Finish, now_s: float, *, is_trusted: bool = True) -> Session:
        """Raises KeyError, and RequestRefused if it finished otherwise before."""
        session = self.get(name, is_trusted=is_trusted)
        if session is None:
            raise KeyError(name)
        if session.finish is not None:
            if session.finish != finish:
                raise RequestRefused(f"trajectory `{session.trajectory_id}` has finished with another outcome")
            return session
        session.close(finish)
        session.touched_s = now_s
        self.finished += 1
        group = session.group
        if group is None:
            self._let_go(self._sessions.pop(session.key))
        elif group.is_complete:
            self._complete[group.name] = self._groups.pop(group.name)
            group.close()
            self._ledger.completed(group, next(self._orders))
        return session

    def batch(self, groups: int, after: int) -> Batch | None:
        """The batch after that one, once so many groups are complete.

        Raises RequestRefused for one that cannot be the next: another has not been taken, it was taken before, or the
        one before it was never made.
        """
        if after > self._batch_number:
            what = f"there is no batch {after}: the last one is {self._batch_number}"
            raise RequestRefused(what, hint="is this the gateway that made it, with the same --ledger?")
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

    def restore(self, recalled: RecalledTrajectories) -> None:
        """What an earlier life had."""
        self._sessions = {session.key: session for session in recalled.sessions}
        self._gone = {session.key: session for session in recalled.gone}
        self._batch_number = recalled.batch_number
        batches: dict[int, list[Group]] = {}
        for found in sorted(recalled.groups, key=lambda found: found.completed or 0):
            if found.completed is None:
                self._groups[found.group.name] = found.group
                continue
            found.group.close()
            if found.batch is None:
                self._complete[found.group.name] = found.group
            else:
                batches.setdefault(found.batch, []).append(found.group)
        for number in sorted(batches):
            self._hand_out(number, batches[number])

    def _known(self, key: str) -> Session | None:
        return self._sessions.get(key) or self._held.get(key) or self._gone.get(key)

    def _add(
        self, trajectory_id: str, group: Group | None, task: str, seed: int | None, now_s: float, secret: str | None
    ) -> Session:
        self._check_room()
        session = Session(
            trajectory_id,
            seed_from(trajectory_id) if seed is None else seed,
            now_s,
            group,
            task,
            next(self._numbers),
            self._ledger,
            secret=secret,
            room=self.room,
        )
        self._sessions[session.key] = session
        if group is not None:
            group.members[trajectory_id] = session
        self._ledger.began(session)
        return session

    def _check_room(self) -> None:
        if len(self._sessions) >= self._most:
            raise QueueFull(f"{len(self._sessions)} trajectories are open", hint="finish some", retry_after_s=5.0)

    def _let_go(self, session: Session) -> None:
        """Only how it ended is remembered, for a while: the same outcome again gets the same answer."""
        session.clear()
        self._gone[session.key] = session
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
        batch = Batch(number, tuple(group.finished for group in groups if group.finished is not None))
        self._batches[number] = _HandedOut(batch, groups)
        for group in groups:
            for name in group.members:
                self._held[name] = self._sessions.pop(name)
        return batch
