"""A device's agent: lives in the process that holds the device's engine for rollouts, and works for one gateway.

It opens one connection to the gateway, says who it is, and from then on runs the turns it is given, tells their tokens,
says how the device is, takes new weights, and has the rollout model parked or activated as the gateway asks; what the
device's owner says goes before that. Nothing is opened towards the device. When the connection is lost its
turns are forgotten here, since the gateway places them again with what it had received; then it dials again, with
growing pauses, for as long as the device lives. The weights are kept over all of that (`rollout.weights`). Whatever
happens here, the device goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, cast

import aiohttp

from rose.coserve import messages as engine_messages
from rose.errors import RoseError, Unavailable
from rose.front.handle import EngineHandle
from rose.observe.metrics import Metrics
from rose.rollout import messages
from rose.rollout.condition import Condition, join_of
from rose.rollout.messages import CONNECT_PATH, FRAME_BYTES_MAX, Kind
from rose.rollout.outbox import Outbox
from rose.rollout.runner import AgentEngine, TurnRunner
from rose.rollout.weights import Intake
from rose.weights.metrics import ReceiveMetrics

logger = logging.getLogger("rose.agent")

PAUSE_FIRST_S, PAUSE_LONGEST_S = 0.2, 5.0
WELCOME_S = 10.0
SILENCE_S = 10.0  # a gateway that does not answer a ping for this long is gone


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """`name` must be unlike that of every other worker of the gateway."""

    gateway: str
    token: str
    model: str
    kind: Kind
    seats: int
    name: str = ""

    @property
    def url(self) -> str:
        return self.gateway.rstrip("/") + CONNECT_PATH


class Dismissed(Exception):
    """The gateway wants no more of this worker."""


async def attend(engine: EngineHandle, metrics: Metrics, arguments: dict[str, Any]) -> None:
    """How a device starts its agent: by the name of this function and plain arguments."""
    await run_agent(cast(AgentEngine, engine), AgentSettings(**arguments), metrics)


async def run_agent(engine: AgentEngine, settings: AgentSettings, metrics: Metrics | None = None) -> None:
    """Work for the gateway until cancelled, or until it sends this worker away for good."""
    intake = Intake(engine, ReceiveMetrics(metrics or Metrics(process_facts=False)))
    works = {asyncio.create_task(intake.run()), asyncio.create_task(_work_for(engine, settings, intake))}
    await first_of(works)


async def first_of(tasks: set[asyncio.Task[None]]) -> None:
    """Wait until one of these ends, and end the others. Raises what it ended with."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _work_for(engine: AgentEngine, settings: AgentSettings, intake: Intake) -> None:
    pause_s, last_words = PAUSE_FIRST_S, ""
    async with aiohttp.ClientSession() as http:
        while True:
            began_s = time.monotonic()
            try:
                await GatewaySession(engine, settings, intake).run(http)
            except Dismissed as word:
                logger.warning("the gateway sent this worker away: %s", word)
                return
            except Exception as error:
                if not isinstance(error, RoseError | aiohttp.ClientError | OSError | TimeoutError):
                    logger.exception("the connection to the gateway ended by an error of this worker")
                words = _words(settings, error)
                if words != last_words:
                    logger.warning("%s; trying again", words)
                last_words = words
            if time.monotonic() - began_s > PAUSE_LONGEST_S:
                pause_s, last_words = PAUSE_FIRST_S, ""
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(PAUSE_LONGEST_S, 2 * pause_s)


class GatewaySession:
    """One connection, from joining to losing it."""

    def __init__(
        self,
        engine: AgentEngine,
        settings: AgentSettings,
        intake: Intake,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._settings, self._intake, self._now_s = engine, settings, intake, now_s
        self._errands: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()  # of lending, which the gateway should hear before the next beat
        self._told: tuple[object, ...] = ()
        self._has_failed = asyncio.Event()
        self._failure: BaseException | None = None
        self._outbox: Outbox
        self._runner: TurnRunner
        self._condition: Condition

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Raises what ended it."""
        headers = {"Authorization": f"Bearer {self._settings.token}"}
        async with http.ws_connect(
            self._settings.url, headers=headers, max_msg_size=FRAME_BYTES_MAX, heartbeat=SILENCE_S, compress=0
        ) as connection:
            self._outbox = Outbox(connection.send_bytes)
            self._outbox.put(self._join())
            await self._outbox.flush()
            async with asyncio.timeout(WELCOME_S):
                orders = _decoded(await connection.receive())
            self._runner = TurnRunner(self._engine, self._outbox.put, self._now_s)
            self._condition = Condition(self._engine, self._runner.rates, lambda: self._intake.hash, self._now_s())
            self._intake.tell, self._engine.on_lending = self._tell_version, self._hear_lending
            try:
                for order in orders:
                    self._obey(order)  # it may be told to leave, and why
                if not orders or not isinstance(orders[0], messages.Welcome):
                    raise Unavailable("the gateway did not say welcome")
                logger.info("joined the gateway at %s", self._settings.gateway)
                await self._work(connection, orders[0].beat_s)
            finally:
                self._intake.tell = lambda ready: None  # the next gateway hears of it when it is joined
                self._engine.on_lending = lambda: None
                self._runner.close()

    async def _work(self, connection: aiohttp.ClientWebSocketResponse, beat_s: float) -> None:
        """The first of these that ends, ends all."""
        works = (self._outbox.run(), self._beat(beat_s), self._look(beat_s), self._listen(connection), self._failed())
        try:
            await first_of({asyncio.create_task(work) for work in works})
        finally:
            for task in self._errands:
                task.cancel()
            await asyncio.gather(*self._errands, return_exceptions=True)

    def _join(self) -> messages.Join:
        known = self._settings
        return join_of(self._engine, known.name, known.kind, known.model, known.seats, self._intake.hash)

    async def _listen(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            for message in _decoded(await connection.receive()):
                self._obey(message)

    def _obey(self, message: messages.ToAgent) -> None:
        match message:
            case messages.Turn():
                self._runner.start(message)
            case messages.Cancel():
                self._runner.cancel(message.ticket)
            case messages.Evict():
                self._run(self._runner.evict(message.ticket))
            case messages.Activate() | messages.Park():
                self._run(self._want(isinstance(message, messages.Activate)))
            case messages.NewVersion():
                self._intake.want(message)
            case messages.Leave():
                if message.retry_s is None:
                    raise Dismissed(message.why)
                raise Unavailable(f"the gateway will not have this worker now: {message.why}")
            case messages.Welcome():
                pass

    def _run(self, errand: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._on_errand_done)

    def _on_errand_done(self, task: asyncio.Task[None]) -> None:
        self._errands.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._has_failed.set()

    async def _failed(self) -> None:
        """Raise what an errand failed with."""
        await self._has_failed.wait()
        assert self._failure is not None
        raise self._failure

    async def _want(self, is_wanted: bool) -> None:
        """What comes of it is told like any other news of the device; the gateway asks again if it must."""
        try:
            await self._engine.ask(engine_messages.Want(is_wanted))
        except RoseError as error:
            logger.warning("the rollout model is not %s: %s", "activated" if is_wanted else "parked", error.what)

    async def _beat(self, beat_s: float) -> None:
        """Every so often, and at once when lending has changed."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(beat_s):
                    await self._news.wait()
            self._news.clear()
            self._outbox.put(self._condition.beat(self._now_s()))

    async def _look(self, beat_s: float) -> None:
        """Ask a lent device how it stands. One that hangs does not answer; its beats go on with what was known."""
        while self._settings.kind == "borrowed":
            with contextlib.suppress(RoseError):
                await self._engine.ask(engine_messages.GetFacts(0))
            await asyncio.sleep(beat_s)
        await asyncio.get_running_loop().create_future()

    def _hear_lending(self) -> None:
        self._condition.heard(self._now_s())
        status = self._engine.lending_status
        told = (status.state, status.model, status.is_resting, status.shut_s is None) if status is not None else ()
        if told != self._told:
            self._told = told
            self._news.set()

    def _tell_version(self, ready: messages.VersionReady) -> None:
        self._runner.flush()  # tokens drawn before it are told before it
        self._outbox.put(ready)


def _decoded(message: aiohttp.WSMessage) -> list[messages.ToAgent]:
    if message.type is aiohttp.WSMsgType.BINARY:
        return messages.decode_to_agent(message.data)
    if message.type is aiohttp.WSMsgType.ERROR:
        raise Unavailable(f"the connection to the gateway broke: {message.data}")
    raise Unavailable("the gateway closed the connection")


def _words(settings: AgentSettings, error: BaseException) -> str:
    if isinstance(error, aiohttp.WSServerHandshakeError) and error.status == 401:
        return f"the gateway at {settings.gateway} does not know this worker's token (ROSE_WORKER_TOKEN)"
    if isinstance(error, RoseError):
        return error.what
    if isinstance(error, TimeoutError):
        return f"the gateway at {settings.gateway} does not answer"
    return f"the gateway at {settings.gateway} cannot be reached: {getattr(error, 'strerror', None) or error}"
