"""Engine clients over channels: what HTTP handlers and the agent hold, however often the engine is restarted.

A channel belongs to one run of an engine. A keeper opens channels and hands them over to the client: the supervisor of
the engine process (engine_supervisor.py), or the connector of the rollout front below. In between, requests are refused
with the reason. Subscriptions and counters outlive every channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rose.api.faults import error_of, fault_of
from rose.device import engine_messages
from rose.device.engine_channel import Channel, DeviceEvents
from rose.device.supervision import settle, supervise
from rose.engines.base import EngineFacts, LendingStatus, Request
from rose.engines.recorded_steps import RecordedSteps
from rose.engines.token_stream import TokenSink
from rose.errors import QueueFull, RoseError, Unavailable

COUNTERS = ("prefix_query_tokens", "prefix_hit_tokens", "preemptions", "steps", "prompt_tokens", "generated_tokens")
LEVELS = ("running", "waiting", "kv_blocks_used", "kv_blocks_cached")
ZEROS: dict[str, Any] = dict.fromkeys((*COUNTERS, *LEVELS), 0)
RECONNECT_PAUSE_S = 0.25  # an engine takes seconds to start; a try costs microseconds


class EngineCounters:
    """Facts over several engines: levels of the newest one, counters summed over all of them."""

    def __init__(self) -> None:
        self._idle: EngineFacts  # the facts while there is no engine, less the counters
        self._base: EngineFacts | None = None  # counters of the engines that are gone

    def on_start(self, facts: EngineFacts) -> None:
        self._idle = replace(facts, **ZEROS)

    def on_gone(self, newest: EngineFacts) -> None:
        self._base = self.total(newest)
        self._idle = replace(newest, **ZEROS)

    def total(self, newest: EngineFacts | None) -> EngineFacts:
        """Return the facts of all engines; `newest` is None while there is none."""
        now = newest if newest is not None else self._idle
        base = self._base
        if base is None:
            return now
        return replace(now, **{name: getattr(now, name) + getattr(base, name) for name in COUNTERS})


class ChannelClient:
    """An `EngineClient`. `stop_keeper` ends the keeper before the last channel is closed."""

    def __init__(self, requests_max: int, stop_keeper: Callable[[], Awaitable[None]]) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.events = DeviceEvents()
        self.channel: Channel | None = None  # set by `attach`
        self._requests_max, self._stop_keeper = requests_max, stop_keeper
        self._counters = EngineCounters()
        self._reason = Unavailable("the engine is starting")
        self._closing = False

    def attach(self, channel: Channel) -> None:
        """Use this channel from now on."""
        self._counters.on_start(channel.facts)
        self.channel = channel

    def detach(self, reason: Unavailable) -> None:
        """Refuse requests with this reason until there is another channel."""
        if self.channel is not None:
            self._counters.on_gone(self.channel.facts)
        self.channel, self._reason = None, reason

    @property
    def trouble(self) -> Unavailable | None:
        return self._reason if self.channel is None else None

    @property
    def lending_status(self) -> LendingStatus | None:
        return self.channel.lending_status if self.channel is not None else None

    @property
    def facts(self) -> EngineFacts:
        return self._counters.total(self.channel.facts if self.channel is not None else None)

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        channel = self._checked()
        if len(requests) > self._requests_max - channel.in_flight:
            raise QueueFull(
                f"{channel.in_flight} requests are running or waiting, and {len(requests)} more are too many",
                hint="retry a little later",
            )
        channel.submit(requests, sink)

    def cancel(self, request_ids: Iterable[str]) -> None:
        if self.channel is not None:
            self.channel.cancel(request_ids)

    async def evict(self, request_id: str) -> None:
        await self._checked().call(engine_messages.EvictRequest(request_id))

    async def stage(self, version: str, folder: str) -> None:
        await self._checked().call(engine_messages.Stage(version, folder))

    async def commit(self, version: str) -> None:
        await self._checked().call(engine_messages.Commit(version))

    async def set_wanted(self, is_wanted: bool) -> None:
        await self._checked().call(engine_messages.Want(is_wanted))

    async def query(self) -> EngineFacts:
        await self._checked().call(engine_messages.GetFacts(0))
        return self.facts

    async def control(self, command: engine_messages.AdminCommand) -> LendingStatus | None:
        """Have the engine carry out an admin command; the rollout side of a device is refused."""
        return (await self._checked().call(command)).lending

    async def recorded_steps(self) -> RecordedSteps | None:
        """Return the steps that the engines ran; None if the device is not lent."""
        return (await self._checked().call(engine_messages.GetSteps())).steps

    async def close(self) -> None:
        self._closing = True
        self._reason = Unavailable("the device is shutting down")
        await self._stop_keeper()
        if self.channel is not None:
            await self.channel.close()

    def _checked(self) -> Channel:
        if self.channel is None or self._closing:
            raise error_of(fault_of(self._reason))
        return self.channel


class RemoteEngineConnector:
    """The rollout front's connection to the engine, opened again whenever the engine was restarted.

    It gives up only if it fails by a defect of its own: then its process ends, and the serving front starts another.
    """

    def __init__(self, address: str, requests_max: int) -> None:
        self.client = ChannelClient(requests_max, self._stop)
        self._address = address
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the first connection."""
        while self.client.channel is None:
            await self._connect()
        self._keeper = supervise(
            self._keep(), "the connection to the engine", lambda why: settle(self.client.gave_up, why)
        )

    async def _stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            if self.client.channel is not None:
                reason = await asyncio.shield(self.client.channel.gone)
                self.client.detach(Unavailable(reason.what, hint="retry a little later"))
            await self._connect()

    async def _connect(self) -> None:
        try:
            self.client.attach(await Channel.attach(self._address, self.client.events))
        except RoseError as error:
            self.client.detach(Unavailable(error.what))
            await asyncio.sleep(RECONNECT_PAUSE_S)
