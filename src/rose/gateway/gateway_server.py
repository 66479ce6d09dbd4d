"""The gateway: one address for agents, environments and trainers, with all workers behind it.

It is an `HttpContext` whose engine is the whole pool: the code of a device checks, tokenises, renders and streams, and
`PoolEngine` hands requests to the `GatewayCore`, which decides. This module adds the event loop: it calls `tick` for
leases and waiting turns, and commits the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from rose.api.worker_messages import ToGateway, VersionReady
from rose.config.server_settings import GatewaySettings
from rose.engines.base import EngineEvents, EngineFacts, LendingStatus, Request
from rose.engines.token_stream import TokenSink
from rose.errors import RequestRefused, Unavailable
from rose.gateway.fleet_view import FleetFeed
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.ledger import Ledger, NoLedger
from rose.gateway.ledger_file import LOG_BYTES
from rose.gateway.pool import PoolWorker
from rose.gateway.publisher_process import PublisherProcess, publisher_process
from rose.gateway.sessions import KeptTurn
from rose.gateway.turn_state import Counts
from rose.models.model_folder import ModelFolder
from rose.observe.metrics import Metrics, MirrorKind
from rose.openai.http_context import HttpContext
from rose.openai.http_metrics import HttpMetrics
from rose.weights.weight_metrics import FleetMetrics


class TurnReader:
    """A `TokenSource`: one reader of one turn. With `whole` it gets no event before the turn has ended."""

    def __init__(
        self, core: GatewayCore, turn: KeptTurn, affinity: str, now_s: Callable[[], float], *, whole: bool
    ) -> None:
        self.request_id = core.next_try(turn)
        self._core, self._turn, self._affinity, self._now_s, self._whole = core, turn, affinity, now_s, whole

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        [request] = requests
        self._core.turn(self._turn, request, sink, self._now_s(), affinity=self._affinity, whole=self._whole)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Remove the reader, which has left or has seen enough; the turn continues."""
        self._turn.forget(self.request_id)


class PoolContext(HttpContext):
    """The context of a gateway: a turn waits for the weights that it demands."""

    def check_versions(self, exact: str, oldest: str) -> None:
        """Accept any demand: the scheduler looks for a worker."""

    async def refresh(self) -> None:
        assert isinstance(self.engine, PoolEngine)
        self.engine.refresh()


class PoolEngine:
    """An `EngineClient`. One per gateway; its workers get weights from the trainer, through the gateway's routes."""

    lending_status: LendingStatus | None = None

    def __init__(self, core: GatewayCore, context_tokens: int, now_s: Callable[[], float]) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.events = EngineEvents()  # the steps are those of the workers: a pool publishes none
        self._core, self._now_s = core, now_s
        self._context_tokens = context_tokens
        self._facts: EngineFacts = self._sum_up()

    @property
    def trouble(self) -> Unavailable | None:
        """Return why the ledger cannot be written. Without workers turns wait, and get a 503 after `wait_s`."""
        return self._core.ledger.trouble

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def refresh(self) -> None:
        """Sum up the pool again, after every change of it."""
        self._facts = self._sum_up()

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        for request in requests:
            if self._core.scheduler.has(request.request_id):
                raise RequestRefused(f"request id `{request.request_id}` is already in use")
            self._core.scheduler.check_room()
            self._core.scheduler.submit(request, sink, self._now_s())

    def cancel(self, request_ids: Iterable[str]) -> None:
        self._core.scheduler.cancel(list(request_ids), self._now_s())

    async def evict(self, request_id: str) -> None:
        self._core.scheduler.evict(request_id, self._now_s())

    async def stage(self, version: str, folder: str) -> None:
        raise RequestRefused("a pool takes no weights here", hint="publish a version with `POST /v1/versions`")

    async def commit(self, version: str) -> None:
        await self.stage(version, "")

    async def set_wanted(self, is_wanted: bool) -> None:
        """Do nothing: the gateway decides by itself which workers it wants."""

    async def query(self) -> EngineFacts:
        self.refresh()
        return self._facts

    async def close(self) -> None:
        """Do nothing: the gateway does not own its workers."""

    def _sum_up(self) -> EngineFacts:
        """Sum up all workers. What a borrowed one lends changes, so memory does not bound the longest context."""
        workers, scheduler = list(self._core.pool), self._core.scheduler
        heartbeats = [worker.heartbeat for worker in workers]
        context = max((worker.registration.context_tokens for worker in workers), default=None)
        return EngineFacts(
            version=self._core.version,
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv_blocks_limit=max(sum(heartbeat.kv_tokens for heartbeat in heartbeats), context or self._context_tokens),
            kv_blocks_used=sum(heartbeat.kv_used_tokens for heartbeat in heartbeats),
            kv_blocks_cached=0,
            block_tokens=1,
            block_bytes=0,
            max_context_tokens=context or self._context_tokens,
            generated_tokens=scheduler.counts.tokens,
        )


GATHER_S = 0.05  # a noted row waits this long for others to be written with, unless a reader waits for it
CHECKPOINT_S = 4.0
LOG_LOOK_S = 0.5  # between two looks at the length of the ledger's write-ahead log

Result = TypeVar("Result")


class ChangeSignal:
    """A signal that something has changed; waiters find out for themselves what it was."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, look: Callable[[], Result | None], wait_s: float) -> Result | None:
        """Return what `look` returns as soon as it is not None; None after this long."""
        try:
            async with asyncio.timeout(wait_s):
                while (result := look()) is None:
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiters.add(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiters.discard(waiter)
                return result
        except TimeoutError:
            return None


async def durable(ledger: NoLedger) -> None:
    """Wait until all that was noted so far is durable. Raises Unavailable if it cannot be."""
    done: asyncio.Future[Unavailable | None] = asyncio.get_running_loop().create_future()
    ledger.when_durable(lambda trouble: None if done.done() else done.set_result(trouble))
    trouble = await done
    if trouble is not None:
        raise trouble


@dataclass(frozen=True)
class Gateway:
    """The context of every route."""

    context: HttpContext
    settings: GatewaySettings
    core: GatewayCore
    engine: PoolEngine
    changes: ChangeSignal  # of groups that are complete and versions that workers have loaded
    weights: FleetMetrics
    feed: FleetFeed  # of live pages
    publisher: PublisherProcess | None = None  # of weights that a trainer writes to folders
    now_s: Callable[[], float] = time.monotonic

    def receive(self, worker: PoolWorker, message: ToGateway) -> None:
        """Count and handle a message of a worker. Raises Unavailable."""
        if isinstance(message, VersionReady):
            if message.fault is not None:
                self.weights.failed_by(message.fault.kind)
            elif message.seconds:  # else the worker ran the version already
                self.weights.taken(message.size_bytes, message.seconds)
        self.core.receive(worker, message, self.now_s())

    def remove_worker(self, worker: PoolWorker) -> None:
        self.core.remove_worker(worker, self.now_s())

    async def durable(self) -> None:
        """Wait until all that was done so far is durable. Raises Unavailable if it cannot be."""
        await durable(self.core.ledger)

    async def tick_for_ever(self) -> None:
        await asyncio.gather(self._tick_for_ever(), self._checkpoint_for_ever())

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.core.tick_delay_s(self.now_s()))
            self.core.tick(self.now_s())

    async def _checkpoint_for_ever(self) -> None:
        ledger, checkpointed_s = self.core.ledger, self.now_s()
        while True:
            await asyncio.sleep(LOG_LOOK_S)
            if self.now_s() - checkpointed_s > CHECKPOINT_S or ledger.log_bytes > LOG_BYTES:
                checkpointed_s = self.now_s()
                await asyncio.to_thread(ledger.checkpoint)
                ledger.shorten()


class LedgerCommitter:
    """Commits what was noted in the ledger: at once if a reader waits for it, else together with what follows soon."""

    def __init__(self, ledger: NoLedger) -> None:
        self._ledger = ledger
        self._is_waiting = False

    def on_work(self, is_urgent: bool) -> None:
        loop = asyncio.get_running_loop()
        if is_urgent:
            loop.call_soon(self._ledger.commit)
        elif not self._is_waiting:
            self._is_waiting = True
            loop.call_later(GATHER_S, self._commit)

    def _commit(self) -> None:
        """Runs even if an urgent commit happened meanwhile: an empty commit is cheaper than cancelling the timer."""
        self._is_waiting = False
        self._ledger.commit()


class GatewayMetrics(HttpMetrics):
    """HTTP metrics without timings: a turn may move, wait and be read twice here; its worker times it."""

    def begin(self, request_id: str, arrival_s: float, prompt_tokens: int) -> None:
        self._request_prompt.observe(prompt_tokens)

    def abandon(self, request_ids: Iterable[str], reason: str = "abort") -> None:
        """Do nothing: the scheduler counts what becomes of turns."""


def build_gateway(folder: ModelFolder, settings: GatewaySettings) -> Gateway:
    """Build a gateway inside a running loop. Raises ConfigError for another model's ledger, and for the settings."""
    name = settings.model_name or folder.name
    publisher = publisher_process(folder.path, name, settings.control)
    ledger = Ledger(Path(settings.ledger), name) if settings.ledger is not None else NoLedger()
    ledger.on_work = LedgerCommitter(ledger).on_work
    core = GatewayCore(name, settings, ledger, vocabulary=folder.spec.vocabulary, now_s=time.monotonic())
    engine = PoolEngine(core, folder.spec.max_context_tokens, time.monotonic)
    metrics, is_live = Metrics(), settings.control.api is not None
    context = PoolContext.build(
        folder, name, settings, engine, metrics=GatewayMetrics(name, lambda: engine.facts, metrics, is_live=is_live)
    )
    fleet = FleetMetrics(metrics, lambda: [core.pool.lag(worker) for worker in core.pool])
    gateway = Gateway(context, settings, core, engine, ChangeSignal(), fleet, FleetFeed(core, name), publisher)
    core.on_news, core.on_change = gateway.changes.notify, engine.refresh
    _register_metrics(gateway, metrics)
    return gateway


def _register_metrics(gateway: Gateway, metrics: Metrics) -> None:
    core, ledger = gateway.core, gateway.core.ledger
    provisioning, trajectories, counts = core.provisioning, core.trajectories, core.scheduler.counts
    turns: dict[str, Callable[[], float | None]] = {
        name: partial(getattr, counts, name) for name in Counts.__slots__ if name != "tokens"
    }
    metrics.mirror_by("counter", "rose_gateway_turns", "Turns by what became of them.", "what", turns)
    mirrored: tuple[tuple[MirrorKind, str, str, Callable[[], float]], ...] = (
        ("gauge", "members", "Workers in the pool.", lambda: len(core.pool)),
        ("gauge", "trajectories", "Trajectories held.", lambda: len(trajectories)),
        ("counter", "trajectories_finished", "Trajectories that have finished.", lambda: trajectories.finished),
        ("gauge", "borrowed", "Devices borrowed now.", lambda: provisioning.borrowed),
        ("counter", "borrows", "Devices borrowed so far.", lambda: provisioning.borrows),
        ("counter", "returns", "Devices given back so far.", lambda: provisioning.returns),
        (
            "gauge",
            "allocation_overhead_seconds",
            "Time in which a wanted device was being borrowed or given back.",
            lambda: provisioning.overhead_s(gateway.now_s()),
        ),
        ("counter", "ledger_commits", "Writes to the ledger.", lambda: ledger.commits),
        ("gauge", "ledger_wal_bytes", "Length of the ledger's write-ahead log.", lambda: ledger.log_bytes),
        ("gauge", "kept_bytes", "About what turns take in memory.", lambda: trajectories.room.used_bytes),
        ("gauge", "ledger_trouble", "1 while it cannot be written.", lambda: ledger.trouble is not None),
    )
    for kind, name, what, reading in mirrored:
        metrics.mirror(kind, f"rose_gateway_{name}", what, reading)
