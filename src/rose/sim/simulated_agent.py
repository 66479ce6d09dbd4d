"""The agent process of a simulated device: the real session and turn executor on a simulated connection.

It runs the session of `rose.worker.agent` (joining, heartbeats), `TurnExecutor`, `SendQueue`, `WeightUpdater` and
every frame's bytes. Simulated are the WebSocket, the pauses between connection attempts, the thread that receives
weights, and the clock by which a device reports its rate.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Any, TypeVar, cast

import aiohttp

from rose.api.worker_messages import CONNECT_PATH
from rose.errors import RoseError
from rose.observe.metrics import Metrics
from rose.sim.invariant_checker import EventLog
from rose.sim.network import Frame, NetworkGate, NetworkPlace, Wire
from rose.sim.simulated_handle import SimulatedHandle
from rose.weights.weight_metrics import ReceiveMetrics
from rose.worker.agent import PAUSE_FIRST_S, PAUSE_LONGEST_S, SILENCE_S, AgentSettings, Dismissed, GatewaySession, Moved
from rose.worker.weight_updater import WeightFetcher, WeightUpdater

PING, PONG = b"ping", b"pong"
UNSEEN = ReceiveMetrics(Metrics(process_facts=False))  # metrics that are not read
CONNECT_S = 5.0  # timeout of a connection that is neither accepted nor refused
Result = TypeVar("Result")

Accept = Callable[[str, NetworkPlace, Callable[[Frame], None]], Wire | None]
"""The gateway's listener: returns the wire of a new connection, or None if the gateway is down."""


class SimulatedConnection:
    """The agent's end of one connection, with the interface of aiohttp."""

    def __init__(self, agent: SimulatedAgent, accept: Accept | None = None) -> None:
        self._agent, self._accept = agent, accept or agent.accept
        self._inbox: asyncio.Queue[Frame] = asyncio.Queue()
        self._wire: Wire | None = None
        self._ping: asyncio.TimerHandle | None = None
        self._has_answered = True

    async def __aenter__(self) -> SimulatedConnection:
        agent = self._agent
        if agent.place.is_cut_off:
            await asyncio.sleep(CONNECT_S)
            raise ConnectionError("no answer")
        self._wire = self._accept(agent.name, agent.place, self._arrived)
        if self._wire is None:
            await asyncio.sleep(0.001)
            raise ConnectionRefusedError("the gateway is down")
        self._ping = asyncio.get_running_loop().call_later(SILENCE_S, self._check_silence)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._ping is not None:
            self._ping.cancel()
        if self._wire is not None:
            self._wire.close_by_agent(silently=self._agent.has_no_power)

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
        self._has_answered = True
        if frame != PONG:
            self._agent.gate.enter(lambda: self._inbox.put_nowait(frame))

    def _check_silence(self) -> None:
        """Ping a silent gateway; close if it did not answer the last ping."""
        if not self._has_answered:
            self._inbox.put_nowait(None)
            return
        assert self._wire is not None
        self._has_answered = False
        wire = self._wire
        self._agent.gate.enter(lambda: wire.up.send(PING))
        self._ping = asyncio.get_running_loop().call_later(SILENCE_S, self._check_silence)


class _Http:
    """The part of an HTTP client that a session uses."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self._agent = agent

    def ws_connect(self, url: str, **options: Any) -> SimulatedConnection:
        address = url.removesuffix(CONNECT_PATH)
        return SimulatedConnection(self._agent, self._agent.shards.get(address))


class _Inline(Executor):
    """An executor that runs work at once."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **named))
        return done


class _VirtualUpdater(WeightUpdater):
    """A weight updater whose weights arrive after a delay."""

    def __init__(self, engine: SimulatedHandle, arrivals: WeightFetcher, seconds: Callable[[], float]) -> None:
        super().__init__(engine, UNSEEN)
        self._thread.shutdown()
        self._thread = cast(Any, _Inline())
        self._fetcher, self._seconds = arrivals, seconds

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        await asyncio.sleep(self._seconds())
        return work()


class SimulatedAgent:
    """The agent of one device; `run` serves the gateway until it is cancelled or dismissed for good."""

    def __init__(
        self,
        settings: AgentSettings,
        engine: SimulatedHandle,
        gate: NetworkGate,
        arrivals: Callable[[], WeightFetcher],
        accept: Accept,
        chance: random.Random,
        log: EventLog,
    ) -> None:
        self.name, self.gate, self.place, self.accept = settings.name, gate, NetworkPlace(), accept
        self.has_no_power = False
        self.shards: Mapping[str, Accept] = {}  # the gateways by their addresses, if they are several
        self.clock_off_s = 0.0  # by which its clock jumped
        self.loading_s = (0.05, 0.4)
        self._settings, self._engine, self._arrivals = settings, engine, arrivals
        self._chance, self._log = chance, log

    async def run(self) -> None:
        self._engine.attach()
        updater = _VirtualUpdater(self._engine, self._arrivals(), lambda: self._chance.uniform(*self.loading_s))
        taking = asyncio.create_task(updater.run())
        try:
            await self._work(updater)
        finally:
            taking.cancel()

    async def _work(self, updater: WeightUpdater) -> None:
        pause_s, http = PAUSE_FIRST_S, cast(aiohttp.ClientSession, _Http(self))
        loop, settings = asyncio.get_running_loop(), self._settings.at_first()
        while True:
            began_s = loop.time()
            try:
                await GatewaySession(self._engine, settings, updater, lambda: loop.time() + self.clock_off_s).run(http)
            except Dismissed as reason:
                self._log.record(self.name, f"is dismissed: {reason}")
                return
            except Moved as move:
                self._log.record(self.name, f"moves to {move.settings.gateway}: {move}")
                settings, pause_s = move.settings, PAUSE_FIRST_S
                continue
            except (RoseError, OSError, TimeoutError) as error:
                self._log.record(self.name, f"has no gateway: {type(error).__name__} {getattr(error, 'what', error)}")
            if loop.time() - began_s > PAUSE_LONGEST_S:
                pause_s = PAUSE_FIRST_S
            await asyncio.sleep(pause_s * self._chance.uniform(0.5, 1.0))
            pause_s = min(PAUSE_LONGEST_S, 2 * pause_s)
