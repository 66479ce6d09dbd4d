"""The whole control plane in virtual time: one seed, one story.

A world has a gateway with its real books and ledger, dedicated and borrowed devices with their real agents, lenders and
batching, players and a trainer, and trouble of every kind. For some time trouble is let; then all is calm, the trainer
ends its last step, and everything that was begun must come to its end. A judge looks at every word on the way.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rose.clock import VirtualClock, run_virtual
from rose.rollout.agent import AgentSettings
from rose.sim.agent import SimulatedAgent
from rose.sim.dedicated import DedicatedDevice
from rose.sim.episodes import Episode
from rose.sim.faults import Trouble
from rose.sim.gate import Gate
from rose.sim.gateway import MODEL, SimulatedGateway
from rose.sim.handle import SimulatedHandle
from rose.sim.judge import Judge
from rose.sim.lent import Lending, LentDevice
from rose.sim.machine import Machine
from rose.sim.players import Player, Trainer
from rose.sim.scenario import Scenario
from rose.sim.shelf import Shelf, ShelfArrivals
from rose.sim.story import Story, Violation
from rose.sim.wire import Line, Weather

CALM_S = 400.0  # all that is under way when trouble ends has this long to come to its end
SETTLE_S = 30.0  # and devices this long to notice


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a world. `violation` is empty if everything held."""

    scenario: Scenario
    violation: str
    last_lines: tuple[str, ...]
    story_digest: str
    data_digest: str
    data: dict[str, str]  # digests of what was handed out, by trajectory
    counts: dict[str, int]
    virtual_s: float

    @property
    def is_fine(self) -> bool:
        return not self.violation


class World:
    """To be made and run inside a virtual loop."""

    def __init__(self, scenario: Scenario, listen: Callable[[str], None] | None, host: type[SimulatedGateway]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._unhandled)
        self._scenario = scenario
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self.story, self.judge = Story(self._loop.time, listen), Judge(scenario)
        self._shelf, self._weather = Shelf(), Weather()
        self.gateway = host(scenario, self._shelf, self.judge, self.story, self._chance("gateway"))
        self.machines = [self._machine(number) for number in range(scenario.dedicated + scenario.borrowed)]
        self._trainer = Trainer(
            self.gateway, self.judge, scenario, self._play, "trainer", self._line("trainer"), self._chance("trainer"),
            self.story,
        )  # fmt: skip
        self._playing: set[asyncio.Task[None]] = set()
        self._trouble = Trouble(
            self.machines, self.gateway, self._weather, self._shelf, self._chance("trouble"), self.story,
            scenario,
        )  # fmt: skip

    async def run(self) -> Report:
        violation = ""
        try:
            await self._live()
        except AssertionError as error:
            violation = str(error) or f"an assertion in {_where(error)}"
            self.story.tell("the judge", f"VIOLATION: {violation}")
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.gateway.close()
            self._shelf.close()
            for machine in self.machines:
                if isinstance(machine.handle, LentDevice):
                    machine.handle.close_memory()
        return self._report(violation)

    async def _live(self) -> None:
        self.gateway.start()
        for machine in self.machines:
            machine.start()
        training = self.spawn(self._trainer.train(), "trainer")
        trouble = self.spawn(self._trouble.run(), "trouble")
        await self._unless_failed(asyncio.sleep(self._scenario.trouble_s))
        trouble.cancel()
        self._trouble.end()
        self._trainer.is_stopping = True
        await self._unless_failed(self._all_done(training))
        self.judge.check_all_done()
        await self._unless_failed(asyncio.sleep(SETTLE_S))
        self.gateway.check_idle()
        for machine in self.machines:
            if machine.handle.requests:
                raise Violation(f"{machine.name} still holds {machine.handle.requests} turns that nobody waits for")

    async def _all_done(self, training: asyncio.Task[None]) -> None:
        try:
            async with asyncio.timeout(CALM_S):
                await training
                while self._playing:
                    await asyncio.wait(self._playing)
        except TimeoutError:
            raise Violation(f"{CALM_S:g} s after all trouble ended not everything is done") from None

    async def _unless_failed(self, wait: Coroutine[Any, Any, None]) -> None:
        waiting = asyncio.ensure_future(wait)
        try:
            await asyncio.wait([waiting, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            waiting.result()
        finally:
            waiting.cancel()

    # Who is there

    def _machine(self, number: int) -> Machine:
        scenario, is_borrowed = self._scenario, number >= self._scenario.dedicated
        name = f"borrowed-{number}" if is_borrowed else f"dedicated-{number}"
        gate = Gate()
        handle = self._handle(number, is_borrowed, gate)
        settings = AgentSettings("", "", MODEL, "borrowed" if is_borrowed else "dedicated", scenario.seats, name)
        agent = SimulatedAgent(
            settings,
            handle,
            gate,
            lambda: ShelfArrivals(self._shelf, name),
            self.gateway.accept,
            self._chance(name),
            self.story,
        )
        return Machine(name, handle, agent, self.spawn, self.story, is_borrowed=is_borrowed)

    def _handle(self, number: int, is_borrowed: bool, gate: Gate) -> SimulatedHandle:
        scenario = self._scenario
        if not is_borrowed:
            return DedicatedDevice(gate, self._chance(f"engine {number}"), scenario.kv_blocks)
        seed = scenario.seed * 1000 + number
        until_s = scenario.trouble_s
        return LentDevice(gate, Lending(scenario.mode, scenario.traffic, scenario.pages, seed, until_s))

    def _play(self, episode: Episode) -> None:
        name = episode.trajectory_id
        player = Player(
            episode, self.gateway, self.judge, self._scenario, name, self._line(name), self._chance(name), self.story
        )
        task = self.spawn(player.play(), f"player {name}")
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)

    def _line(self, name: str) -> Line:
        return Line(self.gateway, self._weather, self._chance(f"line {name}"))

    def _chance(self, name: str) -> random.Random:
        return random.Random(f"{name} {self._scenario.seed}")

    # What goes wrong where it must not

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._fail(error if error is not None else RuntimeError(context.get("message", "")))

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            if not isinstance(error, AssertionError):
                error = Violation(f"{type(error).__name__}: {error} ({_where(error)})").with_traceback(
                    error.__traceback__
                )
            self._failed.set_exception(error)

    def _report(self, violation: str) -> Report:
        counts = dict(self.gateway.counts) | {
            "trajectories": len(self.judge.data),
            "batches": self._trainer.batches,
            "tokens_checked": self.judge.checked_tokens,
            "lent_steps": sum(m.handle.lent_steps for m in self.machines if isinstance(m.handle, LentDevice)),
            "served": sum(m.handle.served for m in self.machines if isinstance(m.handle, LentDevice)),
        }
        return Report(
            self._scenario,
            violation,
            tuple(self.story.last),
            self.story.digest,
            self.judge.digest,
            self.judge.data,
            counts,
            self._loop.time(),
        )


def simulate(
    scenario: Scenario, *, listen: Callable[[str], None] | None = None, host: type[SimulatedGateway] | None = None
) -> Report:
    """One world, from its beginning to its end. `host` replaces the gateway, to see that a broken one is caught."""

    async def live() -> Report:
        return await World(scenario, listen, host or SimulatedGateway).run()

    with _quiet("rose.agent"):
        return run_virtual(live(), VirtualClock())


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """What a simulated process would log is in the story."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _where(error: BaseException) -> str:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}" if at is not None else "nowhere"
