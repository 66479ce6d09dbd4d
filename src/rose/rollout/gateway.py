"""The gateway: one door for agents, environments and trainers, whatever runs behind it.

It is a `Front` whose engine is the whole pool: requests are checked, tokenised, answered and streamed by the code that
does so on a device, and what differs is only who runs them. Here everything is put together: pool, scheduler,
trajectories, and the desk that joins them to the front; and the clock ticks, for leases and for turns that wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rose.config.gateway import GatewaySettings
from rose.front.building import build_front
from rose.front.context import Front
from rose.front.metrics import FrontMetrics
from rose.models.folder import ModelFolder
from rose.observe.metrics import Metrics
from rose.rollout.desk import TurnDesk
from rose.rollout.messages import Beat, NewVersion, Refused, ToGateway, Tokens, VersionReady
from rose.rollout.pool import Member, Pool
from rose.rollout.scheduler import Counts, Scheduler
from rose.rollout.trajectories import Finish, KeptTurn, Session, Trajectories

TICK_S = 0.25


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
    pool: Pool
    scheduler: Scheduler
    desk: TurnDesk
    trajectories: Trajectories
    news: News  # of groups that are complete and versions that members took
    now_s: Callable[[], float] = time.monotonic

    # What members do

    def heard(self, member: Member, message: ToGateway) -> None:
        now_s = self.now_s()
        match message:
            case Tokens():
                self.scheduler.heard_tokens(member, message, now_s)
            case Beat():
                self.pool.heard(member, message, now_s)
                self._changed(now_s)
            case Refused():
                self.scheduler.heard_refused(member, message, now_s)
            case VersionReady():
                self.pool.version_ready(member, message, now_s)
                self._changed(now_s)
                self.news.tell()

    def joined(self, member: Member) -> None:
        self.pool.catch_up(member, self.now_s())
        self._changed(self.now_s())

    def lost(self, member: Member) -> None:
        """Its connection ended, or its lease did."""
        if self.pool.remove(member):
            member.close()
            self.scheduler.lost(member, self.now_s())
            self._changed(self.now_s())
            self.news.tell()

    # What trainers and environments do

    def publish(self, version: NewVersion) -> None:
        self.pool.publish(version, self.now_s())
        self._changed(self.now_s())

    def finish(self, trajectory_id: str, finish: Finish) -> Session:
        """Raises KeyError, RequestRefused."""
        known = self.trajectories.get(trajectory_id)
        turns = list(known.turns) if known is not None else []
        session = self.trajectories.finish(trajectory_id, finish, self.now_s())
        self._leave(trajectory_id, turns)
        self.news.tell()
        return session

    async def tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(self.now_s())

    def tick(self, now_s: float) -> None:
        for member in self.pool.expired(now_s):
            self.lost(member)
        self.scheduler.place(now_s)  # a member that had closed itself for a while may be open again
        self.scheduler.expire(now_s)
        for session in self.trajectories.idle(now_s):
            self.finish(session.trajectory_id, Finish(is_lost=True))

    def _changed(self, now_s: float) -> None:
        self.desk.refresh()
        self.scheduler.place(now_s)

    def _leave(self, trajectory_id: str, turns: Iterable[KeptTurn]) -> None:
        self.desk.abandon(turns)
        self.scheduler.forget_affinity(trajectory_id)


class GatewayMetrics(FrontMetrics):
    """A front's, without timings: a turn here may move, wait and be read twice; its worker times it."""

    def begin(self, request_id: str, arrival_s: float, prompt_tokens: int) -> None:
        self._request_prompt.observe(prompt_tokens)

    def abandon(self, request_ids: Iterable[str], reason: str = "abort") -> None:
        """What becomes of turns is counted by the scheduler."""


def build_gateway(folder: ModelFolder, settings: GatewaySettings) -> Gateway:
    """Inside a running loop."""
    name = settings.model_name or folder.name
    pool = Pool(name, settings.lease_s)
    scheduler = Scheduler(pool, waiting_max=settings.max_waiting, wait_s=settings.wait_s)
    desk = TurnDesk(pool, scheduler, folder.spec.max_context_tokens, time.monotonic)
    figures = Metrics()
    front = replace(
        build_front(folder, name, settings, desk), metrics=GatewayMetrics(name, lambda: desk.facts, figures)
    )
    trajectories = Trajectories(settings.max_trajectories, settings.idle_s)
    gateway = Gateway(front, settings, pool, scheduler, desk, trajectories, News())
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


def _reading(counts: Counts, name: str) -> Callable[[], float]:
    return lambda: float(getattr(counts, name))
