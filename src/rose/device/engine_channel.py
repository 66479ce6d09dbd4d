"""The client's end of one engine process: starts it, sends commands and receives events, in asyncio.

Events are delivered to token sinks as they arrive, without a task in between; the requests of a sink that is full are
cancelled. When the engine process ends, every sink and every call ends with `Unavailable`, and `gone` has the reason. A
channel belongs to one run of an engine; channel_client.py offers the same over restarts.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from rose.api.faults import error_of, fault_of
from rose.api.frames import FrameReader
from rose.config.server_settings import DeviceSettings
from rose.core.history import HistorySnapshot
from rose.device import engine_messages
from rose.device.os_process import check_device, thread_environment
from rose.device.supervision import settle, supervise
from rose.engines.base import EngineEvents, EngineFacts, LendingStatus, Request, Stepped, Subscribers
from rose.engines.process_keeper import ChildProcess
from rose.engines.token_stream import SinkTable, TokenSink
from rose.errors import RoseError, Unavailable
from rose.private_files import without_secrets

EMBEDDED = "rose.engines.embedded.engine:EmbeddedEngine.load"
SHUTDOWN_GRACE_S = 5.0  # an engine that got a Shutdown is in a step of well under a second


def start_command(
    folder: Path, settings: DeviceSettings, *, factory: str, lend: Path | None = None
) -> engine_messages.StartEngine:
    """Return the command that starts the engine of a device, lent to the model in `lend` if there is one."""
    lent = engine_messages.Lend(str(lend), settings.lend) if lend is not None else None
    return engine_messages.StartEngine(factory, str(folder), settings.device, settings.engine, lent)


@dataclass(frozen=True, slots=True)
class DeviceEvents(EngineEvents):
    """The events of a device's engine process: besides others', those for the journal and for the next engine."""

    notices: Subscribers[engine_messages.Notice] = field(default_factory=Subscribers)
    history: Subscribers[HistorySnapshot] = field(default_factory=Subscribers)


class Channel(asyncio.Protocol):
    """The connection to one engine: requests out, events in. Not thread-safe."""

    def __init__(
        self, events: DeviceEvents | None = None, on_progress: Callable[[str], None] = lambda what: None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.facts: EngineFacts  # the newest, from the moment the engine is ready
        self.gone: asyncio.Future[Unavailable] = loop.create_future()
        self.lending_status: LendingStatus | None = None  # the newest, of a device that is lent
        self._events = events or DeviceEvents()
        self._on_progress = on_progress
        self._transport: asyncio.Transport
        self._ready: asyncio.Future[None] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._frames = FrameReader()
        self._sinks = SinkTable()
        self._calls: dict[int, asyncio.Future[engine_messages.Reply]] = {}  # by tag
        self._next_tag = 1
        self._failure: RoseError | None = None
        self._closing = False
        self._end_task = supervise(self._until_lost(), "the end of an engine's connection", self._end)

    @property
    def in_flight(self) -> int:
        return len(self._sinks)

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        """Queue requests; their events go to the sink, and so does a refusal of any of them."""
        self._check_alive()
        self._sinks.add(requests, sink)
        for request in requests:
            self._send(engine_messages.Add(request))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests; those that have ended are skipped."""
        for request_id in request_ids:
            if self._sinks.remove(request_id):
                self._send(engine_messages.CancelRequest(request_id))

    async def call(self, command: engine_messages.Command) -> engine_messages.Reply:
        """Send a command that has a tag, and wait for its reply. Raises the error the engine replied with."""
        self._check_alive()
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        call = self._calls[tag] = asyncio.get_running_loop().create_future()
        self._send(msgspec.structs.replace(command, tag=tag))
        try:
            reply = await call
        finally:
            self._calls.pop(tag, None)
        if reply.fault is not None:
            raise error_of(reply.fault)
        return reply

    @classmethod
    async def attach(cls, address: str, events: DeviceEvents | None = None) -> Channel:
        """Connect to the rollout listener of a lent device. Raises Unavailable if its engine is not there."""
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            ours.connect("\0" + address)  # at once, or not at all: the listener is in the same machine
        except OSError as error:
            ours.close()
            raise Unavailable(f"the device's engine is not there: {error.strerror}") from error
        channel = cls(events)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
        await channel._ready
        return channel

    async def close(self) -> None:
        """Close this connection; what is under way on it ends with Unavailable."""
        self._closing = True
        self._transport.abort()
        await asyncio.shield(self._end_task)

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.push(data):
                self._receive(engine_messages.decode_event(body))
        except (msgspec.DecodeError, UnicodeDecodeError, Unavailable) as error:
            self._failure = Unavailable(f"the engine process sent something unreadable: {error}")
            self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set_result(None)

    def _receive(self, event: engine_messages.Event) -> None:
        match event:
            case Stepped():
                self.facts = event.facts
                for token_event in event.events:
                    self.cancel(self._sinks.deliver(token_event))
                self._events.steps.publish(event)
            case engine_messages.Reply():
                self.facts = event.facts
                if event.lending is not None:
                    self.lending_status = event.lending
                    self._events.lending.publish(event.lending)
                call = self._calls.get(event.tag)
                if call is not None and not call.done():
                    call.set_result(event)
            case engine_messages.RequestRejected():
                self._sinks.fail(event.request_id, error_of(event.fault))
            case engine_messages.Ready():
                self.facts = event.facts
                if not self._ready.done():
                    self._ready.set_result(None)
            case engine_messages.StartProgress():
                self._on_progress(event.what)
            case engine_messages.Breached() | engine_messages.Noted():
                self._events.notices.publish(event)
            case engine_messages.Learnt():
                self._events.history.publish(event.history)
            case engine_messages.EngineFailed():
                self._failure = error_of(event.fault)

    async def _until_lost(self) -> None:
        """Wait for the end of the connection, and fail everything that waits for the engine."""
        await self._lost
        failure = self._failure or Unavailable(await self._exit_reason(), hint="it is restarted; retry a little later")
        self._fail_ready(failure)
        self._end(failure if isinstance(failure, Unavailable) else Unavailable(failure.what, hint=failure.hint))

    def _end(self, gone: Unavailable) -> None:
        """Fail every sink, every call, and the task that waits for the engine to be ready."""
        self._fail_ready(gone)
        self._sinks.fail_all(gone)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(gone)
        settle(self.gone, gone)

    def _fail_ready(self, error: RoseError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # seen: no task may be waiting for it

    async def _exit_reason(self) -> str:
        """Return why the connection ended, if the engine did not say it itself."""
        return "this side of the engine process is closed"

    def kill(self) -> None:
        """Cut the connection at once; everything under way ends with `Unavailable`."""
        self._transport.abort()

    def _check_alive(self) -> None:
        if self.gone.done():
            raise error_of(fault_of(self.gone.result()))
        if self._lost.done() or self._closing:
            raise Unavailable("the engine process is leaving")

    def _send(self, command: engine_messages.Command) -> None:
        if not self._lost.done():
            self._transport.write(engine_messages.frame(command))


class DeviceChannel(Channel):
    """One engine process and the serving connection to it."""

    def __init__(
        self,
        process: ChildProcess,
        events: DeviceEvents | None = None,
        on_progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        super().__init__(events, on_progress)
        self._process = process

    @classmethod
    async def start(
        cls,
        command: engine_messages.StartEngine,
        *,
        listener: socket.socket | None = None,
        events: DeviceEvents | None = None,
        on_progress: Callable[[str], None] = lambda what: None,
    ) -> DeviceChannel:
        """Start an engine process and wait until it is ready. Raises the reason if it cannot start.

        A lent device takes rollouts at `listener`, which stays open here (transport.py).
        """
        environment = without_secrets(os.environ) | thread_environment(check_device(command.device))
        ours, theirs = socket.socketpair()
        numbers = [theirs.fileno()] + ([listener.fileno()] if listener is not None else [])
        arguments = [sys.executable, "-m", "rose.device.executor", *map(str, [numbers[0], os.getpid(), *numbers[1:]])]
        process = subprocess.Popen(arguments, pass_fds=numbers, env=environment)
        theirs.close()
        channel = cls(ChildProcess(process, "the engine process"), events, on_progress)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
        channel._send(command)
        try:
            await channel._ready
        except BaseException:
            channel.kill()
            await channel.close()
            raise
        return channel

    @property
    def process_id(self) -> int:
        return self._process.process_id

    def kill(self) -> None:
        """End the engine process at once; everything under way ends with `Unavailable`."""
        self._process.kill()

    async def close(self) -> None:
        """Have the engine process exit, within a bounded time, and wait for it."""
        self._closing = True
        self._send(engine_messages.Shutdown())
        await asyncio.wait([self._end_task], timeout=SHUTDOWN_GRACE_S)
        self.kill()
        await asyncio.shield(self._end_task)

    async def _exit_reason(self) -> str:
        reason = await self._process.exit_reason(SHUTDOWN_GRACE_S)
        return "the device is shutting down" if self._closing else reason
