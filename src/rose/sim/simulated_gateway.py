"""The gateway of a simulated world: the real core and ledger behind simulated connections.

It can be killed at any moment, as by `kill -9`: after a restart it has what the ledger had committed, and clients that
waited see a broken connection. Everything that the gateway accepts passes the ledger, so the invariant checker watches
that.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from rose.api.trajectories import Batch
from rose.api.worker_messages import (
    Activate,
    CancelTurn,
    EvictTurn,
    Heartbeat,
    Join,
    Leave,
    Move,
    NewVersion,
    Park,
    ToAgent,
    ToGateway,
    Turn,
    VersionReady,
    Welcome,
    decode_to_gateway,
    encode,
)
from rose.config.server_settings import GatewaySettings
from rose.engines.base import Sampling, TokenEvent
from rose.engines.token_stream import TokenStream
from rose.errors import RequestRefused
from rose.gateway.gateway_core import STOOD_STILL_S, GatewayCore
from rose.gateway.gateway_server import ChangeSignal, LedgerCommitter, durable
from rose.gateway.ledger import Ledger
from rose.gateway.pool import PoolWorker
from rose.gateway.sessions import Finish, KeptTurn, Session
from rose.gateway.turn_state import PartialOutput
from rose.gateway.worker_endpoint import COME_BACK_S
from rose.sim.invariant_checker import EventLog, InvariantChecker, Violation
from rose.sim.network import Frame, NetworkGate, NetworkPlace, Wire
from rose.sim.scenario import ReceivedAnswer, Scenario, SimulatedEpisode
from rose.sim.simulated_agent import PING, PONG, Accept
from rose.sim.weight_store import WeightStore

MODEL = "simulated"
IDLE_S = 10.0  # longest return_after_s that has surely passed when a world ends
CAP_S = 1.0  # in which the gateway must release a worker above a cap
SETTINGS = (
    "wait_s", "max_waiting", "lease_s", "beat_s", "idle_s", "max_staleness", "router", "borrowed_max", "dedicated_max",
    "return_after_s",
)  # fmt: skip

Answer = TypeVar("Answer")


class SimulatedLink:
    """The gateway's end of one agent's connection."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, incarnation
        self.worker: PoolWorker | None = None
        self.wire: Wire
        self.is_closed = False
        self.renewed_s = self.opened_s = 0.0  # its lease; when its owner and circuit breaker last allowed turns
        self._outbox: list[ToAgent] = []

    def put(self, message: ToAgent) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        frame, self._outbox = encode(self._outbox), []
        if not self.is_closed:
            self.wire.down.send(frame)


class WatchedLedger(Ledger):
    """A ledger in memory that outlives the gateway as a file does, and reports every write to the checker."""

    def __init__(
        self, model: str, connection: sqlite3.Connection, checker: InvariantChecker, gate: NetworkGate
    ) -> None:
        super().__init__(None, model, connection=connection)
        self._checker, self._gate = checker, gate
        self._is_dead = False

    def die(self) -> None:
        """Drop what was not committed, as when the process dies."""
        self._is_dead = True
        self.abandon()

    def add_tokens(self, turn: KeptTurn, event: TokenEvent) -> None:
        start = len(turn.produced) - len(event.token_ids)
        is_end = event.finish_reason is not None
        self._checker.accepted(turn.prompt_ids, start, event.token_ids, event.logprobs, event.version, ends=is_end)
        super().add_tokens(turn, event)

    def finish_session(self, session: Session, finish: Finish, turn_count: int, forks: int) -> None:
        self._checker.ended(session.trajectory_id, finish)
        super().finish_session(session, finish, turn_count, forks)

    def commit(self) -> None:
        self._gate.enter(self._commit)  # a stopped process writes nothing

    def _commit(self) -> None:
        if self._is_dead:
            return
        super().commit()
        if self.trouble is None:
            self._checker.settled()


class SimulatedGateway:
    """The gateway process: it accepts agents' connections and clients' requests."""

    address = ""  # that agents dial; several gateways have a list, and a listener for each
    listeners: Mapping[str, Accept] = {}

    def __init__(
        self, scenario: Scenario, store: WeightStore, checker: InvariantChecker, log: EventLog, chance: random.Random
    ) -> None:
        self.gate = NetworkGate()
        self.counts: Counter[str] = Counter()
        self._scenario, self._store, self._checker, self._log, self._chance = scenario, store, checker, log, chance
        self._loop = asyncio.get_running_loop()
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._core: GatewayCore | None = None
        self._ledger: WatchedLedger
        self._news = ChangeSignal()
        self._incarnation = 0
        self._links: dict[SimulatedLink, None] = {}
        self._works: dict[asyncio.Task[Any], asyncio.Future[Any]] = {}
        self._active_s = 0.0
        self._stalled = 0  # turns of this incarnation that stalled

    def core(self, ledger: WatchedLedger) -> GatewayCore:
        settings = GatewaySettings(**{name: getattr(self._scenario, name) for name in SETTINGS})
        return GatewayCore(MODEL, settings, ledger, now_s=self._loop.time())

    # Start and end

    def start(self) -> None:
        """Start from the contents of the ledger."""
        if self._core is not None:
            return
        self.write_to_disk(can=True)
        self._incarnation, self._stalled = self._incarnation + 1, 0
        self._log.record("gateway", f"starts, incarnation {self._incarnation}")
        self._active_s = self._loop.time()
        self._ledger = WatchedLedger(MODEL, self._connection, self._checker, self.gate)
        self._ledger.on_work = self._committer(self._incarnation)
        self._core = self.core(self._ledger)
        self._core.on_news = self._news.notify
        self._tick_later(self._incarnation)

    def kill(self) -> None:
        if self._core is None:
            return
        self._log.record("gateway", "is killed")
        self._count()
        self._core = None
        self._ledger.die()
        self._checker.died()
        self.gate.clear()
        for link in list(self._links):
            self._close(link)
        works, self._works = self._works, {}
        for task, answer in works.items():
            task.cancel()
            _refuse(answer, ConnectionResetError("the gateway died"))

    def pick(self) -> SimulatedGateway:
        """Return the process that a fault hits."""
        return self

    def close(self) -> None:
        self.kill()
        self._connection.close()

    def write_to_disk(self, *, can: bool) -> None:
        self._connection.execute(f"PRAGMA query_only = {'OFF' if can else 'ON'}")

    def drain(self, name: str) -> None:
        """Drain a worker on the operator's behalf."""
        if self._core is not None and (worker := self._core.pool.get(name)) is not None:
            self._log.record("gateway", f"drains {name}")
            self._core.scheduler.drain(worker, self._loop.time())
            self._check()

    def check_idle(self) -> None:
        core = self._running_core()
        if core.scheduler.waiting or core.scheduler.running:
            raise Violation(f"{core.scheduler.waiting} turns wait and {core.scheduler.running} run when all is done")
        for worker in core.pool:
            is_parked = worker.heartbeat.place == "parked"
            if worker.kind == "borrowed" and not is_parked and self._scenario.return_after_s < IDLE_S:
                raise Violation(f"{worker.name} was not returned although no turn was requested for a while")

    def _committer(self, incarnation: int) -> Callable[[bool], None]:
        committer = LedgerCommitter(self._ledger)
        return lambda is_urgent: committer.on_work(is_urgent) if self._incarnation == incarnation else None

    def _tick_later(self, incarnation: int) -> None:
        wait_s = self._running_core().tick_delay_s(self._loop.time())
        self._loop.call_later(wait_s, lambda: self.gate.enter(lambda: self._tick(incarnation)))

    def _tick(self, incarnation: int) -> None:
        if self._core is not None and self._incarnation == incarnation:
            self._notice_gap()
            self._core.tick(self._loop.time())
            self._check_caps()
            self._check()
            self._tick_later(incarnation)

    def _notice_gap(self) -> None:
        """Renew the recorded leases after the gateway itself stood still."""
        now_s = self._loop.time()
        if now_s - self._active_s > STOOD_STILL_S:
            for link in self._links:
                link.renewed_s = now_s
        self._active_s = now_s

    def _running_core(self) -> GatewayCore:
        assert self._core is not None
        return self._core

    def _count(self) -> None:
        counts = self._running_core().scheduler.counts
        self.counts.update({name: getattr(counts, name) for name in type(counts).__slots__})
        self.counts["restarts"] = self._incarnation - 1
        provisioning = self._running_core().provisioning
        self.counts.update(borrows=provisioning.borrows, returns=provisioning.returns)

    def _check_caps(self) -> None:
        """Check the caps, with time to release a worker that has just joined."""
        caps = {"borrowed": self._scenario.borrowed_max, "dedicated": self._scenario.dedicated_max}
        now_s = self._loop.time()
        for kind, most in caps.items():
            if most is None:
                continue
            used = [link for link in self._links if link.worker is not None and self._is_used(link.worker, kind)]
            if sum(now_s - link.opened_s > CAP_S for link in used) > most:
                raise Violation(f"{len(used)} {kind} workers are in use, {most} are allowed")

    def _is_used(self, worker: PoolWorker, kind: str) -> bool:
        is_lent = worker.provisioning.is_wanted and worker.heartbeat.is_offered and not worker.placement.is_draining
        return worker.kind == kind and is_lent and self._running_core().pool.has(worker)

    def _check(self) -> None:
        """Check that the counts balance; runs after every event, so its cost must not grow with the world."""
        scheduler = self._running_core().scheduler
        counts = scheduler.counts
        under_way = scheduler.waiting + scheduler.running
        if counts.begun != counts.ended + counts.failed + counts.cancelled + under_way:
            raise Violation(f"the gateway's counts do not balance: {counts}, {under_way} under way")

    # Agents

    def accept(self, name: str, place: NetworkPlace, to_agent: Callable[[Frame], None]) -> Wire | None:
        if self._core is None:
            return None
        link = SimulatedLink(name, self._incarnation)
        link.wire = Wire(
            place, self._chance, lambda frame: self.gate.enter(lambda: self._receive(link, frame)), to_agent
        )
        self._links[link] = None
        return link.wire

    def _receive(self, link: SimulatedLink, frame: Frame) -> None:
        if self._core is None or link.incarnation != self._incarnation:
            return
        self._notice_gap()
        if frame is None:
            self._disconnect(link)
        elif frame == PING:
            if not link.is_closed:
                link.wire.down.send(PONG)
        else:
            for message in decode_to_gateway(frame):
                self._receive_message(link, message)
        self._check()

    def _receive_message(self, link: SimulatedLink, message: ToGateway) -> None:
        if link.worker is None:
            assert isinstance(message, Join)
            self._join(link, message)
            return
        now_s, core = self._loop.time(), self._running_core()
        is_alive = core.pool.has(link.worker) and now_s - link.renewed_s <= self._scenario.lease_s
        before, was_open = core.scheduler.counts.tokens, link.worker.heartbeat.gate_open
        core.receive(link.worker, message, now_s)
        if link.worker.heartbeat.gate_open and not was_open:
            link.opened_s = now_s
        if not is_alive and core.scheduler.counts.tokens > before:
            raise Violation(f"tokens of {link.name} were accepted, but its lease had expired")
        if is_alive and isinstance(message, Heartbeat | VersionReady):
            link.renewed_s = now_s

    def _join(self, link: SimulatedLink, join: Join) -> None:
        core, now_s = self._running_core(), self._loop.time()
        try:
            worker = core.pool.join(join, lambda message: self._send(link, message), now_s, lambda: self._close(link))
        except RequestRefused as error:
            self._log.record("gateway", f"does not take {link.name}: {error.what}")
            link.put(Leave(error.what, COME_BACK_S))
            self._loop.call_soon(self._close, link)
            return
        self._log.record("gateway", f"takes {link.name} in, version {join.version}")
        link.worker, link.renewed_s, link.opened_s = worker, now_s, now_s
        link.put(Welcome(self._scenario.beat_s))
        core.on_joined(worker, now_s)

    def _send(self, link: SimulatedLink, message: ToAgent) -> None:
        match message:
            case Turn():
                worker = link.worker
                assert worker is not None
                if not (worker.provisioning.is_wanted and worker.heartbeat.is_offered and worker.heartbeat.gate_open):
                    raise Violation(f"{link.name} gets turn {message.attempt_id}, but must not have any")
                if len(worker.placement.attempt_ids) > worker.registration.max_concurrency:
                    raise Violation(f"{link.name} has more turns than its concurrency")
                self._checker.placed(message.request, message.attempt_id)
                tokens = len(message.request.partial.token_ids)
                self._log.record("gateway", f"places {message.attempt_id} on {link.name}, {tokens} tokens known")
            case EvictTurn() | CancelTurn():
                self._check_stall(link)
                self._log.record("gateway", f"{type(message).__name__.lower()}s {message.attempt_id} on {link.name}")
            case NewVersion():
                self._log.record("gateway", f"tells {link.name} of version {message.version}")
            case Move():
                self._log.record("gateway", f"moves {link.name} to shard {message.shard}")
            case Activate() | Park():
                self._log.record("gateway", f"{type(message).__name__.lower()}s {link.name}: {message.why}")
        link.put(message)

    def _check_stall(self, link: SimulatedLink) -> None:
        """Check that no worker that reports an admission stall counts as stalled."""
        stalled = self._running_core().scheduler.counts.stalled
        if stalled > self._stalled and link.worker is not None:
            heartbeat = link.worker.heartbeat
            if heartbeat.shut_s is not None or not heartbeat.gate_open:
                raise Violation(f"{link.name} counts as stalled, but had reported that admission is blocked")
        self._stalled = stalled

    def _disconnect(self, link: SimulatedLink) -> None:
        self._links.pop(link, None)
        link.is_closed = True
        if link.worker is not None:
            self._log.record("gateway", f"has lost {link.name}")
            self._running_core().remove_worker(link.worker, self._loop.time())

    def _close(self, link: SimulatedLink) -> None:
        """Close a connection; sometimes frames in transit are still read, as from a socket's buffer."""
        self._links.pop(link, None)
        if not link.is_closed:
            link.is_closed = True
            link.wire.close_by_gateway(reads_the_rest=self._chance.random() < 0.5)

    # Clients

    def work(self, do: Callable[[], Awaitable[Answer]]) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = self._loop.create_future()
        if self._core is None:
            _refuse(answer, ConnectionRefusedError("the gateway is down"))
            return answer
        incarnation = self._incarnation

        def begin() -> None:
            if self._core is None or incarnation != self._incarnation or answer.done():
                _refuse(answer, ConnectionResetError("the gateway died"))
                return
            self._notice_gap()
            task: asyncio.Task[Answer] = asyncio.ensure_future(do())  # type: ignore[assignment]
            self._works[task] = answer
            task.add_done_callback(self._finish_work)
            answer.add_done_callback(lambda answer: task.cancel() if answer.cancelled() else None)

        self.gate.enter(begin)
        return answer

    def _finish_work(self, task: asyncio.Task[Any]) -> None:
        answer = self._works.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if answer is None or task.cancelled():
            return
        if error is not None:
            _refuse(answer, error)
        elif not answer.done():
            answer.set_result(task.result())

    async def begin(self, episode: SimulatedEpisode, group: str, group_size: int) -> None:
        core = self._running_core()
        core.trajectories.begin(
            episode.trajectory_id, self._loop.time(), group=group, group_size=group_size, seed=episode.seed
        )
        await durable(self._ledger)

    async def turn(
        self, trajectory_id: str, prompt_ids: tuple[int, ...], sampling: Sampling, *, whole: bool
    ) -> ReceivedAnswer:
        core, stream = self._running_core(), TokenStream()
        counts, waiting = core.scheduler.counts, core.scheduler.waiting
        begun = counts.begun
        turn = core.ask(trajectory_id, prompt_ids, sampling, stream, self._loop.time(), whole=whole)
        request_id = f"{turn.key}#{turn.tries - 1}"
        if counts.begun > begun and waiting >= self._scenario.max_waiting:
            raise Violation(f"a turn was accepted while {waiting} were waiting")
        self._check()
        try:
            return await _read(stream, ends=int(whole))
        finally:
            turn.forget(request_id)

    async def finish(self, trajectory_id: str, finish: Finish) -> None:
        self._running_core().finish(trajectory_id, finish, self._loop.time())
        await durable(self._ledger)

    async def batch(self, groups: int, after: int, wait_s: float) -> Batch | None:
        core = self._running_core()
        batch = await self._news.wait_until(lambda: core.trajectories.batch(groups, after), wait_s)
        if batch is not None:
            await durable(self._ledger)
            self._checker.sent(batch)
        return batch

    async def publish(self, version: str) -> None:
        self._running_core().publish(self._store.put(version), self._loop.time())
        await durable(self._ledger)


async def _read(stream: TokenStream, ends: int) -> ReceivedAnswer:
    produced = PartialOutput()
    while True:
        for event in await stream.take(ends=ends):
            produced.add(event.token_ids, event.logprobs, event.version)
            if event.finish_reason is not None:
                return ReceivedAnswer(tuple(produced.token_ids), tuple(produced.logprobs), tuple(produced.spans))


def _refuse(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # mark as retrieved: the answer of a duplicated request is not read
