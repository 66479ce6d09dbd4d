"""The members of the pool: devices whose agents have joined, each believed for as long as it says how it is.

A member holds a lease that every heartbeat renews; when it runs out the member is gone, whatever its connection says,
and its turns go elsewhere. Weights are reconciled, not commanded once: whenever a member shows another version than the
published one, because it just joined or its engine was restarted, it is told again. Turns are placed only on members
that run the published version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rose.core.router import WorkerView
from rose.errors import RequestRefused
from rose.rollout.messages import Beat, Join, Kind, NewVersion, ToAgent, VersionReady

STAGING_S = 120.0  # a member that has not said a word about a version for this long is told again
RETRY_S = 5.0  # between two tries of a version that a member could not take

Send = Callable[[ToAgent], None]


@dataclass(slots=True, eq=False)
class Member:
    """One connection of one device's agent."""

    name: str
    kind: Kind
    version: str
    seats: int
    kv_tokens: int
    context_tokens: int
    send: Send
    lease_until_s: float
    joined_s: float
    gate_open: bool = True
    draining: bool = False
    closed_until_s: float = 0.0
    told_version: str | None = None
    tell_again_s: float = 0.0
    trouble: str = ""
    beat: Beat | None = None
    tickets: set[int] = field(default_factory=set)  # kept by the scheduler, like the two below
    tokens_held: int = 0
    turns_ended: int = 0
    close: Callable[[], None] = lambda: None

    def view(self, wanted: str | None) -> WorkerView:
        return WorkerView(
            name=self.name,
            is_dedicated=self.kind == "dedicated",
            is_open=self.gate_open and not self.draining and wanted in (None, self.version),
            turns=len(self.tickets),
            seats=self.seats,
            tokens_held=self.tokens_held,
            kv_tokens=self.kv_tokens,
            closed_until_s=self.closed_until_s,
        )


class Pool:
    """`wanted` is the version that was published last; None before the first."""

    def __init__(self, model_name: str, lease_s: float) -> None:
        self.wanted: NewVersion | None = None
        self._model_name, self._lease_s = model_name, lease_s
        self._members: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    @property
    def wanted_version(self) -> str | None:
        return self.wanted.version if self.wanted is not None else None

    def views(self) -> list[WorkerView]:
        wanted = self.wanted_version
        return [member.view(wanted) for member in self._members.values()]

    def join(self, join: Join, send: Send, now_s: float) -> Member:
        """Raises RequestRefused for a name that is taken or another model. To be followed by `catch_up`."""
        if join.model != self._model_name:
            raise RequestRefused(f"worker `{join.name}` runs `{join.model}`, the gateway wants `{self._model_name}`")
        if join.name in self._members:
            raise RequestRefused(f"a worker named `{join.name}` is here already", hint="give every worker its own name")
        member = Member(
            join.name,
            join.kind,
            join.version,
            join.seats,
            join.kv_tokens,
            join.context_tokens,
            send,
            lease_until_s=now_s + self._lease_s,
            joined_s=now_s,
        )
        self._members[join.name] = member
        return member

    def heard(self, member: Member, beat: Beat, now_s: float) -> None:
        member.lease_until_s = now_s + self._lease_s
        member.beat = beat
        member.version, member.gate_open, member.kv_tokens = beat.version, beat.gate_open, beat.kv_tokens
        self.catch_up(member, now_s)

    def version_ready(self, member: Member, ready: VersionReady, now_s: float) -> None:
        member.lease_until_s = now_s + self._lease_s
        if ready.fault is None:
            member.version, member.trouble = ready.version, ""
            self.catch_up(member, now_s)
        else:
            member.trouble = f"version `{ready.version}`: {ready.fault.what}"
            member.tell_again_s = now_s + RETRY_S

    def publish(self, version: NewVersion, now_s: float) -> None:
        """A new version of the weights, for all members here and those to come."""
        self.wanted = version
        for member in self._members.values():
            self.catch_up(member, now_s)

    def catch_up(self, member: Member, now_s: float) -> None:
        """Tell a member of the published version, unless it runs that or is taking it."""
        wanted = self.wanted
        if wanted is None or member.version == wanted.version:
            return
        if member.told_version == wanted.version and now_s < member.tell_again_s:
            return
        member.told_version, member.tell_again_s = wanted.version, now_s + STAGING_S
        member.send(wanted)

    def expired(self, now_s: float) -> list[Member]:
        return [member for member in self._members.values() if now_s > member.lease_until_s]

    def remove(self, member: Member) -> bool:
        """False if it is gone already, or another has its name."""
        if self._members.get(member.name) is not member:
            return False
        del self._members[member.name]
        return True
