"""The gateway: one door for agents, environments and trainers, whatever runs behind it.

It is a `Front` whose engine is the whole pool: requests are checked, tokenised, answered and streamed by the code that
does so on a device, and what differs is only who runs them. What is decided is decided in the `Books`; here they are
put together with the front, by the desk, and with the event loop: the clock ticks, for leases and for turns that wait,
and what was noted in the ledger is committed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rose.config.gateway import GatewaySettings
from rose.errors import Unavailable
from rose.front.building import build_front
from rose.front.context import Front
from rose.front.metrics import FrontMetrics
from rose.models.folder import ModelFolder
from rose.observe.metrics import Metrics
from rose.rollout.books import Books
from rose.rollout.desk import TurnDesk
from rose.rollout.ledger import Ledger, NoLedger
from rose.rollout.ledger_file import LOG_BYTES
from rose.rollout.live import Counts
from rose.rollout.messages import NewVersion, ToGateway, VersionReady
from rose.rollout.pool import Member, Pool
from rose.rollout.scheduler import Scheduler
from rose.rollout.sessions import Finish, Session
from rose.rollout.trajectories import Trajectories
from rose.weights.metrics import FleetMetrics

TICK_S, TICK_S_MIN = 0.25, 0.005
GATHER_S = 0.05  # what is noted waits this long for more to be written with, unless somebody waits for it
CHECKPOINT_S = 4.0
LOG_LOOK_S = 0.5  # between two looks at the length of the ledger's write-ahead log


class News:
    """Wakes all who wait for something to change; they look for themselves what it was."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


@dataclass(frozen=True)
class Gateway:
    """What every handler works with."""

    front: Front
    settings: GatewaySettings
    books: Books
    desk: TurnDesk
    news: News  # of groups that are complete and versions that members took
    weights: FleetMetrics
    now_s: Callable[[], float] = time.monotonic

    @property
    def pool(self) -> Pool:
        return self.books.pool

    @property
    def scheduler(self) -> Scheduler:
        return self.books.scheduler

    @property
    def trajectories(self) -> Trajectories:
        return self.books.trajectories

    # What members do

    def heard(self, member: Member, message: ToGateway) -> None:
        if isinstance(message, VersionReady):
            self._count(message)
        self.books.heard(member, message, self.now_s())

    def joined(self, member: Member) -> None:
        self.books.joined(member, self.now_s())

    def lost(self, member: Member) -> None:
        """Its connection ended."""
        self.books.lost(member, self.now_s())

    # What trainers and environments do

    def publish(self, version: NewVersion) -> None:
        """Raises Unavailable."""
        self.books.publish(version, self.now_s())

    def finish(self, name: str, finish: Finish, *, is_trusted: bool) -> Session:
        """Raises KeyError, RequestRefused, Unavailable."""
        return self.books.finish(name, finish, self.now_s(), is_trusted=is_trusted)

    async def durable(self) -> None:
        """Until all that was done so far is. Raises Unavailable if it cannot be."""
        done: asyncio.Future[Unavailable | None] = asyncio.get_running_loop().create_future()
        self.books.ledger.then(lambda trouble: None if done.done() else done.set_result(trouble))
        trouble = await done
        if trouble is not None:
            raise trouble

    def _count(self, ready: VersionReady) -> None:
        if ready.fault is not None:
            self.weights.failed_by(ready.fault.kind)
        elif ready.seconds:  # else it says only that it runs them already
            self.weights.taken(ready.size_bytes, ready.seconds)

    def tick(self, now_s: float) -> None:
        self.books.tick(now_s)

    async def tick_for_ever(self) -> None:
        await asyncio.gather(self._tick_for_ever(), self._checkpoint_for_ever())

    async def _tick_for_ever(self) -> None:
        while True:
            wanted_s = self.books.next_s()
            await asyncio.sleep(TICK_S if wanted_s is None else min(TICK_S, max(TICK_S_MIN, wanted_s - self.now_s())))
            self.tick(self.now_s())

    async def _checkpoint_for_ever(self) -> None:
        ledger, checkpointed_s = self.books.ledger, self.now_s()
        while True:
            await asyncio.sleep(LOG_LOOK_S)
            if self.now_s() - checkpointed_s > CHECKPOINT_S or ledger.log_bytes > LOG_BYTES:
                checkpointed_s = self.now_s()
                await asyncio.to_thread(ledger.checkpoint)
                ledger.shorten()


class Settling:
    """Commits what was noted in the ledger: at once if somebody waits for it, else with what comes in a moment."""

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
        """Also if somebody was in a hurry since: to commit nothing costs less than to stop a clock."""
        self._is_waiting = False
        self._ledger.commit()


class GatewayMetrics(FrontMetrics):
    """A front's, without timings: a turn here may move, wait and be read twice; its worker times it."""

    def begin(self, request_id: str, arrival_s: float, prompt_tokens: int) -> None:
        self._request_prompt.observe(prompt_tokens)

    def abandon(self, request_ids: Iterable[str], reason: str = "abort") -> None:
        """What becomes of turns is counted by the scheduler."""


def build_gateway(folder: ModelFolder, settings: GatewaySettings) -> Gateway:
    """Inside a running loop. Raises ConfigError for a ledger that is not this model's."""
    name = settings.model_name or folder.name
    ledger = Ledger(Path(settings.ledger), name) if settings.ledger is not None else NoLedger()
    ledger.listen(Settling(ledger).on_work)
    books = Books(name, settings, ledger, vocabulary=folder.spec.vocabulary, now_s=time.monotonic())
    desk = TurnDesk(books, folder.spec.max_context_tokens, time.monotonic)
    figures = Metrics()
    front = replace(
        build_front(folder, name, settings, desk), metrics=GatewayMetrics(name, lambda: desk.facts, figures)
    )
    fleet = FleetMetrics(figures, lambda: [books.pool.lag(member) for member in books.pool])
    gateway = Gateway(front, settings, books, desk, News(), fleet)
    books.on_news, books.on_change = gateway.news.tell, desk.refresh
    _show(gateway, figures)
    return gateway


def _show(gateway: Gateway, figures: Metrics) -> None:
    counts = gateway.scheduler.counts
    figures.mirror_by(
        "counter",
        "rose_gateway_turns",
        "Turns by what became of them.",
        "what",
        {name: _reading(counts, name) for name in Counts.__slots__ if name != "tokens"},
    )
    figures.mirror("gauge", "rose_gateway_members", "Workers in the pool.", lambda: len(gateway.pool))
    figures.mirror("gauge", "rose_gateway_trajectories", "Trajectories held.", lambda: len(gateway.trajectories))
    figures.mirror(
        "counter",
        "rose_gateway_trajectories_finished",
        "Trajectories that have finished.",
        lambda: gateway.trajectories.finished,
    )
    _show_provisioning(gateway, figures)
    ledger = gateway.books.ledger
    figures.mirror("counter", "rose_gateway_ledger_commits", "Writes to the ledger.", lambda: ledger.commits)
    figures.mirror(
        "gauge",
        "rose_gateway_ledger_wal_bytes",
        "Length of the ledger's write-ahead log.",
        lambda: ledger.log_bytes,
    )
    room = gateway.trajectories.room
    figures.mirror("gauge", "rose_gateway_kept_bytes", "About what turns take in memory.", lambda: room.used_bytes)
    figures.mirror(
        "gauge", "rose_gateway_ledger_trouble", "1 while it cannot be written.", lambda: ledger.trouble is not None
    )


def _show_provisioning(gateway: Gateway, figures: Metrics) -> None:
    provisioning = gateway.books.provisioning
    figures.mirror("gauge", "rose_gateway_borrowed", "Devices borrowed now.", lambda: provisioning.borrowed)
    figures.mirror("counter", "rose_gateway_borrows", "Devices borrowed so far.", lambda: provisioning.borrows)
    figures.mirror("counter", "rose_gateway_returns", "Devices given back so far.", lambda: provisioning.returns)
    figures.mirror(
        "gauge",
        "rose_gateway_allocation_overhead_seconds",
        "Time in which a wanted device was being had or given back.",
        lambda: provisioning.overhead_s(gateway.now_s()),
    )


def _reading(counts: Counts, name: str) -> Callable[[], float]:
    return lambda: float(getattr(counts, name))
