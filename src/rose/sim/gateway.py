"""The gateway of a simulated world: its real books and its real ledger, behind sockets that are made up.

It can be killed at any moment, as by kill -9: what the ledger had committed is there when it starts again, and nothing
else. Whoever waited for an answer sees the connection break. The ledger is where everything the gateway accepts must
pass, so that is where the judge looks.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rose.config.gateway import GatewaySettings
from rose.coserve.mailbox import Mailbox
from rose.engines.base import Sampling
from rose.errors import RequestRefused, Unavailable
from rose.rollout.books import STOOD_STILL_S, Books
from rose.rollout.gateway import TICK_S, TICK_S_MIN, News, Settling
from rose.rollout.joining import COME_BACK_S
from rose.rollout.messages import (
    Activate,
    Beat,
    Cancel,
    Evict,
    Join,
    Leave,
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
from rose.rollout.pool import Member
from rose.rollout.produced import Produced
from rose.rollout.sessions import Finish
from rose.rollout.trajectories import Batch
from rose.sim.agent import PING, PONG
from rose.sim.episodes import Answered, Episode
from rose.sim.gate import Gate
from rose.sim.judge import Judge
from rose.sim.ledger import WatchedLedger
from rose.sim.scenario import Scenario
from rose.sim.shelf import Shelf
from rose.sim.story import Story, Violation
from rose.sim.wire import Frame, Place, Wire

MODEL = "simulated"
IDLE_S = 10.0  # of return_after_s: longer ones may not be over when a world ends
CAP_S = 1.0  # to tell a member that it is one too many

Answer = TypeVar("Answer")


class Link:
    """The gateway's end of one agent's connection."""

    def __init__(self, name: str, life: int) -> None:
        self.name, self.life = name, life
        self.member: Member | None = None
        self.wire: Wire
        self.is_closed = False
        self.renewed_s = self.opened_s = 0.0  # its lease; its gate, by its owner and its circuit breaker
        self._outbox: list[ToAgent] = []

    def put(self, message: ToAgent) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        frame, self._outbox = encode(self._outbox), []
        if not self.is_closed:
            self.wire.down.send(frame)


class SimulatedGateway:
    """A host for clients, an ear for agents."""

    def __init__(self, scenario: Scenario, shelf: Shelf, judge: Judge, story: Story, chance: random.Random) -> None:
        self.gate = Gate()
        self.counts: Counter[str] = Counter()
        self._scenario, self._shelf, self._judge, self._story, self._chance = scenario, shelf, judge, story, chance
        self._loop = asyncio.get_running_loop()
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._books: Books | None = None
        self._ledger: WatchedLedger
        self._news = News()
        self._life = 0
        self._links: dict[Link, None] = {}
        self._works: dict[asyncio.Task[Any], asyncio.Future[Any]] = {}
        self._active_s = 0.0
        self._stalled = 0  # turns of this life that were taken from workers that did not get on

    def settings(self) -> GatewaySettings:
        scenario = self._scenario
        return GatewaySettings(
            wait_s=scenario.wait_s,
            max_waiting=scenario.max_waiting,
            lease_s=scenario.lease_s,
            beat_s=scenario.beat_s,
            idle_s=scenario.idle_s,
            max_staleness=scenario.max_staleness,
            router=scenario.router,
            borrowed_max=scenario.borrowed_max,
            dedicated_max=scenario.dedicated_max,
            return_after_s=scenario.return_after_s,
        )

    def books(self, ledger: WatchedLedger) -> Books:
        return Books(MODEL, self.settings(), ledger, now_s=self._loop.time())

    # Life and death

    def start(self) -> None:
        """From what the ledger has."""
        if self._books is not None:
            return
        self.write_to_disk(can=True)
        self._life, self._stalled = self._life + 1, 0
        self._story.tell("gateway", f"starts its life {self._life}")
        self._active_s = self._loop.time()
        self._ledger = WatchedLedger(MODEL, self._connection, self._judge, self.gate)
        self._ledger.listen(self._settling(self._life))
        self._books = self.books(self._ledger)
        self._books.on_news = self._news.tell
        self._tick_later(self._life)

    def kill(self) -> None:
        if self._books is None:
            return
        self._story.tell("gateway", "is killed")
        self._count()
        self._books = None
        self._ledger.die()
        self._judge.died()
        self.gate.clear()
        for link in list(self._links):
            self._close(link)
        works, self._works = self._works, {}
        for task, answer in works.items():
            task.cancel()
            _refuse(answer, ConnectionResetError("the gateway died"))

    def close(self) -> None:
        self.kill()
        self._connection.close()

    def write_to_disk(self, *, can: bool) -> None:
        self._connection.execute(f"PRAGMA query_only = {'OFF' if can else 'ON'}")

    def drain(self, name: str) -> None:
        """The operator wants no more of a worker."""
        if self._books is not None and (member := self._books.pool.get(name)) is not None:
            self._story.tell("gateway", f"drains {name}")
            self._books.drain(member, self._loop.time())
            self._look()

    def check_idle(self) -> None:
        books = self._living()
        if books.scheduler.waiting or books.scheduler.running:
            raise Violation(f"{books.scheduler.waiting} turns wait and {books.scheduler.running} run when all is done")
        for member in books.pool:
            if member.kind == "borrowed" and member.place != "parked" and self._scenario.return_after_s < IDLE_S:
                raise Violation(f"{member.name} was not given back, and nobody has asked for a turn for a while")

    def _settling(self, life: int) -> Callable[[bool], None]:
        settling = Settling(self._ledger)

        def on_work(is_urgent: bool) -> None:
            if self._life == life:
                settling.on_work(is_urgent)

        return on_work

    def _tick_later(self, life: int) -> None:
        books = self._living()
        wanted_s = books.next_s()
        wait_s = TICK_S if wanted_s is None else min(TICK_S, max(TICK_S_MIN, wanted_s - self._loop.time()))
        self._loop.call_later(wait_s, lambda: self.gate.enter(lambda: self._tick(life)))

    def _tick(self, life: int) -> None:
        if self._books is not None and self._life == life:
            self._notice_gap()
            self._books.tick(self._loop.time())
            self._check_caps()
            self._look()
            self._tick_later(life)

    def _notice_gap(self) -> None:
        """By the judge's account, too, leases begin anew when it was the gateway that stood still."""
        now_s = self._loop.time()
        if now_s - self._active_s > STOOD_STILL_S:
            for link in self._links:
                link.renewed_s = now_s
        self._active_s = now_s

    def _living(self) -> Books:
        assert self._books is not None
        return self._books

    def _count(self) -> None:
        counts = self._living().scheduler.counts
        self.counts.update({name: getattr(counts, name) for name in type(counts).__slots__})
        self.counts["restarts"] = self._life - 1
        provisioning = self._living().provisioning
        self.counts.update(borrows=provisioning.borrows, returns=provisioning.returns)

    def _check_caps(self) -> None:
        """A member that has joined since is told soon enough."""
        caps = {"borrowed": self._scenario.borrowed_max, "dedicated": self._scenario.dedicated_max}
        now_s = self._loop.time()
        for kind, most in caps.items():
            used = [link for link in self._links if link.member is not None and self._is_used(link.member, kind)]
            if most is not None and sum(now_s - link.opened_s > CAP_S for link in used) > most:
                raise Violation(f"{len(used)} {kind} workers are used, {most} are allowed")

    def _is_used(self, member: Member, kind: str) -> bool:
        is_lent = member.is_wanted and member.is_offered and not member.draining
        return member.kind == kind and is_lent and self._living().pool.has(member)

    def _look(self) -> None:
        """After everything that happens."""
        scheduler = self._living().scheduler
        counts = scheduler.counts
        under_way = scheduler.waiting + scheduler.running
        if counts.begun != counts.ended + counts.failed + counts.cancelled + under_way:
            raise Violation(f"the gateway's counts do not balance: {counts}, {under_way} under way")
        for link in self._links:
            if link.member is not None and len(link.member.tickets) > link.member.seats:
                raise Violation(f"{link.name} has more turns than seats")

    # Agents

    def accept(self, name: str, place: Place, to_agent: Callable[[Frame], None]) -> Wire | None:
        if self._books is None:
            return None
        link = Link(name, self._life)
        link.wire = Wire(place, self._chance, lambda frame: self.gate.enter(lambda: self._heard(link, frame)), to_agent)
        self._links[link] = None
        return link.wire

    def _heard(self, link: Link, frame: Frame) -> None:
        if self._books is None or link.life != self._life:
            return
        self._notice_gap()
        if frame is None:
            self._hung_up(link)
        elif frame == PING:
            if not link.is_closed:
                link.wire.down.send(PONG)
        else:
            for message in decode_to_gateway(frame):
                self._heard_message(link, message)
        self._look()

    def _heard_message(self, link: Link, message: ToGateway) -> None:
        if link.member is None:
            assert isinstance(message, Join)
            self._join(link, message)
            return
        now_s, books = self._loop.time(), self._living()
        is_alive = books.pool.has(link.member) and now_s - link.renewed_s <= self._scenario.lease_s
        before, was_open = books.scheduler.counts.tokens, link.member.gate_open
        books.heard(link.member, message, now_s)
        if link.member.gate_open and not was_open:
            link.opened_s = now_s
        if not is_alive and books.scheduler.counts.tokens > before:
            raise Violation(f"tokens of {link.name} were accepted, and its lease was over")
        if is_alive and isinstance(message, Beat | VersionReady):
            link.renewed_s = now_s

    def _join(self, link: Link, join: Join) -> None:
        books, now_s = self._living(), self._loop.time()
        try:
            member = books.pool.join(join, lambda message: self._send(link, message), now_s)
        except RequestRefused as error:
            self._story.tell("gateway", f"does not take {link.name}: {error.what}")
            link.put(Leave(error.what, COME_BACK_S))
            self._loop.call_soon(self._close, link)
            return
        self._story.tell("gateway", f"takes {link.name} in, version {join.version}")
        link.member, link.renewed_s, link.opened_s = member, now_s, now_s
        member.close = lambda: self._close(link)
        link.put(Welcome(self._scenario.beat_s))
        books.joined(member, now_s)

    def _send(self, link: Link, message: ToAgent) -> None:
        match message:
            case Turn():
                member = link.member
                assert member is not None
                if not (member.is_wanted and member.is_offered and member.gate_open):
                    raise Violation(f"{link.name} gets turn {message.ticket}, and is not to have any")
                self._judge.placed(message.request, message.ticket)
                tokens = len(message.request.partial.token_ids)
                self._story.tell("gateway", f"places {message.ticket} on {link.name}, {tokens} tokens known")
            case Evict() | Cancel():
                self._check_stall(link)
                self._story.tell("gateway", f"{type(message).__name__.lower()}s {message.ticket} on {link.name}")
            case NewVersion():
                self._story.tell("gateway", f"tells {link.name} of version {message.version}")
            case Activate() | Park():
                self._story.tell("gateway", f"{type(message).__name__.lower()}s {link.name}: {message.why}")
        link.put(message)

    def _check_stall(self, link: Link) -> None:
        """Who says that its gate is shut has its reason to be quiet."""
        stalled, member = self._living().scheduler.counts.stalled, link.member
        beat = member.beat if member is not None else None
        if stalled > self._stalled and beat is not None and (beat.shut_s is not None or not beat.gate_open):
            raise Violation(f"{link.name} is called stalled, and had said that its gate is shut")
        self._stalled = stalled

    def _hung_up(self, link: Link) -> None:
        self._links.pop(link, None)
        link.is_closed = True
        if link.member is not None:
            self._story.tell("gateway", f"has lost {link.name}")
            self._living().lost(link.member, self._loop.time())

    def _close(self, link: Link) -> None:
        """Now and then what was on its way is still read, as from a socket's buffer."""
        self._links.pop(link, None)
        if not link.is_closed:
            link.is_closed = True
            link.wire.ended_by_gateway(hears_the_rest=self._chance.random() < 0.5)

    # Clients

    def work(self, do: Callable[[], Awaitable[Answer]]) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = self._loop.create_future()
        if self._books is None:
            _refuse(answer, ConnectionRefusedError("nobody listens"))
            return answer
        life = self._life
        self.gate.enter(lambda: self._begin_work(life, do, answer))
        return answer

    def _begin_work(self, life: int, do: Callable[[], Awaitable[Answer]], answer: asyncio.Future[Answer]) -> None:
        if self._books is None or life != self._life or answer.done():
            _refuse(answer, ConnectionResetError("the gateway died"))
            return
        self._notice_gap()
        task: asyncio.Task[Answer] = asyncio.ensure_future(do())  # type: ignore[assignment]
        self._works[task] = answer
        task.add_done_callback(self._worked)
        answer.add_done_callback(lambda answer: task.cancel() if answer.cancelled() else None)

    def _worked(self, task: asyncio.Task[Any]) -> None:
        answer = self._works.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if answer is None or answer.done() or task.cancelled():
            return
        if error is not None:
            _refuse(answer, error)
        else:
            answer.set_result(task.result())

    async def begin(self, episode: Episode, group: str, group_size: int) -> None:
        books = self._living()
        books.begin(episode.trajectory_id, self._loop.time(), group=group, group_size=group_size, seed=episode.seed)
        await self._durable()

    async def turn(
        self, trajectory_id: str, prompt_ids: tuple[int, ...], sampling: Sampling, *, whole: bool
    ) -> Answered:
        books, mailbox = self._living(), Mailbox()
        counts, waiting = books.scheduler.counts, books.scheduler.waiting
        begun = counts.begun
        turn = books.ask(trajectory_id, prompt_ids, sampling, mailbox, self._loop.time(), whole=whole)
        request_id = f"{turn.key}#{turn.tries - 1}"
        if counts.begun > begun and waiting >= self._scenario.max_waiting:
            raise Violation(f"a turn was taken while {waiting} were waiting")
        self._look()
        try:
            return await self._read(mailbox, ends=int(whole))
        finally:
            turn.forget(request_id)

    async def finish(self, trajectory_id: str, finish: Finish) -> None:
        self._living().finish(trajectory_id, finish, self._loop.time())
        await self._durable()

    async def batch(self, groups: int, after: int, wait_s: float) -> Batch | None:
        books = self._living()
        try:
            async with asyncio.timeout(wait_s):
                while (found := books.batch(groups, after)) is None:
                    await self._news.wait()
        except TimeoutError:
            return None
        await self._durable()
        self._judge.given(found)
        return found

    async def publish(self, version: str) -> None:
        self._living().publish(self._shelf.put(version), self._loop.time())
        await self._durable()

    async def _durable(self) -> None:
        done: asyncio.Future[Unavailable | None] = self._loop.create_future()
        self._ledger.then(lambda trouble: None if done.done() else done.set_result(trouble))
        trouble = await done
        if trouble is not None:
            raise trouble

    async def _read(self, mailbox: Mailbox, ends: int) -> Answered:
        produced = Produced()
        while True:
            for event in await mailbox.take(ends=ends):
                produced.add(event.token_ids, event.logprobs, event.version)
                if event.finish_reason is not None:
                    return Answered(tuple(produced.token_ids), tuple(produced.logprobs), tuple(produced.spans))


def _refuse(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # seen: of a doubled request nobody looks at the answer
