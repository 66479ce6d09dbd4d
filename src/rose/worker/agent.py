"""A device's agent: runs in the process that holds the engine client for rollouts, and works for one gateway.

It opens one connection to the gateway, registers, and from then on runs turns, sends their tokens and heartbeats,
installs weights, and parks or activates the rollout model as the gateway asks; admin commands go before that. Nothing
connects to the device. When the connection is lost its turns are forgotten, since the gateway places them again with
what it had received; then the agent reconnects, with growing pauses, for as long as the device lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec

from rose.api import worker_messages as messages
from rose.api.worker_messages import CONNECT_PATH, FRAME_BYTES_MAX, Kind, SendQueue
from rose.core.shard_placement import shard_of
from rose.engines.base import EngineClient, LendingStatus
from rose.errors import RoseError, Unavailable
from rose.observe.metrics import Metrics
from rose.weights.weight_metrics import ReceiveMetrics
from rose.worker.heartbeats import HeartbeatBuilder, default_name, join_of
from rose.worker.turn_executor import TurnExecutor
from rose.worker.weight_updater import WeightUpdater

logger = logging.getLogger("rose.agent")

PAUSE_FIRST_S, PAUSE_LONGEST_S = 0.2, 5.0
WELCOME_S = 10.0
SILENCE_S = 10.0  # a gateway that does not answer a ping for this long is gone


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The gateway, and how the device registers there: `name` must be unlike that of every other worker.

    `gateway` is one address, or those of all gateways of a job, separated by commas.
    """

    gateway: str
    token: str
    model: str
    kind: Kind
    max_concurrency: int
    name: str = ""
    shards: tuple[str, ...] = ()  # all gateways, if they are several; `gateway` is then one of them
    has_moved: bool = False  # to this gateway, from another one
    labels: Mapping[str, str] = field(default_factory=dict)  # by which an operator chooses workers

    def at_first(self) -> AgentSettings:
        """Return the settings for the gateway that this device joins first: by its name, among several."""
        shards = tuple(address.strip() for address in self.gateway.split(","))
        if len(shards) == 1:
            return self
        name = self.name or default_name()
        return replace(self, gateway=shards[shard_of(name, len(shards))], name=name, shards=shards)

    def at_shard(self, shard: int) -> AgentSettings:
        """Return the settings for another of the gateways. Raises Unavailable for one that is not in the list."""
        if not shard < len(self.shards):
            what = f"the gateway wants to move this worker to shard {shard}, and it knows {len(self.shards)}"
            raise Unavailable(what, hint="give --gateway the addresses of all gateways")
        return replace(self, gateway=self.shards[shard], has_moved=True)


class Dismissed(Exception):
    """The gateway wants no more of this worker."""


class Moved(Exception):
    """The gateway sends this worker to another one."""

    def __init__(self, settings: AgentSettings, why: str) -> None:
        super().__init__(why)
        self.settings = settings


async def run_as_sidecar(engine: EngineClient, metrics: Metrics, arguments: dict[str, Any]) -> None:
    """Run the agent of a device, which knows this function by its name and plain arguments."""
    await run_agent(engine, AgentSettings(**arguments), metrics)


async def run_agent(engine: EngineClient, settings: AgentSettings, metrics: Metrics | None = None) -> None:
    """Work for the gateway until cancelled, or until it dismisses this worker for good."""
    updater = WeightUpdater(engine, ReceiveMetrics(metrics or Metrics(process_facts=False)))
    await _first_of(updater.run(), _stay_connected(engine, settings, updater))


async def _first_of(*works: Awaitable[None]) -> None:
    """Wait until one of these ends, and end the others. Raises what it ended with."""
    tasks = {asyncio.ensure_future(work) for work in works}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stay_connected(engine: EngineClient, settings: AgentSettings, updater: WeightUpdater) -> None:
    pause_s, last_reason = PAUSE_FIRST_S, ""
    settings = settings.at_first()
    async with aiohttp.ClientSession() as http:
        while True:
            began_s = time.monotonic()
            try:
                await GatewaySession(engine, settings, updater).run(http)
            except Dismissed as error:
                logger.warning("the gateway sent this worker away: %s", error)
                return
            except Moved as move:
                settings, pause_s = move.settings, PAUSE_FIRST_S
                logger.info("this worker moves to the gateway at %s: %s", settings.gateway, move)
                continue
            except Exception as error:
                if not isinstance(error, RoseError | aiohttp.ClientError | OSError | TimeoutError):
                    logger.exception("the connection to the gateway ended by an error of this worker")
                reason = _reason_of(settings, error)
                if reason != last_reason:
                    logger.warning("%s; trying again", reason)
                last_reason = reason
            if time.monotonic() - began_s > PAUSE_LONGEST_S:
                pause_s, last_reason = PAUSE_FIRST_S, ""
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(PAUSE_LONGEST_S, 2 * pause_s)


class GatewaySession:
    """One connection, from joining to losing it."""

    def __init__(
        self,
        engine: EngineClient,
        settings: AgentSettings,
        updater: WeightUpdater,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._settings, self._updater, self._now_s = engine, settings, updater, now_s
        self._tasks: set[asyncio.Task[None]] = set()  # orders that take a while
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # of such an order
        self._has_news = asyncio.Event()  # of lending, which the gateway should get before the next heartbeat
        self._last_news: tuple[object, ...] = ()
        self._queue: SendQueue
        self._turns: TurnExecutor
        self._heartbeats: HeartbeatBuilder

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Work over one connection. Raises what ended it."""
        settings, updater = self._settings, self._updater
        async with http.ws_connect(
            settings.gateway.rstrip("/") + CONNECT_PATH,
            headers={"Authorization": f"Bearer {settings.token}"},
            max_msg_size=FRAME_BYTES_MAX,
            heartbeat=SILENCE_S,
            compress=0,
        ) as connection:
            self._queue = SendQueue(connection.send_bytes)
            known = settings.name, settings.kind, settings.model, settings.max_concurrency, updater.hash
            join = join_of(self._engine, *known)
            shards, has_moved, labels = len(settings.shards), settings.has_moved, dict(settings.labels)
            self._queue.put(msgspec.structs.replace(join, shards=shards, has_moved=has_moved, labels=labels))
            await self._queue.flush()
            async with asyncio.timeout(WELCOME_S):
                orders = _decoded(await connection.receive())
            self._turns = TurnExecutor(self._engine, self._queue.put, self._now_s)
            self._heartbeats = HeartbeatBuilder(self._engine, self._turns.rates, lambda: updater.hash, self._now_s())
            updater.on_ready = self._on_version_ready
            unsubscribe = self._engine.events.lending.subscribe(self._on_lending_status)
            try:
                for order in orders:
                    self._obey(order)  # it may be an order to leave, with the reason
                if not orders or not isinstance(orders[0], messages.Welcome):
                    raise Unavailable("the gateway did not say welcome")
                logger.info("joined the gateway at %s", settings.gateway)
                await self._work(connection, orders[0].beat_s)
            finally:
                updater.on_ready = lambda ready: None  # the next gateway gets the version when this worker joins it
                unsubscribe()
                self._turns.close()

    async def _work(self, connection: aiohttp.ClientWebSocketResponse, beat_s: float) -> None:
        works: list[Awaitable[None]] = [
            self._queue.run(),
            self._send_heartbeats(beat_s),
            self._receive(connection),
            self._failure,
        ]
        if self._settings.kind == "borrowed":
            works.append(self._query(beat_s))
        try:
            await _first_of(*works)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _receive(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            for message in _decoded(await connection.receive()):
                self._obey(message)

    def _obey(self, message: messages.ToAgent) -> None:
        match message:
            case messages.Turn():
                self._turns.start(message)
            case messages.CancelTurn():
                self._turns.cancel(message.attempt_id)
            case messages.EvictTurn():
                self._start(self._turns.evict(message.attempt_id))
            case messages.Activate() | messages.Park():
                self._start(self._set_wanted(isinstance(message, messages.Activate)))
            case messages.NewVersion():
                self._updater.request(message)
            case messages.Leave():
                if message.retry_s is None:
                    raise Dismissed(message.why)
                raise Unavailable(f"the gateway will not have this worker now: {message.why}")
            case messages.Move():
                raise Moved(self._settings.at_shard(message.shard), message.why)
            case messages.Welcome():
                pass

    def _start(self, order: Coroutine[Any, Any, None]) -> None:
        """Carry out an order in a task; if it fails the connection ends with its error."""

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not self._failure.done():
                self._failure.set_exception(error)

        task = asyncio.create_task(order)
        self._tasks.add(task)
        task.add_done_callback(on_done)

    async def _set_wanted(self, is_wanted: bool) -> None:
        """Activate or park the rollout model. Its new status follows by itself; the gateway asks again if it must."""
        try:
            await self._engine.set_wanted(is_wanted)
        except RoseError as error:
            logger.warning("the rollout model is not %s: %s", "activated" if is_wanted else "parked", error.what)

    async def _send_heartbeats(self, beat_s: float) -> None:
        """Send a heartbeat every `beat_s`, and at once when lending has changed."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(beat_s):
                    await self._has_news.wait()
            self._has_news.clear()
            self._queue.put(self._heartbeats.build(self._now_s()))

    async def _query(self, beat_s: float) -> None:
        """Ask a lent device for its status. A device that hangs does not answer, and heartbeats go on without news."""
        while True:
            with contextlib.suppress(RoseError):
                await self._engine.query()
            await asyncio.sleep(beat_s)

    def _on_lending_status(self, status: LendingStatus | None) -> None:
        self._heartbeats.on_lending_status(self._now_s())
        news = (status.state, status.model, status.is_resting, status.shut_s is None) if status is not None else ()
        if news != self._last_news:
            self._last_news = news
            self._has_news.set()

    def _on_version_ready(self, ready: messages.VersionReady) -> None:
        self._turns.flush()  # tokens sampled before the version are sent before it
        self._queue.put(ready)


def _decoded(message: aiohttp.WSMessage) -> list[messages.ToAgent]:
    if message.type is aiohttp.WSMsgType.BINARY:
        return messages.decode_to_agent(message.data)
    if message.type is aiohttp.WSMsgType.ERROR:
        raise Unavailable(f"the connection to the gateway broke: {message.data}")
    raise Unavailable("the gateway closed the connection")


def _reason_of(settings: AgentSettings, error: BaseException) -> str:
    if isinstance(error, aiohttp.WSServerHandshakeError) and error.status == 401:
        return f"the gateway at {settings.gateway} does not know this worker's token (ROSE_WORKER_TOKEN)"
    if isinstance(error, RoseError):
        return error.what
    if isinstance(error, TimeoutError):
        return f"the gateway at {settings.gateway} does not answer"
    return f"the gateway at {settings.gateway} cannot be reached: {getattr(error, 'strerror', None) or error}"
