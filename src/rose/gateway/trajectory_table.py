"""Trajectories, their groups, and the batches of complete groups that the trainer takes.

Each trajectory finishes once, and each group is handed out once. A group is complete when all its trajectories have
finished. Batches are numbered from 1; the trainer confirms the one that it has (`after`), and until then the next one
is handed out as often as it is asked for. Everything that happens here is noted in the ledger, and clients get only
what the ledger has.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rose.api.trajectories import SECRET_BYTES, SECRET_MARK, SECRET_PATTERN, Batch, FinishedGroup
from rose.core.trajectory import Trajectory
from rose.errors import QueueFull, RequestRefused
from rose.gateway.ledger import NO_LEDGER, NoLedger
from rose.gateway.sessions import Finish, MemoryLimit, Session, branches, is_secret_of, seed_from, session_key

REMEMBERED_MAX = 10_000  # trajectories whose outcome is kept after they were handed out
RECORD_TOKEN_BYTES = 80  # about, of one token of a finished trajectory in memory
SECRET = re.compile(SECRET_PATTERN)
FORK_ID = re.compile(r"~[0-9]+\Z")  # the end of the name of a trajectory's further branch


@dataclass(slots=True, eq=False)
class Group:
    """The trajectories of one task, which are compared with each other."""

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
        """Build what is handed out, and forget the turns: one group at a time, so that no batch is long work."""
        records: list[Trajectory] = []
        lost = 0
        for member in self.members.values():
            assert member.finish is not None
            found = [] if member.finish.is_lost else branches(member, self.name)
            records += found
            lost += not found
            member.clear()
            member.grow(RECORD_TOKEN_BYTES * sum(len(record.token_ids) for record in found))
        self.finished = FinishedGroup(self.name, self.task, tuple(records), lost)

    def clear(self) -> None:
        """Forget what was handed out: sessions whose outcome is kept need the group's name only."""
        self.finished, self.members = None, {}


RecoveredGroup = tuple[Group, int | None, int | None]
"""A group of the ledger, its place among the complete ones, and the number of the batch that it was handed out in."""


class Forbidden(RequestRefused):
    """The trajectory belongs to another agent."""


class Trajectories:
    """All trajectories of one gateway.

    A trajectory that was begun has a secret, known to the agent that began it: requests name it by `ID.SECRET`. The
    trainer may name it by its id. A session that was not begun has no secret: its name is all that a client needs, and
    such a name never addresses a trajectory that was begun.
    """

    def __init__(
        self, most: int, idle_s: float, ledger: NoLedger | None = None, *, room: MemoryLimit | None = None
    ) -> None:
        self._most, self._idle_s = most, idle_s
        self._ledger = ledger or NO_LEDGER
        self.room = room if room is not None else MemoryLimit()
        self._sessions: dict[str, Session] = {}
        self._groups: dict[str, Group] = {}
        self._complete: dict[str, Group] = {}
        self._held: dict[str, Session] = {}  # handed out in a batch that is not confirmed yet
        self._gone: dict[str, Session] = {}
        self._batches: dict[int, tuple[Batch, list[Group]]] = {}  # handed out and not confirmed
        self._batch_number = 0  # of the newest one
        first = self._ledger.first_number  # no other incarnation has these
        self._numbers, self._group_numbers, self._orders = (itertools.count(first) for _ in range(3))
        self.finished = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the sessions that are open, or finished and not handed out."""
        return iter(self._sessions.values())

    def newest(self, count: int) -> list[Session]:
        """Return the newest sessions that are held, the latest first, also of batches that are not confirmed."""
        held = itertools.islice(reversed(self._held.values()), count)
        return [*itertools.islice(reversed(self._sessions.values()), count), *held][:count]

    @property
    def last_batch(self) -> int:
        """Return the number of the newest batch, 0 before the first."""
        return self._batch_number

    @property
    def last_groups(self) -> int:
        """Return how many groups the newest batch has, 0 once it is confirmed."""
        return len(self._batches[self._batch_number][1]) if self._batch_number in self._batches else 0

    @property
    def complete_groups(self) -> int:
        """Return how many complete groups are in no batch yet."""
        return len(self._complete)

    def get(self, name: str, *, is_trusted: bool = True) -> Session | None:
        """Return the session that a request names, or None. Raises Forbidden."""
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
        """Return the session of a request, new or known. Raises QueueFull, and RequestRefused if it has finished."""
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
        group: str | None = None,
        group_size: int = 1,
        task: str = "",
        seed: int | None = None,
        secret: str | None = None,
        is_trusted: bool = True,
    ) -> Session:
        """Begin a trajectory to train on; a repeated call finds it. Raises QueueFull, RequestRefused, Unavailable."""
        self._ledger.check()
        known = self._known(trajectory_id)
        if known is not None:
            if not is_trusted and not is_secret_of(known, secret or ""):
                what = f"trajectory `{trajectory_id}` was begun before"
                raise Forbidden(what, hint="send the `secret` that it was begun with, or begin another one")
            is_past = known.finish is not None and known.group is None  # its group is not kept for ever
            if known.group_id != group and not is_past:
                raise RequestRefused(f"trajectory `{trajectory_id}` belongs to another group: {known.group_id}")
            return known
        if FORK_ID.search(trajectory_id):
            raise RequestRefused(f"`{trajectory_id}` could be the name of another trajectory's branch: no ~NUMBER")
        if self._ledger.has_ended(trajectory_id):
            raise RequestRefused(f"trajectory `{trajectory_id}` has finished", hint="begin another one")
        self._check_room()
        member_of = self._group_of(group, group_size, task) if group is not None else None
        return self._add(trajectory_id, member_of, task, seed, now_s, secret or secrets.token_urlsafe(SECRET_BYTES))

    def finish(self, name: str, finish: Finish, now_s: float, *, is_trusted: bool = True) -> Session:
        """Finish a trajectory. Raises KeyError, and RequestRefused if it finished with another outcome before."""
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
            self._keep_outcome(self._sessions.pop(session.key))
        elif group.is_complete:
            self._complete[group.name] = self._groups.pop(group.name)
            group.close()
            self._ledger.complete_group(group, next(self._orders))
        return session

    def batch(self, groups: int, after: int) -> Batch | None:
        """Return the batch after that one, once so many groups are complete (0: an empty batch); until then None.

        Raises Unavailable, and RequestRefused for a batch that cannot be the next: another is not confirmed, it was
        confirmed before, or the one before it was never made.
        """
        self._ledger.check()
        if after > self._batch_number:
            what = f"there is no batch {after}: the last one is {self._batch_number}"
            raise RequestRefused(what, hint="is this the gateway that made it, with the same --ledger?")
        for number in [number for number in self._batches if number <= after]:
            self._confirm(self._batches.pop(number)[1])
        if after + 1 in self._batches:
            return self._batches[after + 1][0]
        if self._batches:
            waiting = min(self._batches)
            raise RequestRefused(f"batch {waiting} has not been taken", hint=f"ask for it with after={waiting - 1}")
        if after < self._batch_number:
            what = f"batch {after + 1} was taken before"
            raise RequestRefused(what, hint=f"ask for the next one with after={self._batch_number}")
        if len(self._complete) < groups:
            return None
        chosen = [self._complete.pop(name) for name in list(itertools.islice(self._complete, groups))]
        self._batch_number += 1
        self._ledger.add_batch(self._batch_number, chosen)
        return self._hand_out(self._batch_number, chosen)

    def idle(self, now_s: float) -> list[Session]:
        """Return the trajectories that no client has used for long."""
        return [
            session
            for session in self._sessions.values()
            if session.finish is None and now_s - session.touched_s > self._idle_s
        ]

    def restore(
        self,
        sessions: Iterable[Session],
        gone: Iterable[Session],
        groups: Iterable[RecoveredGroup],
        batch_number: int,
        empty_batch: int = 0,
    ) -> None:
        """Continue with what an earlier incarnation had. Of the sessions in `gone` only the outcome is known."""
        self._sessions = {session.key: session for session in sessions}
        self._gone = {session.key: session for session in gone}
        self._batch_number = batch_number
        batches: dict[int, list[Group]] = {}
        for group, completed, batch in sorted(groups, key=lambda known: known[1] or 0):
            if completed is None:
                self._groups[group.name] = group
                continue
            group.close()
            if batch is None:
                self._complete[group.name] = group
            else:
                batches.setdefault(batch, []).append(group)
        if batch_number and batch_number == empty_batch:
            batches[batch_number] = []  # perhaps confirmed before, which changes nothing
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
        self._ledger.add_session(session)
        return session

    def _check_room(self) -> None:
        if len(self._sessions) >= self._most:
            raise QueueFull(f"{len(self._sessions)} trajectories are open", hint="finish some", retry_after_s=5.0)

    def _keep_outcome(self, session: Session) -> None:
        """Keep only the outcome, for a while: the same outcome again gets the same answer."""
        session.clear()
        self._gone[session.key] = session
        self._ledger.drop_turns(session)
        if len(self._gone) > REMEMBERED_MAX:
            oldest = self._gone.pop(next(iter(self._gone)))
            oldest.group = None
            self._ledger.drop_session(oldest)

    def _confirm(self, groups: Sequence[Group]) -> None:
        """Forget groups that the trainer has."""
        for group in groups:
            self._ledger.drop_group(group)
            for name in group.members:
                self._keep_outcome(self._held.pop(name))
            group.clear()

    def _group_of(self, name: str, size: int, task: str) -> Group:
        group = self._groups.get(name)
        if name in self._complete or (group is not None and len(group.members) >= group.size):
            raise RequestRefused(f"group `{name}` has all its members", hint="give every group its own name")
        if group is None:
            group = self._groups[name] = Group(name, size, task, next(self._group_numbers))
            self._ledger.add_group(group)
        if group.size != size:
            raise RequestRefused(f"group `{name}` has size {group.size}, not {size}")
        return group

    def _hand_out(self, number: int, groups: list[Group]) -> Batch:
        batch = Batch(number, tuple(group.finished for group in groups if group.finished is not None))
        self._batches[number] = batch, groups
        for group in groups:
            for name in group.members:
                self._held[name] = self._sessions.pop(name)
        return batch
