"""The members of the pool: devices whose agents have joined, each believed for as long as it says how it is.

A member holds a lease, numbered once and for ever, that every heartbeat renews; when it runs out the member is gone,
whatever its connection says, its turns go elsewhere, and what it still says of them is not heard. Weights are
reconciled, not commanded once: whenever a member shows other weights than the published ones, because it just joined or
its engine was restarted, it is told again.

Turns are placed only on members whose version is within the bound: the published one, or one of the `max_staleness`
before it. A version is believed by its name, unless both the trainer and the member tell a hash: then they must agree,
and a member whose weights are not what it says gets no turns, and the pool says why. Nor are tokens of a version taken
from a member before it has told that version's hash (`rollout.proof`).

A member may be here and not wanted (`rollout.provisioning`), or be held back by its owner: then, too, it gets no turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rose.core.gates import GateSeen
from rose.core.router import WorkerView
from rose.errors import RequestRefused
from rose.rollout.messages import Beat, Join, Kind, NewVersion, Piece, Place, ToAgent, VersionReady

STAGING_S = 120.0  # a member that has not said a word about a version for this long is told again
RETRY_S = 5.0  # between two tries of a version that a member could not take
VERSIONS_MAX = 1024  # of which it is known in which order they were published
PROVED_MAX = 8  # versions that a member is remembered to have proved; tokens of older ones are long told

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
    lease: int = 0
    hash: str = ""
    gate_open: bool = True  # by its owner, its circuit breaker and its engine; serving shuts it for moments
    gate: GateSeen = field(default_factory=GateSeen)
    draining: bool = False
    closed_until_s: float = 0.0
    told_version: str | None = None
    tell_again_s: float = 0.0
    trouble: str = ""
    beat: Beat | None = None
    place: Place = "resident"  # of the rollout model, on the device
    is_offered: bool = True  # by its owner
    is_wanted: bool = True  # by the gateway; this and the next two are kept by its provisioning
    told_wanted: bool | None = None
    tell_wanted_s: float = 0.0
    sync_s: float | None = None  # from the publishing of its version until it ran here
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, of taking that version
    proved: dict[str, bool] = field(default_factory=dict)  # versions whose hash it told: whether it is the right one
    withheld: list[Piece] = field(default_factory=list)  # until their version is proved
    tickets: set[int] = field(default_factory=set)  # kept by the scheduler, like the three below
    progress_s: float = 0.0  # when one of its turns last got on, or the first was placed
    tokens_held: int = 0
    turns_ended: int = 0
    close: Callable[[], None] = lambda: None

    @property
    def is_taking(self) -> bool:
        """It was told of a version that it does not run yet."""
        return self.told_version not in (None, self.version)


class Pool:
    """`wanted` is the version that was published last; None before the first."""

    def __init__(self, model_name: str, lease_s: float, *, max_staleness: int = 0, first_lease: int = 1) -> None:
        self.max_staleness = max_staleness
        self._model_name, self._lease_s, self._next_lease = model_name, lease_s, first_lease
        self._members: dict[str, Member] = {}
        self._published: dict[str, NewVersion] = {}  # oldest first
        self._numbers: dict[str, int] = {}
        self._newest = -1
        self._published_s: dict[str, float] = {}  # of those of this life

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def has(self, member: Member) -> bool:
        """Whether this very member is still here; another may have its name by now."""
        return self._members.get(member.name) is member

    # Versions

    @property
    def wanted(self) -> NewVersion | None:
        return next(reversed(self._published.values()), None)

    @property
    def wanted_version(self) -> str | None:
        return next(reversed(self._published), None)

    @property
    def published(self) -> Sequence[NewVersion]:
        """Those that turns may run on, oldest first."""
        return list(self._published.values())[-1 - self.max_staleness :]

    @property
    def oldest(self) -> int | None:
        """The number of the oldest version that turns may run on; None before the first was published."""
        return max(0, self._newest - self.max_staleness) if self._published else None

    def is_since(self, version: str, oldest: int | None) -> bool:
        """Whether a version is that with this number or was published after it."""
        return oldest is None or self._numbers.get(version, -1) >= oldest

    def may_run(self, member: Member) -> bool:
        """Whether its weights are within the bound, and are what it says they are."""
        return self.is_since(member.version, self.oldest) and not self.is_lying(member)

    def lag(self, member: Member) -> int:
        """How many published versions there are after the one it runs; weights that nobody published are before all."""
        return self._newest - self._numbers.get(member.version, -1)

    def is_lying(self, member: Member) -> bool:
        """Or does not know: an agent that was started anew takes the weights again, and then it does."""
        known = self._published.get(member.version)
        return known is not None and bool(known.hash) and known.hash != member.hash

    def is_proved(self, member: Member, version: str) -> bool | None:
        """Whether the member's weights of this name are the published ones; None while it has not said."""
        known = self._published.get(version)
        return True if known is None or not known.hash else member.proved.get(version)

    def publish(self, version: NewVersion, now_s: float) -> None:
        """A new version of the weights, for all members here and those to come."""
        self.restore([version])
        self._published_s.setdefault(version.version, now_s)
        for member in self._members.values():
            self.catch_up(member, now_s)

    def restore(self, versions: Sequence[NewVersion]) -> None:
        """Versions that were published, oldest first."""
        for version in versions:
            if version.version != self.wanted_version:
                self._newest += 1
            self._published.pop(version.version, None)
            self._published[version.version] = version
            self._numbers[version.version] = self._newest
        for old in list(self._published)[:-VERSIONS_MAX]:
            del self._published[old], self._numbers[old]
            self._published_s.pop(old, None)

    def catch_up(self, member: Member, now_s: float) -> None:
        """Tell a member of the published version, unless it runs that or is taking it."""
        wanted = self.wanted
        if wanted is None or not self.has(member):
            return
        if self.is_lying(member):
            found = f"its weights are others (hash {member.hash})" if member.hash else "not what the weights' hash is"
            member.trouble = f"it says version `{member.version}`, but {found}"
        elif member.version == wanted.version:
            return
        if member.told_version == wanted.version and now_s < member.tell_again_s:
            return
        is_lying = member.version == wanted.version
        member.told_version, member.tell_again_s = wanted.version, now_s + (RETRY_S if is_lying else STAGING_S)
        member.send(wanted)

    # Members

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
            lease=self._next_lease,
            hash=join.hash,
            gate=GateSeen(now_s),
            place=join.place,
            is_offered=join.is_offered,
            is_wanted=join.place == "resident" or not join.is_offered,
        )
        self._next_lease += 1
        self._members[join.name] = member
        self._runs(member, join.version, join.hash)
        return member

    def heard(self, member: Member, beat: Beat, now_s: float) -> None:
        member.lease_until_s = now_s + self._lease_s
        member.beat = beat
        self._runs(member, beat.version, beat.hash)
        member.kv_tokens, member.place, member.is_offered = beat.kv_tokens, beat.place, beat.is_offered
        if beat.gate_open and not member.gate_open:
            member.closed_until_s = min(member.closed_until_s, now_s)  # what it refused before is over
        member.gate_open = beat.gate_open
        if beat.gate_open:
            member.gate.told(beat.shut_s, now_s)
        elif member.gate.gated_since_s is None:
            member.gate.told(0.0, now_s)
        self.catch_up(member, now_s)

    def version_ready(self, member: Member, ready: VersionReady, now_s: float) -> None:
        member.lease_until_s = now_s + self._lease_s
        if ready.fault is None:
            if ready.seconds:  # else it says only that it runs them already
                published_s = self._published_s.get(ready.version)
                member.sync_s = now_s - published_s if published_s is not None else None
                member.seconds = ready.seconds
            self._runs(member, ready.version, ready.hash)
            member.trouble = ""
            self.catch_up(member, now_s)
        else:
            member.trouble = f"version `{ready.version}`: {ready.fault.what}"
            member.tell_again_s = now_s + RETRY_S

    def view(self, member: Member) -> WorkerView:
        beat = member.beat
        return WorkerView(
            name=member.name,
            is_dedicated=member.kind == "dedicated",
            is_open=self.takes_turns(member) and member.is_wanted and self.may_run(member),
            seats=member.seats,
            kv_tokens=member.kv_tokens,
            closed_until_s=member.closed_until_s,
            prefill_tok_s=beat.prefill_tok_s if beat is not None else None,
            decode_tok_s=beat.decode_tok_s if beat is not None else None,
            slack_s=beat.slack_s if beat is not None else None,
            gated_since_s=member.gate.gated_since_s,
            version=member.version,
            opened_s=member.gate.opened_s,
        )

    @staticmethod
    def takes_turns(member: Member) -> bool:
        """By its own account, its owner's and its operator's, whatever its weights."""
        return member.gate_open and member.is_offered and member.place == "resident" and not member.draining

    def expired(self, now_s: float) -> list[Member]:
        return [member for member in self._members.values() if now_s > member.lease_until_s]

    def renew(self, now_s: float) -> None:
        """It was the gateway that heard nothing: every lease begins anew."""
        for member in self._members.values():
            member.lease_until_s = max(member.lease_until_s, now_s + self._lease_s)

    def remove(self, member: Member) -> bool:
        """False if it is gone already, or another has its name."""
        if not self.has(member):
            return False
        del self._members[member.name]
        return True

    def _runs(self, member: Member, version: str, weights_hash: str) -> None:
        member.version, member.hash = version, weights_hash
        known = self._published.get(version)
        if known is not None and known.hash and weights_hash:
            member.proved.pop(version, None)
            member.proved[version] = weights_hash == known.hash
            for old in list(member.proved)[:-PROVED_MAX]:
                del member.proved[old]
