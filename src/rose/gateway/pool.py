"""The pool of workers: leases, and which weights each worker runs and should run.

Heartbeats renew a worker's lease; a worker whose lease expires is removed, whatever its connection says. Turns run only
on the newest version or one of the `max_staleness` before it. A version is trusted by its name unless both trainer and
worker report a hash; then the hashes must agree. A worker reports its hash a moment after it has swapped its weights:
tokens sampled in between are withheld, and dropped if the hash is wrong. Nothing is lost, since a turn's tokens follow
from its seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rose.api.worker_messages import Heartbeat, Join, Kind, NewVersion, ToAgent, TokensAdded, TurnTokens, VersionReady
from rose.core.fleet_orders import NO_ORDER, WorkerOrder
from rose.core.stalls import ObservedStall
from rose.core.versions import UNKNOWN, VersionDemand
from rose.core.worker_table import WorkerView
from rose.engines.base import Sampling
from rose.errors import RequestRefused, Unavailable

Send = Callable[[ToAgent], None]


@dataclass(slots=True)
class Lease:
    """The worker belongs to the pool until `until_s`. Its number is never used again, in no incarnation."""

    number: int
    until_s: float


@dataclass(slots=True)
class WeightState:
    """The weights that the worker runs, by its own account, and the version that it was asked to load."""

    version: str
    hash: str = ""
    requested: str | None = None
    retry_at_s: float = 0.0  # the request is repeated from then on
    trouble: str = ""
    sync_s: float | None = None  # from publishing its version until the worker ran it
    seconds: dict[str, float] = field(default_factory=dict)  # of loading that version, by phase
    verified: dict[str, bool] = field(default_factory=dict)  # by version whose hash it reported: whether it matched
    withheld: list[TurnTokens] = field(default_factory=list)  # until their version is verified

    @property
    def is_loading(self) -> bool:
        return self.requested not in (None, self.version)


@dataclass(slots=True)
class PlacementState:
    """The turns that are placed on the worker, by attempt id, and whether it may get more."""

    attempt_ids: set[int] = field(default_factory=set)
    progress_s: float = 0.0  # when one of its turns last advanced, or the first was placed
    turns_ended: int = 0
    closed_until_s: float = 0.0
    is_draining: bool = False
    move_to: int | None = None  # the shard that it joins next, once it has no turns
    order: WorkerOrder = NO_ORDER  # of the operator; set by `FleetControls`
    trouble: str = ""


@dataclass(slots=True)
class ProvisioningState:
    """Whether the gateway wants the device, and what it learnt of its usefulness."""

    is_wanted: bool
    requested: bool | None = None  # the state that the device was last asked for
    retry_at_s: float = 0.0
    kv_use: float | None = None  # share of its KV memory that serving uses, smoothed
    best_tok_s: float = 0.0  # slowly forgotten
    usable_s: float = 0.0  # when it last was
    avoided_until_s: float = 0.0


@dataclass(slots=True, eq=False)
class PoolWorker:
    """One connection of one worker."""

    registration: Join
    send: Send
    close: Callable[[], None]
    lease: Lease
    heartbeat: Heartbeat
    gate: ObservedStall  # whether serving blocks admission, over time
    weights: WeightState
    provisioning: ProvisioningState
    placement: PlacementState = field(default_factory=PlacementState)

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def kind(self) -> Kind:
        return self.registration.kind

    @property
    def turns_max(self) -> int:
        """The most turns at once: what the worker can run, or less if its operator limits it."""
        most, limit = self.registration.max_concurrency, self.placement.order.turns_max
        return most if limit is None else min(most, limit)

    @property
    def trouble(self) -> str:
        return self.weights.trouble or self.placement.trouble


def first_heartbeat(join: Join) -> Heartbeat:
    """Return what a registration says of the worker's state, as a heartbeat."""
    return Heartbeat(
        running=0,
        waiting=0,
        kv_used_tokens=0,
        kv_tokens=join.kv_tokens,
        version=join.version,
        gate_open=True,
        hash=join.hash,
        place=join.place,
        is_offered=join.is_offered,
    )


NO_VERSION_YET = "0"  # what devices call the weights that they were started with
STAGING_S = 120.0  # a worker that has not reported on a version for this long is asked again
RETRY_S = 5.0  # between two tries of a version that a worker could not load
VERSIONS_MAX = 1024  # whose order of publishing is remembered
VERIFIED_MAX = 8  # versions per worker whose hash check is remembered; tokens of older ones have long been delivered
WITHHELD_MAX = 1 << 14  # pieces of tokens; a worker reports its hash within a moment of the first token


class Pool:
    """All workers of one gateway, and the versions that were published."""

    def __init__(self, model_name: str, lease_s: float, *, max_staleness: int = 0, first_lease: int = 1) -> None:
        self.max_staleness = max_staleness
        self._model_name, self._lease_s, self._next_lease = model_name, lease_s, first_lease
        self._workers: dict[str, PoolWorker] = {}
        self._published: dict[str, NewVersion] = {}  # oldest first
        self._numbers: dict[str, int] = {}
        self._newest = -1
        self._published_s: dict[str, float] = {}  # versions of this incarnation

    def __iter__(self) -> Iterator[PoolWorker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, name: str) -> PoolWorker | None:
        return self._workers.get(name)

    def has(self, worker: PoolWorker) -> bool:
        """Return whether this very connection is in the pool; another one may have its name by now."""
        return self._workers.get(worker.name) is worker

    # Versions

    @property
    def newest(self) -> NewVersion | None:
        """The version that was published last; None before the first."""
        return next(reversed(self._published.values()), None)

    @property
    def newest_version(self) -> str | None:
        return next(reversed(self._published), None)

    @property
    def versions(self) -> int:
        """Count the versions that were published, over all incarnations that the ledger knows."""
        return self._newest + 1

    @property
    def published(self) -> Sequence[NewVersion]:
        """The versions that turns may run on, oldest first."""
        return list(self._published.values())[-1 - self.max_staleness :]

    @property
    def oldest(self) -> int | None:
        """The number of the oldest version that turns may run on; None before the first was published."""
        return max(0, self._newest - self.max_staleness) if self._published else None

    def was_published(self, version: str) -> bool:
        """Return whether a version of this name is known; the names of the last `VERSIONS_MAX` are."""
        return version in self._numbers

    def is_since(self, version: str, oldest: int | None) -> bool:
        """Return whether a version has this number or was published after it."""
        return oldest is None or self._numbers.get(version, -1) >= oldest

    def demand_of(self, sampling: Sampling) -> VersionDemand | None:
        """Return which weights may sample a request, by numbers as of now; None if any may."""
        if not sampling.demands_version:
            return None
        oldest = sampling.min_weight_version
        return VersionDemand(sampling.weight_version, self._number_of(oldest) if oldest else -math.inf)

    def _number_of(self, version: str) -> float:
        """Return the number of a version, of weights that were never published, or of a version that may yet come."""
        if version in self._numbers:
            return self._numbers[version]
        is_first = version == NO_VERSION_YET or any(worker.weights.version == version for worker in self)
        return -1 if is_first else UNKNOWN

    def allows(self, sampling: Sampling, version: str) -> bool:
        """Return whether weights of this version may sample the request."""
        if not sampling.demands_version:
            return True
        demand = self.demand_of(sampling)
        return demand is None or demand.allows(version, self._numbers.get(version, -1))

    def has_version(self, sampling: Sampling) -> bool:
        """Return whether some worker has weights that turns may run on and that may sample the request."""
        if not sampling.demands_version:
            return True
        return any(self.may_run(worker) and self.allows(sampling, worker.weights.version) for worker in self)

    def is_gone(self, version: str) -> bool:
        """Return whether this version was published and is too old for any turn by now."""
        return version in self._numbers and not self.is_since(version, self.oldest)

    def may_run(self, worker: PoolWorker) -> bool:
        """Return whether the worker's weights are within the staleness bound and match their hash."""
        return self.is_since(worker.weights.version, self.oldest) and not self.has_wrong_hash(worker)

    def lag(self, worker: PoolWorker) -> int:
        """Count the versions published after the worker's; weights that were never published precede all."""
        return self._newest - self._numbers.get(worker.weights.version, -1)

    def has_wrong_hash(self, worker: PoolWorker) -> bool:
        """Return whether the worker's hash is wrong or unknown; a restarted agent loads the weights again to know."""
        known = self._published.get(worker.weights.version)
        return known is not None and bool(known.hash) and known.hash != worker.weights.hash

    def is_verified(self, worker: PoolWorker, version: str) -> bool | None:
        """Return whether the worker's weights of this name are the published ones; None before it reported a hash."""
        known = self._published.get(version)
        return True if known is None or not known.hash else worker.weights.verified.get(version)

    def publish(self, version: NewVersion, now_s: float) -> None:
        """Make this the newest version and ask all workers to load it."""
        self.restore([version])
        self._published_s.setdefault(version.version, now_s)
        for worker in self._workers.values():
            self.request_newest(worker, now_s)

    def restore(self, versions: Sequence[NewVersion]) -> None:
        """Add versions that were published, oldest first."""
        for version in versions:
            if version.version != self.newest_version:
                self._newest += 1
            self._published.pop(version.version, None)
            self._published[version.version] = version
            self._numbers[version.version] = self._newest
        for old in list(self._published)[:-VERSIONS_MAX]:
            del self._published[old], self._numbers[old]
            self._published_s.pop(old, None)

    def request_newest(self, worker: PoolWorker, now_s: float) -> None:
        """Ask a worker to load the newest version, unless it runs or loads it."""
        newest, weights = self.newest, worker.weights
        if newest is None or not self.has(worker):
            return
        if self.has_wrong_hash(worker):
            reason = f"its weights have the hash {weights.hash}" if weights.hash else "it does not know their hash"
            weights.trouble = f"it reports version `{weights.version}`, but {reason}"
        elif weights.version == newest.version:
            return
        if weights.requested == newest.version and now_s < weights.retry_at_s:
            return
        is_same_name = weights.version == newest.version
        weights.requested, weights.retry_at_s = newest.version, now_s + (RETRY_S if is_same_name else STAGING_S)
        worker.send(newest)

    # Workers

    def join(self, join: Join, send: Send, now_s: float, close: Callable[[], None] = lambda: None) -> PoolWorker:
        """Add a worker; the caller sends its welcome and then calls `request_newest`.

        Raises RequestRefused for another model and for a name that is taken.
        """
        if join.model != self._model_name:
            raise RequestRefused(f"worker `{join.name}` runs `{join.model}`, the gateway wants `{self._model_name}`")
        if join.name in self._workers:
            raise RequestRefused(f"a worker named `{join.name}` is here already", hint="give every worker its own name")
        worker = PoolWorker(
            join,
            send,
            close,
            Lease(self._next_lease, now_s + self._lease_s),
            first_heartbeat(join),
            ObservedStall(now_s),
            WeightState(join.version),
            ProvisioningState(is_wanted=join.place == "resident" or not join.is_offered),
        )
        self._next_lease += 1
        self._workers[join.name] = worker
        self._record_weights(worker, join.version, join.hash)
        return worker

    def record_heartbeat(self, worker: PoolWorker, heartbeat: Heartbeat, now_s: float) -> None:
        self._renew(worker, now_s)
        worker.heartbeat = heartbeat
        self._record_weights(worker, heartbeat.version, heartbeat.hash)
        if heartbeat.gate_open:
            worker.gate.on_heartbeat(heartbeat.shut_s, now_s)
        elif worker.gate.blocked_since_s is None:
            worker.gate.on_heartbeat(0.0, now_s)
        self.request_newest(worker, now_s)

    def record_version(self, worker: PoolWorker, ready: VersionReady, now_s: float) -> None:
        """Record that a worker runs a version, or why it could not load it."""
        self._renew(worker, now_s)
        weights = worker.weights
        if ready.fault is not None:
            weights.trouble = f"version `{ready.version}`: {ready.fault.what}"
            weights.retry_at_s = now_s + RETRY_S
            return
        if ready.seconds:  # else the worker ran it already
            published_s = self._published_s.get(ready.version)
            weights.sync_s = now_s - published_s if published_s is not None else None
            weights.seconds = ready.seconds
        self._record_weights(worker, ready.version, ready.hash)
        weights.trouble = ""
        self.request_newest(worker, now_s)

    def view(self, worker: PoolWorker) -> WorkerView:
        """Return the worker as the router sees it."""
        heartbeat, gate = worker.heartbeat, worker.gate
        return WorkerView(
            name=worker.name,
            is_dedicated=worker.kind == "dedicated",
            is_open=self.accepts_turns(worker) and worker.provisioning.is_wanted and self.may_run(worker),
            max_concurrency=worker.turns_max,
            kv_tokens=heartbeat.kv_tokens,
            closed_until_s=worker.placement.closed_until_s,
            prefill_tok_s=heartbeat.prefill_tok_s,
            decode_tok_s=heartbeat.decode_tok_s,
            slack_s=heartbeat.slack_s,
            blocked_since_s=gate.blocked_since_s,
            version=worker.weights.version,
            opened_s=gate.opened_s,
            version_number=self._numbers.get(worker.weights.version, -1),
        )

    @staticmethod
    def accepts_turns(worker: PoolWorker) -> bool:
        """Return whether worker, owner and operator allow turns, whatever the weights."""
        heartbeat = worker.heartbeat
        is_ready = heartbeat.gate_open and heartbeat.place == "resident"
        placement = worker.placement
        return is_ready and heartbeat.is_offered and not placement.is_draining and placement.order.state == "lending"

    def expired(self, now_s: float) -> list[PoolWorker]:
        return [worker for worker in self._workers.values() if now_s > worker.lease.until_s]

    def renew_all(self, now_s: float) -> None:
        """Renew every lease after the gateway itself stood still."""
        for worker in self._workers.values():
            worker.lease.until_s = max(worker.lease.until_s, now_s + self._lease_s)

    def remove(self, worker: PoolWorker) -> bool:
        """Remove a worker. Return False if it is gone already or another connection has its name."""
        if not self.has(worker):
            return False
        del self._workers[worker.name]
        return True

    def _renew(self, worker: PoolWorker, now_s: float) -> None:
        worker.lease.until_s = now_s + self._lease_s

    def _record_weights(self, worker: PoolWorker, version: str, weights_hash: str) -> None:
        weights, known = worker.weights, self._published.get(version)
        weights.version, weights.hash = version, weights_hash
        if known is not None and known.hash and weights_hash:
            weights.verified.pop(version, None)
            weights.verified[version] = weights_hash == known.hash
            for old in list(weights.verified)[:-VERIFIED_MAX]:
                del weights.verified[old]

    # Tokens whose weights are not verified yet

    def checked_tokens(self, worker: PoolWorker, tokens: TokensAdded) -> TokensAdded:
        """Return the pieces whose weights can be judged now; withhold the others. Raises Unavailable if too many."""
        withheld = worker.weights.withheld
        versions = {piece.version for piece in tokens.pieces if piece.token_ids}  # nearly always one
        if not withheld and all(self.is_verified(worker, version) is not None for version in versions):
            return tokens
        passed, waiting = [], {piece.attempt_id for piece in withheld}
        for piece in tokens.pieces:
            if piece.attempt_id in waiting or not self._can_judge(worker, piece):
                waiting.add(piece.attempt_id)
                withheld.append(piece)
                if len(withheld) > WITHHELD_MAX:
                    raise Unavailable(f"{WITHHELD_MAX} pieces of tokens wait for the hash of their weights")
            else:
                passed.append(piece)
        return TokensAdded(tuple(passed))

    def release_tokens(self, worker: PoolWorker) -> TokensAdded:
        """Return the withheld pieces that can be judged by now, in the order in which they came."""
        pieces, worker.weights.withheld = worker.weights.withheld, []
        return self.checked_tokens(worker, TokensAdded(tuple(pieces)))

    def _can_judge(self, worker: PoolWorker, piece: TurnTokens) -> bool:
        return not piece.token_ids or self.is_verified(worker, piece.version) is not None
