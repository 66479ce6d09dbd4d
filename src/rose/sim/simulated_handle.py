"""The engine of a simulated device and its client, in one object: the counterpart of a supervised engine process.

Commands take effect between two steps, in the order in which they came, so an agent sees their effect when it would see
a real engine's. Dedicated and lent devices differ in their steps: `_next_step` chooses one and returns its duration,
`_end_step` delivers its tokens. The engine can be stopped for a while (`gate`) and can die: then every request and call
fails with Unavailable, until `restart` creates an engine with the weights that the device was started with.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence

from rose.engines.base import Budget, EngineEvents, EngineFacts, LendingStatus, Request, Stepped, StepPlan, TokenEvent
from rose.engines.token_stream import SinkTable, TokenSink
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.sim.models import ROLLOUT_SLOWER, slowed
from rose.sim.network import NetworkGate
from rose.sim.token_oracle import LawfulEngine

ASK_AGAIN_S = 0.05  # as the executor of a lent device
STAGING_S = 0.02


def folder_of(weights: int) -> str:
    """Return the folder of weights that have arrived; its name is its content."""
    return f"arrived/{weights}"


def weights_in(folder: str) -> int:
    return int(folder.rpartition("/")[2])


class SimulatedHandle:
    """An `EngineClient`. One per device; `run` is its engine process."""

    def __init__(self, agents_gate: NetworkGate) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.events = EngineEvents()
        self.lending_status: LendingStatus | None = None
        self.gate = NetworkGate()
        self.reply_s = 0.0  # until the agent's process has read an answer, while steps go on
        self.trouble: Unavailable | None = None
        self._agents_gate, self._has_died = agents_gate, False
        self._sinks = SinkTable()
        self._commands: list[Callable[[], object]] = []
        self._awake = asyncio.Event()
        self._calls: list[asyncio.Future[None]] = []
        self._staged: tuple[str, int] | None = None
        self.engine = self._fresh()
        self._facts = self.engine.facts()

    def _fresh(self) -> LawfulEngine:
        raise AssertionError("a subclass creates its engine")

    def attach(self) -> None:
        """Do what an agent's process causes when it starts."""

    # The agent's side

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        if self.trouble is not None:
            raise self.trouble
        self._sinks.add(requests, sink)
        for request in requests:
            self._between_steps(lambda request=request: self._add(request))  # type: ignore[misc]

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            self._sinks.remove(request_id)
            self._between_steps(lambda name=request_id: self.engine.cancel(name))  # type: ignore[misc]

    async def evict(self, request_id: str) -> None:
        await self._call(lambda: self._evict(request_id))

    async def stage(self, version: str, folder: str) -> None:
        if self.trouble is not None:
            raise self.trouble
        engine = self.engine
        await asyncio.sleep(STAGING_S)
        if self.trouble is not None or self.engine is not engine:
            raise self.trouble or Unavailable("the engine was restarted meanwhile")
        self._staged = version, weights_in(folder)

    async def commit(self, version: str) -> None:
        await self._call(lambda: self._commit(version))

    async def set_wanted(self, is_wanted: bool) -> None:
        await self._call(lambda: self._want(is_wanted))

    async def query(self) -> EngineFacts:
        await self._call(lambda: None)
        return self._facts

    async def close(self) -> None:
        self.die("the device is shutting down")

    # The engine process

    async def run(self) -> None:
        while True:
            self._awake.clear()
            commands, self._commands = self._commands, []
            for command in commands:
                command()
            step_s = self._next_step(asyncio.get_running_loop().time()) if not self.gate.is_stopped else None
            if step_s is None:
                await self._sleep()
            else:
                await asyncio.sleep(step_s)
                await self._until_running()
                self._end_step(asyncio.get_running_loop().time())

    def die(self, why: str) -> None:
        """End the process: every request and every call fails."""
        self.trouble, self._has_died = Unavailable(why), True
        self._commands.clear()
        self.gate.clear()
        for done in self._calls:
            if not done.done():
                done.set_exception(Unavailable(why))
                done.exception()  # seen: its caller may be gone
        self._calls.clear()
        self._sinks.fail_all(Unavailable(why))

    def restart(self) -> None:
        """Make a fresh engine after a death."""
        if not self._has_died:
            return
        self.engine, self._staged, self.trouble, self._has_died = self._fresh(), None, None, False
        self._facts = self.engine.facts()
        self._awake.set()

    @property
    def requests(self) -> int:
        """The number of rollouts that the engine holds."""
        facts = self.engine.facts()
        return facts.running + facts.waiting

    async def _until_running(self) -> None:
        while self.gate.is_stopped:
            going: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.gate.enter(lambda: None if going.done() else going.set_result(None))  # noqa: B023
            await going

    async def _sleep(self) -> None:
        await self._until_running()
        wait_s = self._wait_s(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(wait_s):
                await self._awake.wait()
        except TimeoutError:
            return

    def _wait_s(self, now_s: float) -> float | None:
        """Return for how long there is nothing to do unless a command comes."""
        return ASK_AGAIN_S if self.requests else None

    def _next_step(self, now_s: float) -> float | None:
        """Choose the step that begins now, and return its duration; None if there is none to run."""
        raise AssertionError("a subclass chooses its steps")

    def _end_step(self, now_s: float) -> None:
        raise AssertionError("a subclass runs its steps")

    # Commands

    async def _call(self, work: Callable[[], None]) -> None:
        """Run `work` between two steps, and wait until it is done and the answer has been read."""
        if self.trouble is not None:
            raise self.trouble
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def run() -> None:
            self._calls.remove(done)
            if done.done():  # its caller has gone
                return
            try:
                work()
            except RoseError as error:
                done.set_exception(error)
                return
            self._facts = self.engine.facts()
            self._tell_lending()
            done.set_result(None)

        self._calls.append(done)
        self._between_steps(run)
        await done
        await asyncio.sleep(self.reply_s)

    def _between_steps(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._awake.set()

    def _add(self, request: Request) -> None:
        if request.request_id not in self._sinks:
            return
        try:
            self.engine.add(request)
        except RoseError as error:
            self._sinks.fail(request.request_id, error)

    def _commit(self, version: str) -> None:
        if self._staged is None or self._staged[0] != version:
            raise RequestRefused(f"version {version!r} is not staged")
        self.engine.swap(version)
        self.engine.weights, self._staged = self._staged[1], None
        self._swapped()

    def _evict(self, request_id: str) -> None:
        try:
            self.engine.evict(request_id)
        except KeyError:  # it has ended
            return
        self.tell([TokenEvent(request_id, (), (), self.engine.facts().version, "abort")])

    def _swapped(self) -> None:
        """Do what new weights cause on this device."""

    def _want(self, is_wanted: bool) -> None:
        """Park or activate the rollout model; only a lent device does."""

    def _tell_lending(self) -> None:
        """Publish how the device is lent, if it is."""

    def tell(self, events: Sequence[TokenEvent], tokens: int = 0, seconds: float = 0.0) -> None:
        """Deliver what a step added; a stopped agent's process gets it when it continues."""
        stepped = Stepped(tuple(events), self.engine.facts(), tokens, seconds)

        def deliver() -> None:
            self._facts = stepped.facts
            for event in stepped.events:
                self.cancel(self._sinks.deliver(event))
            self.events.steps.publish(stepped)

        self._agents_gate.enter(deliver)


WIDE = Budget(512, 64)


class DedicatedDevice(SimulatedHandle):
    """A handle whose engine runs rollouts only."""

    def __init__(self, agents_gate: NetworkGate, chance: random.Random, kv_blocks: int) -> None:
        self._chance, self._kv_blocks = chance, kv_blocks
        self._plan: StepPlan | None = None
        self._step_s = 0.0
        self.slower = 1.0  # factor on every step's time
        super().__init__(agents_gate)

    def _fresh(self) -> LawfulEngine:
        return LawfulEngine(slowed("cpu-frozenlake-1m", ROLLOUT_SLOWER), kv_blocks=self._kv_blocks)

    def _next_step(self, now_s: float) -> float | None:
        self._plan = self.engine.plan(WIDE)
        if self._plan is None:
            return None
        self._step_s = self.slower * self.engine.cost_s(self._plan) * self._chance.lognormvariate(0, 0.05)
        return self._step_s

    def _end_step(self, now_s: float) -> None:
        assert self._plan is not None
        self.tell(self.engine.step(self._plan), self._plan.features.new_tokens, self._step_s)


class CoarseDevice(DedicatedDevice):
    """A dedicated device for worlds of thousands: `coarseness` steps are one event, and each takes as much longer.

    It plans, batches and samples step by step as any other. Steps are delivered together, at the latest when a turn
    ends, and commands take effect between two events.
    """

    def __init__(self, agents_gate: NetworkGate, chance: random.Random, kv_blocks: int, coarseness: int) -> None:
        super().__init__(agents_gate, chance, kv_blocks)
        self.slower = float(coarseness)
        self._coarseness = coarseness
        self._steps: list[tuple[Sequence[TokenEvent], int, float]] = []

    def _next_step(self, now_s: float) -> float | None:
        seconds = 0.0
        while len(self._steps) < self._coarseness and super()._next_step(now_s) is not None:
            assert self._plan is not None
            events = self.engine.step(self._plan)
            self._steps.append((events, self._plan.features.new_tokens, self._step_s))
            seconds += self._step_s
            if any(event.finish_reason is not None for event in events):
                break
        return seconds if self._steps else None

    def _end_step(self, now_s: float) -> None:
        steps, self._steps = self._steps, []
        for step in steps:
            self.tell(*step)
