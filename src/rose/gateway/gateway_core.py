"""The gateway's core: every decision of the gateway, without sockets, tasks or a clock.

`GatewayCore` joins the pool of workers, the scheduler, provisioning, trajectories and the ledger. Each call gets the
time as an argument. Output goes to workers through their `send`, to readers through their token stream, and to the
ledger. Readers are told only what `commit` has made durable. The gateway calls the core from its event loop, the
simulator from a virtual one.

`tick` is called a few times a second. A gap between two ticks means that the gateway stood still, not its workers, so
leases and turns get their time again. A core that is given the ledger of an earlier incarnation continues where that
one ended, and runs unfinished turns again.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rose.api.worker_messages import Heartbeat, Join, NewVersion, ToGateway, TokensAdded, TurnRefused, VersionReady
from rose.bounds import INT32_MAX
from rose.config.server_settings import GatewaySettings
from rose.core.provision import ProvisionRules
from rose.core.router import Router
from rose.core.stalls import Stalls
from rose.engines.base import Request, Sampling
from rose.engines.token_stream import TokenSink
from rose.errors import Unavailable
from rose.gateway.crash_recovery import recover
from rose.gateway.fleet_controls import FleetControls
from rose.gateway.ledger import Ledger, NoLedger
from rose.gateway.pool import NO_VERSION_YET, Pool, PoolWorker, Send
from rose.gateway.provisioning import Provisioning
from rose.gateway.rebalancer import Rebalancer
from rose.gateway.sessions import MIB, Finish, KeptTurn, MemoryLimit, Session
from rose.gateway.shard_moves import ShardMoves
from rose.gateway.trajectory_table import Trajectories
from rose.gateway.turn_scheduler import Scheduler

TICK_S, TICK_S_MIN = 0.25, 0.005
STOOD_STILL_S = 1.0  # between two ticks
DEVICES_MAX = 1 << 20  # where the user sets no cap
HOLD_S = 15.0  # for what borrowing a device costs: weights that are behind, prefixes that are cached nowhere
REST_S = 2.0  # a few heartbeats: what a device reports is fresh again


class GatewayCore:
    """The state machine. `on_news` is called when a group may be complete or a worker has loaded a version;
    `on_change` when the pool has changed.
    """

    def __init__(
        self,
        model: str,
        settings: GatewaySettings,
        ledger: NoLedger | None = None,
        *,
        vocabulary: int = INT32_MAX,
        now_s: float = 0.0,
    ) -> None:
        self.on_news: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self.ledger = ledger = ledger if ledger is not None else NoLedger()
        first = ledger.first_number
        self.pool = Pool(model, settings.lease_s, max_staleness=settings.max_staleness, first_lease=first)
        self._router, stalls = Router(settings.router, blocked_patience_s=settings.gated_s), Stalls()
        self.scheduler = Scheduler(
            self.pool,
            waiting_max=settings.max_waiting,
            wait_s=settings.wait_s,
            version_wait_s=settings.version_wait_s,
            router=self._router,
            stalls=stalls,
            first_attempt_id=first,
            vocabulary=vocabulary,
        )
        self._rebalancer = Rebalancer(self.pool, self.scheduler, self._router, stalls)
        self.provisioning = Provisioning(
            self.pool, self.scheduler, self._router, provision_rules(settings), first_number=first, began_s=now_s
        )
        self.fleet = FleetControls(self.pool, self.scheduler, self.provisioning, ledger)
        self.shard_moves = ShardMoves(self.pool, self.scheduler, settings)
        room = MemoryLimit(settings.max_kept_mb * MIB, settings.max_session_mb * MIB)
        self.trajectories = Trajectories(settings.max_trajectories, settings.idle_s, ledger, room=room)
        self._ticked_s = now_s
        if isinstance(ledger, Ledger):
            for unfinished in recover(ledger, self.pool, self.trajectories, now_s):
                ledger.adopt(unfinished.turn, unfinished.under_way)
                trajectory_id = unfinished.session.trajectory_id
                self._run(unfinished.turn, unfinished.request, trajectory_id, now_s, is_recovered=True)

    # Workers

    def join(self, join: Join, send: Send, now_s: float) -> PoolWorker:
        """Add a worker. Raises RequestRefused for a name that is taken and for another model."""
        worker = self.pool.join(join, send, now_s)
        self.on_joined(worker, now_s)
        return worker

    def on_joined(self, worker: PoolWorker, now_s: float) -> None:
        self.fleet.on_joined(worker)
        self.pool.request_newest(worker, now_s)
        self._on_worker_change(worker, now_s)

    def receive(self, worker: PoolWorker, message: ToGateway, now_s: float) -> None:
        """Handle a message of a worker, unless its lease has expired. Raises Unavailable for impossible tokens."""
        self._notice_gap(now_s)
        if now_s > worker.lease.until_s:
            self.remove_worker(worker, now_s)
        if not self.pool.has(worker):
            self.scheduler.counts.late += len(message.pieces) if isinstance(message, TokensAdded) else 0
            return
        match message:
            case TokensAdded():
                self.scheduler.receive_tokens(worker, self.pool.checked_tokens(worker, message), now_s)
            case TurnRefused():
                self.scheduler.receive_refusal(worker, message, now_s)
            case Heartbeat():
                if message.gate_open and not worker.heartbeat.gate_open:
                    self.scheduler.reopen_worker(worker, now_s)
                self.pool.record_heartbeat(worker, message, now_s)
                self._on_worker_change(worker, now_s)
                self._release_tokens(worker, now_s)
            case VersionReady():
                if message.fault is None:
                    self.scheduler.clear_trouble(worker)
                self.pool.record_version(worker, message, now_s)
                self._on_worker_change(worker, now_s)
                self._release_tokens(worker, now_s)
                self.on_news()

    def remove_worker(self, worker: PoolWorker, now_s: float) -> None:
        """Remove a worker whose connection ended or whose lease expired; nothing happens if it is gone already."""
        if self.pool.remove(worker):
            worker.close()
            self.provisioning.remove_worker(worker, now_s)
            self.scheduler.remove_worker(worker, now_s)
            self.on_change()
            self.on_news()

    def _on_worker_change(self, worker: PoolWorker, now_s: float) -> None:
        self.on_change()
        self.scheduler.update_worker(worker, now_s)
        self.provisioning.on_worker_change(worker, now_s)

    def _release_tokens(self, worker: PoolWorker, now_s: float) -> None:
        if worker.weights.withheld:
            self.scheduler.receive_tokens(worker, self.pool.release_tokens(worker), now_s)

    # Trainers and environments

    def publish(self, version: NewVersion, now_s: float) -> None:
        """Publish a version to all workers. Raises Unavailable."""
        self.ledger.check()
        self.pool.publish(version, now_s)
        self.ledger.set_versions(self.pool.published)
        for worker in self.pool:
            self._on_worker_change(worker, now_s)
        self.on_change()

    def ask(
        self,
        trajectory_id: str,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        reader: TokenSink,
        now_s: float,
        *,
        seed: int | None = None,
        whole: bool = True,
    ) -> KeptTurn:
        """Read a turn, new or repeated, by what was asked. Raises QueueFull, RequestRefused, Unavailable."""
        session = self.trajectories.open(trajectory_id, now_s)
        turn, turn_seed = session.turn_of(prompt_ids, sampling, seed)
        request = Request(self.next_try(turn), prompt_ids, msgspec.structs.replace(sampling, seed=turn_seed))
        self.turn(turn, request, reader, now_s, affinity=trajectory_id, whole=whole)
        return turn

    @staticmethod
    def next_try(turn: KeptTurn) -> str:
        """Return the id of one more request for this turn."""
        turn.tries += 1
        return f"{turn.key}#{turn.tries - 1}"

    def turn(
        self, turn: KeptTurn, request: Request, reader: TokenSink, now_s: float, *, affinity: str, whole: bool
    ) -> None:
        """Add a reader to a turn, and run the turn unless it runs or has ended.

        A reader that wants it `whole` gets nothing before the turn has ended.
        """
        self.ledger.check()
        if turn.finish_reason is not None or not whole:
            turn.replay(request.request_id, reader, self.version)
        if turn.finish_reason is not None:
            return
        if not turn.is_running:
            if not turn.is_kept:
                raise Unavailable("this turn was given up just now; send the request again")
            self._run(turn, request, affinity, now_s)
        (turn.waiters if whole else turn.readers)[request.request_id] = reader

    def cut(self, turn: KeptTurn, tokens: int, now_s: float) -> None:
        """End a turn whose text met a stop string, which the engine knows nothing of."""
        if turn.is_running:
            self.scheduler.cancel([turn.run_id], now_s)
        turn.cut(tokens)

    def finish(self, name: str, finish: Finish, now_s: float, *, is_trusted: bool = True) -> Session:
        """Finish a trajectory and give up its running turns. Raises KeyError, RequestRefused, Unavailable."""
        self.ledger.check()
        known = self.trajectories.get(name, is_trusted=is_trusted)
        is_new = known is not None and known.finish is None
        turns = list(known.turns) if known is not None and is_new else []
        session = self.trajectories.finish(name, finish, now_s, is_trusted=is_trusted)
        if is_new:
            for turn in turns:
                if turn.is_running:
                    self.scheduler.cancel([turn.run_id], now_s)
                    turn.fail(Unavailable("the trajectory was finished while this turn ran"))
            tokens = sum(len(turn.produced) for turn in turns)
            self._router.on_finished(session.trajectory_id, session.group_id, len(turns), tokens)
            self.on_news()
        return session

    # Time

    def tick(self, now_s: float) -> None:
        """Do what time brings. Raises Unavailable if the ledger is broken: only a new incarnation can continue."""
        if self.ledger.broken is not None:
            raise Unavailable("an error of the gateway in writing its ledger") from self.ledger.broken
        self._notice_gap(now_s)
        for worker in self.pool.expired(now_s):
            self.remove_worker(worker, now_s)
        self.provisioning.update(now_s)
        self._rebalancer.rebalance(now_s)  # also places turns on workers whose pause has ended
        self.scheduler.expire(now_s)
        if self.ledger.trouble is None:
            for session in self.trajectories.idle(now_s):
                self.finish(session.name, Finish(is_lost=True), now_s)
        self.ledger.commit()

    def tick_delay_s(self, now_s: float) -> float:
        """Return how long the caller waits before the next tick."""
        next_s = self.scheduler.next_s()
        return TICK_S if next_s is None else min(TICK_S, max(TICK_S_MIN, next_s - now_s))

    @property
    def version(self) -> str:
        """The version that turns run on now."""
        return self.pool.newest_version or next((worker.weights.version for worker in self.pool), NO_VERSION_YET)

    def _run(
        self, turn: KeptTurn, request: Request, affinity: str, now_s: float, *, is_recovered: bool = False
    ) -> None:
        try:
            if not is_recovered:
                self.scheduler.check_room()
            turn.start(request)
            self.scheduler.submit(request, turn, now_s, affinity=affinity, group=turn.group_id, produced=turn.produced)
        except BaseException:
            turn.give_up()
            raise
        self.provisioning.on_turn(now_s)

    def _notice_gap(self, now_s: float) -> None:
        if now_s - self._ticked_s > STOOD_STILL_S:
            self.pool.renew_all(now_s)
            self.scheduler.restart_timers(now_s)
        self._ticked_s = max(self._ticked_s, now_s)


def provision_rules(settings: GatewaySettings) -> ProvisionRules:
    """Return the rules of borrowing. A parked device is back in a moment, so a returned one need hardly rest."""
    most = settings.borrowed_max if settings.borrowed_max is not None else DEVICES_MAX
    idle_s = settings.return_after_s
    return ProvisionRules(most, settings.dedicated_max, idle_s=idle_s, hold_s=min(HOLD_S, idle_s), rest_s=REST_S)
