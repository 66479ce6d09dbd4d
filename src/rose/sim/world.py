"""The whole control plane in virtual time: one seed is one world.

A world has a gateway with its real core and ledger, dedicated and borrowed devices with their real agents, step
arbiters and batching, players, a trainer, and faults of every kind. Faults end after some time. Then the trainer ends
its last step, and everything that was begun must end. An invariant checker sees every message.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rose.api.worker_messages import Kind
from rose.clock import VirtualClock, run_virtual
from rose.sim.borrowed_device import LentDevice, SimulatedLending
from rose.sim.faults import FaultInjector, Machine
from rose.sim.invariant_checker import EventLog, InvariantChecker, Violation
from rose.sim.network import ClientLine, NetworkFaults, NetworkGate
from rose.sim.players import Player, SimulatedTrainer
from rose.sim.scenario import Scenario, SimulatedEpisode
from rose.sim.simulated_agent import SimulatedAgent
from rose.sim.simulated_gateway import MODEL, SimulatedGateway
from rose.sim.simulated_handle import CoarseDevice, DedicatedDevice, SimulatedHandle
from rose.sim.weight_store import StoreFetcher, WeightStore
from rose.worker.agent import AgentSettings

CALM_S = 400.0  # in which everything must end after the last fault
SETTLE_S = 30.0  # in which devices must notice that


@dataclass(frozen=True, slots=True)
class WorldReport:
    """The result of a world. `violation` is empty if every invariant held."""

    scenario: Scenario
    violation: str
    last_lines: tuple[str, ...]
    story_digest: str
    data: dict[str, str]  # digests of the delivered trajectories
    counts: dict[str, int]
    virtual_s: float

    @property
    def is_fine(self) -> bool:
        return not self.violation


class ClusterWorld:
    """The parts of a world; created and run inside a virtual loop."""

    def __init__(self, scenario: Scenario, listen: Callable[[str], None] | None, host: type[SimulatedGateway]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._unhandled)
        self._scenario = scenario
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self.log, self.checker = EventLog(self._loop.time, listen), InvariantChecker(scenario)
        self._store, self._network_faults = WeightStore(), NetworkFaults()
        self.gateway = host(scenario, self._store, self.checker, self.log, self._chance("gateway"))
        self.machines = [self._machine(number) for number in range(scenario.dedicated + scenario.borrowed)]
        self._trainer = SimulatedTrainer(
            self.gateway, self.checker, scenario, self._play, "trainer", self._line("trainer"), self._chance("trainer"),
            self.log,
        )  # fmt: skip
        self._playing: set[asyncio.Task[None]] = set()
        self._faults = FaultInjector(
            self.machines, self.gateway, self._network_faults, self._store, self._chance("trouble"), self.log,
            scenario,
        )  # fmt: skip

    async def run(self) -> WorldReport:
        violation = ""
        try:
            await self._live()
        except AssertionError as error:
            violation = str(error) or f"an assertion in {_where(error)}"
            self.log.record("checker", f"VIOLATION: {violation}")
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.gateway.close()
            self._store.close()
            for machine in self.machines:
                if isinstance(machine.handle, LentDevice):
                    machine.handle.close_memory()
        return self._report(violation)

    async def _live(self) -> None:
        self.gateway.start()
        for machine in self.machines:
            machine.start()
        training = self.spawn(self._trainer.train(), "trainer")
        trouble = self.spawn(self._faults.run(), "trouble")
        await self._until_failed(asyncio.sleep(self._scenario.trouble_s))
        trouble.cancel()
        self._faults.end()
        self._trainer.is_stopping = True
        await self._until_failed(self._all_done(training))
        self.checker.check_all_done()
        await self._until_failed(asyncio.sleep(SETTLE_S))
        self.gateway.check_idle()
        for machine in self.machines:
            if machine.handle.requests:
                raise Violation(f"{machine.name} still holds {machine.handle.requests} turns without a client")

    async def _all_done(self, training: asyncio.Task[None]) -> None:
        try:
            async with asyncio.timeout(CALM_S):
                await training
                while self._playing:
                    await asyncio.wait(self._playing)
        except TimeoutError:
            raise Violation(f"{CALM_S:g} s after the last fault not everything has ended") from None

    async def _until_failed(self, wait: Coroutine[Any, Any, None]) -> None:
        waiting = asyncio.ensure_future(wait)
        try:
            await asyncio.wait([waiting, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            waiting.result()
        finally:
            waiting.cancel()

    # Parts

    def _machine(self, number: int) -> Machine:
        scenario, gate = self._scenario, NetworkGate()
        is_borrowed = number >= scenario.dedicated
        kind: Kind = "borrowed" if is_borrowed else "dedicated"
        name = f"{kind}-{number}"
        handle: SimulatedHandle
        if is_borrowed:
            seed = scenario.seed * 1000 + number
            lending = SimulatedLending(scenario.mode, scenario.traffic, scenario.pages, seed, scenario.trouble_s)
            handle = LentDevice(gate, lending)
        elif scenario.coarseness > 1:
            chance = self._chance(f"engine {number}")
            handle = CoarseDevice(gate, chance, scenario.kv_blocks, scenario.coarseness)
        else:
            handle = DedicatedDevice(gate, self._chance(f"engine {number}"), scenario.kv_blocks)
        settings = AgentSettings(self.gateway.address, "", MODEL, kind, scenario.max_concurrency, name)
        agent = SimulatedAgent(
            settings, handle, gate, lambda: StoreFetcher(self._store, name), self.gateway.accept, self._chance(name),
            self.log,
        )  # fmt: skip
        agent.shards = self.gateway.listeners
        return Machine(name, handle, agent, self.spawn, self.log, is_borrowed=is_borrowed)

    def _play(self, episode: SimulatedEpisode) -> None:
        name = episode.trajectory_id
        player = Player(
            episode, self.gateway, self.checker, self._scenario, name, self._line(name), self._chance(name), self.log
        )
        task = self.spawn(player.play(), f"player {name}")
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)

    def _line(self, name: str) -> ClientLine:
        return ClientLine(self.gateway, self._network_faults, self._chance(f"line {name}"))

    def _chance(self, name: str) -> random.Random:
        return random.Random(f"{name} {self._scenario.seed}")

    # Unexpected errors

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
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

    def _report(self, violation: str) -> WorldReport:
        lent = [machine.handle for machine in self.machines if isinstance(machine.handle, LentDevice)]
        counts = dict(self.gateway.counts) | {
            "trajectories": len(self.checker.data),
            "batches": self._trainer.batches,
            "tokens_checked": self.checker.checked_tokens,
            "lent_steps": sum(device.lent_steps for device in lent),
            "served": sum(device.served for device in lent),
        }
        last, digest = tuple(self.log.last), self.log.digest
        return WorldReport(self._scenario, violation, last, digest, self.checker.data, counts, self._loop.time())


def simulate(
    scenario: Scenario, *, listen: Callable[[str], None] | None = None, host: type[SimulatedGateway] | None = None
) -> WorldReport:
    """Run one world. Tests pass a `host` with a defect, which must be caught."""

    async def live() -> WorldReport:
        return await ClusterWorld(scenario, listen, host or SimulatedGateway).run()

    logger = logging.getLogger("rose.agent")
    before, logger.disabled = logger.disabled, True  # the event log has its messages
    try:
        return run_virtual(live(), VirtualClock())
    finally:
        logger.disabled = before


def _where(error: BaseException) -> str:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}" if at is not None else "nowhere"
