"""The agent's process on a simulated device: the real session and turn runner, on a connection that is made up.

What is real: `rose.rollout.agent`'s session (joining, beats, obeying), `TurnRunner`, `Outbox`, `Intake`, and the frames
byte by byte. What is made up: the WebSocket, the pauses between two tries to connect, the thread in which weights
arrive, and the clock by which a device tells its own rate.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Any, TypeVar, cast

import aiohttp

from rose.errors import RoseError
from rose.observe.metrics import Metrics
from rose.rollout.agent import PAUSE_FIRST_S, PAUSE_LONGEST_S, SILENCE_S, AgentSettings, Dismissed, GatewaySession
from rose.rollout.weights import Arrivals, Intake
from rose.sim.gate import Gate
from rose.sim.handle import SimulatedHandle
from rose.sim.story import Story
from rose.sim.wire import Frame, Place, Wire
from rose.weights.metrics import ReceiveMetrics

PING, PONG = b"ping", b"pong"
UNSEEN = ReceiveMetrics(Metrics(process_facts=False))  # nobody looks at a simulated device's figures
CONNECT_S = 5.0  # how long one waits for a connection that nobody refuses
Result = TypeVar("Result")

Accept = Callable[[str, Place, Callable[[Frame], None]], Wire | None]
"""The gateway's ear: the wire of a new connection, or None if nobody listens there."""


class Connection:
    """The agent's end of one connection, as aiohttp would show it."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self._agent = agent
        self._inbox: asyncio.Queue[Frame] = asyncio.Queue()
        self._wire: Wire | None = None
        self._ping: asyncio.TimerHandle | None = None
        self._is_heard = True

    async def __aenter__(self) -> Connection:
        agent = self._agent
        if agent.place.is_cut_off:
            await asyncio.sleep(CONNECT_S)
            raise ConnectionError("no answer")
        self._wire = agent.accept(agent.name, agent.place, self._arrived)
        if self._wire is None:
            await asyncio.sleep(0.001)
            raise ConnectionRefusedError("nobody listens")
        self._ping = asyncio.get_running_loop().call_later(SILENCE_S, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._ping is not None:
            self._ping.cancel()
        if self._wire is not None:
            self._wire.ended_by_agent(silently=self._agent.has_no_power)

    async def send_bytes(self, frame: bytes) -> None:
        wire = self._wire
        assert wire is not None
        self._agent.gate.enter(lambda: wire.up.send(frame))

    async def receive(self) -> aiohttp.WSMessage:
        frame = await self._inbox.get()
        if frame is None:
            return aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None)
        return aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, frame, None)

    def _arrived(self, frame: Frame) -> None:
        self._is_heard = True
        if frame != PONG:
            self._agent.gate.enter(lambda: self._inbox.put_nowait(frame))

    def _look(self) -> None:
        """A gateway that says nothing and answers no ping is gone."""
        if not self._is_heard:
            self._inbox.put_nowait(None)
            return
        assert self._wire is not None
        self._is_heard = False
        wire = self._wire
        self._agent.gate.enter(lambda: wire.up.send(PING))
        self._ping = asyncio.get_running_loop().call_later(SILENCE_S, self._look)


class _Http:
    """What a session needs of an HTTP client."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self._agent = agent

    def ws_connect(self, url: str, **options: Any) -> Connection:
        return Connection(self._agent)


class _Inline(Executor):
    """A thread that takes no time of its own."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **named))
        return done


class _VirtualIntake(Intake):
    """Weights arrive after a while."""

    def __init__(self, engine: SimulatedHandle, arrivals: Arrivals, seconds: Callable[[], float]) -> None:
        super().__init__(engine, UNSEEN)
        self._thread.shutdown()
        self._thread = cast(Any, _Inline())
        self._arrivals, self._seconds = arrivals, seconds

    async def _aside(self, work: Callable[[], Result]) -> Result:
        await asyncio.sleep(self._seconds())
        return work()


class SimulatedAgent:
    """`run` is its process: it works for the gateway until it is cancelled or sent away for good."""

    def __init__(
        self,
        settings: AgentSettings,
        handle: SimulatedHandle,
        gate: Gate,
        arrivals: Callable[[], Arrivals],
        accept: Accept,
        chance: random.Random,
        story: Story,
    ) -> None:
        self.name, self.gate, self.place, self.accept = settings.name, gate, Place(), accept
        self.has_no_power = False
        self.clock_off_s = 0.0  # by which its clock has jumped
        self.loading_s = (0.05, 0.4)
        self._settings, self._handle, self._arrivals = settings, handle, arrivals
        self._chance, self._story = chance, story

    async def run(self) -> None:
        self._handle.attach()
        intake = _VirtualIntake(self._handle, self._arrivals(), lambda: self._chance.uniform(*self.loading_s))
        taking = asyncio.create_task(intake.run())
        try:
            await self._work(intake)
        finally:
            taking.cancel()

    async def _work(self, intake: Intake) -> None:
        pause_s, http = PAUSE_FIRST_S, cast(aiohttp.ClientSession, _Http(self))
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                await GatewaySession(self._handle, self._settings, intake, lambda: loop.time() + self.clock_off_s).run(
                    http
                )
            except Dismissed as word:
                self._story.tell(self.name, f"is sent away: {word}")
                return
            except (RoseError, OSError, TimeoutError) as error:
                self._story.tell(self.name, f"has no gateway: {type(error).__name__} {getattr(error, 'what', error)}")
            if loop.time() - began_s > PAUSE_LONGEST_S:
                pause_s = PAUSE_FIRST_S
            await asyncio.sleep(pause_s * self._chance.uniform(0.5, 1.0))
            pause_s = min(PAUSE_LONGEST_S, 2 * pause_s)
