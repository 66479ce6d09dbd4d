"""The client's end of a device: starts the engine process and speaks to it, in asyncio.

Events are sorted into mailboxes as they arrive, without a task in between; a mailbox that is full has its requests
cancelled. When the engine process goes, however it goes, every mailbox and every question ends with `Unavailable`, and
`gone` tells why.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from rose.config.device import DeviceSettings
from rose.config.environment import without_secrets
from rose.coserve import messages
from rose.coserve.device import check_device, thread_environment
from rose.coserve.mailbox import MAILBOX_TOKENS, Mailbox
from rose.coserve.supervision import settle, supervise
from rose.engines.base import EngineFacts, Request, TokenEvent
from rose.errors import RequestRefused, RoseError, Unavailable

EMBEDDED = "rose.engines.embedded.engine:EmbeddedEngine.load"
LEAVE_S = 5.0  # an engine that was told to leave is in a step of well under a second


def start_command(
    folder: Path, settings: DeviceSettings, *, factory: str, gated: bool, lend: Path | None = None
) -> messages.Start:
    lent = messages.Lend(str(lend), settings.lend) if lend is not None else None
    return messages.Start(factory, str(folder), settings.device, settings.engine, gated, lent)


class Channel(asyncio.Protocol):
    """The connection to one engine: requests out, events in. Not thread-safe."""

    def __init__(self, on_progress: Callable[[str], None] = lambda what: None) -> None:
        loop = asyncio.get_running_loop()
        self.facts: EngineFacts  # the newest, from the moment the engine is ready
        self.gone: asyncio.Future[Unavailable] = loop.create_future()
        self.on_step: Callable[[messages.Stepped], None] = lambda stepped: None
        self.on_word: Callable[[messages.Breached | messages.Noted], None] = lambda word: None
        self.lending: messages.LendingStatus | None = None  # the newest, of a device that is lent
        self.on_lending: Callable[[], None] = lambda: None
        self._on_progress = on_progress
        self._transport: asyncio.Transport
        self._ready: asyncio.Future[None] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._frames = messages.FrameReader()
        self._mailboxes: dict[str, Mailbox] = {}
        self._questions: dict[int, asyncio.Future[messages.Reply]] = {}
        self._next_tag = 1
        self._failure: RoseError | None = None
        self._closing = False
        self._burial = supervise(self._bury(), "the end of an engine's connection", self._end)

    @property
    def in_flight(self) -> int:
        return len(self._mailboxes)

    def submit(self, requests: Sequence[Request], *, unread_tokens_max: float = MAILBOX_TOKENS) -> Mailbox:
        """Queue requests; their events come to one mailbox, and so does a refusal of any of them."""
        self._check_alive()
        mailbox = Mailbox(unread_tokens_max)
        known = [request.request_id for request in requests if request.request_id in self._mailboxes]
        if known:
            raise RequestRefused(f"request id `{known[0]}` is already in use")
        for request in requests:
            self._mailboxes[request.request_id] = mailbox
            self._send(messages.Add(request))
        return mailbox

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests; those that have ended are skipped."""
        for request_id in request_ids:
            if self._mailboxes.pop(request_id, None) is not None:
                self._send(messages.Cancel(request_id))

    def forget(self, request_id: str) -> None:
        """Cancel one request and close its mailbox: the reader gets nothing more."""
        mailbox = self._mailboxes.get(request_id)
        self.cancel([request_id])
        if mailbox is not None:
            mailbox.close()

    async def ask(self, command: messages.Command) -> messages.Reply:
        """Send a command that has a tag, and wait for its reply. Raises the error the engine replied with."""
        self._check_alive()
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        question = self._questions[tag] = asyncio.get_running_loop().create_future()
        self._send(msgspec.structs.replace(command, tag=tag))
        try:
            reply = await question
        finally:
            self._questions.pop(tag, None)
        if reply.fault is not None:
            raise messages.error_of(reply.fault)
        return reply

    @classmethod
    async def attach(cls, address: str) -> Channel:
        """Take the rollouts' seat of a lent device. Raises Unavailable if its engine is not there."""
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            ours.connect("\0" + address)  # at once, or not at all: the listener is in the same machine
        except OSError as error:
            ours.close()
            raise Unavailable(f"the device's engine is not there: {error.strerror}") from error
        channel = cls()
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
        await channel._ready
        return channel

    async def leave(self) -> None:
        """Close this connection; what is under way on it ends with Unavailable."""
        self._closing = True
        self._transport.abort()
        await asyncio.shield(self._burial)

    # What arrives

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.push(data):
                self._receive(messages.decode_event(body))
        except (msgspec.DecodeError, UnicodeDecodeError, Unavailable) as error:
            self._failure = Unavailable(f"the engine process sent something unreadable: {error}")
            self._give_up()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set_result(None)

    def _receive(self, event: messages.Event) -> None:
        match event:
            case messages.Stepped():
                self.facts = event.facts
                for token_event in event.events:
                    self._deliver(token_event)
                self.on_step(event)
            case messages.Reply():
                self.facts = event.facts
                if event.lending is not None:
                    self.lending = event.lending
                    self.on_lending()
                question = self._questions.get(event.tag)
                if question is not None and not question.done():
                    question.set_result(event)
            case messages.Refused():
                mailbox = self._mailboxes.pop(event.request_id, None)
                if mailbox is not None:
                    mailbox.fail(messages.error_of(event.fault))
            case messages.Ready():
                self.facts = event.facts
                if not self._ready.done():
                    self._ready.set_result(None)
            case messages.Progress():
                self._on_progress(event.what)
            case messages.Breached() | messages.Noted():
                self.on_word(event)
            case messages.Failed():
                self._failure = messages.error_of(event.fault)

    def _deliver(self, event: TokenEvent) -> None:
        mailbox = self._mailboxes.get(event.request_id)
        if mailbox is None:  # cancelled while the step ran
            return
        if mailbox.on_error is not None and event.finish_reason is None:
            return
        mailbox.put(event)
        if event.finish_reason is not None:
            del self._mailboxes[event.request_id]
        elif mailbox.full:
            mailbox.fail(Unavailable("the reader of this request is too slow"))
            self.cancel([name for name, known in self._mailboxes.items() if known is mailbox])

    # How it ends

    async def _bury(self) -> None:
        """Wait for the end of the connection, and tell everybody."""
        await self._lost
        failure = self._failure or Unavailable(await self._epitaph(), hint="it is restarted; retry a little later")
        if not self._ready.done():
            self._ready.set_exception(failure)
            self._ready.exception()  # seen: a channel nobody waits for may end before it is ready
        self._end(failure if isinstance(failure, Unavailable) else Unavailable(failure.what, hint=failure.hint))

    def _end(self, gone: Unavailable) -> None:
        """Tell every reader, and every task that waits for a reply or for the engine to be ready."""
        if not self._ready.done():
            self._ready.set_exception(gone)
            self._ready.exception()  # seen
        for mailbox in set(self._mailboxes.values()):
            mailbox.fail(gone)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(gone)
        self._mailboxes.clear()
        settle(self.gone, gone)

    async def _epitaph(self) -> str:
        return "this side of the engine process is closed"

    def _give_up(self) -> None:
        self._transport.abort()

    def _check_alive(self) -> None:
        if self.gone.done():
            raise messages.error_of(messages.fault_of(self.gone.result()))
        if self._lost.done() or self._closing:
            raise Unavailable("the engine process is leaving")

    def _send(self, command: messages.Command) -> None:
        if not self._lost.done():
            self._transport.write(messages.frame(command))


class DeviceChannel(Channel):
    """One engine process and the serving connection to it."""

    def __init__(self, process: subprocess.Popen[bytes], on_progress: Callable[[str], None]) -> None:
        super().__init__(on_progress)
        self._process = process

    @classmethod
    async def start(
        cls,
        command: messages.Start,
        *,
        door: socket.socket | None = None,
        on_progress: Callable[[str], None] = lambda what: None,
    ) -> DeviceChannel:
        """Start an engine process and wait until it is ready. Raises what the engine says if it cannot start.

        A device that is lent takes rollouts at `door`, a socket that listens and stays its maker's (see door.py).
        """
        environment = without_secrets(os.environ) | thread_environment(check_device(command.device))
        ours, theirs = socket.socketpair()
        numbers = [theirs.fileno()] + ([door.fileno()] if door is not None else [])
        arguments = [sys.executable, "-m", "rose.coserve.executor", *map(str, [numbers[0], os.getpid(), *numbers[1:]])]
        process = subprocess.Popen(arguments, pass_fds=numbers, env=environment)
        theirs.close()
        channel = cls(process, on_progress)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
        channel._send(command)
        try:
            await channel._ready
        except BaseException:
            await channel.close(kill=True)
            raise
        return channel

    @property
    def process_id(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End the engine process at once; everything under way ends with `Unavailable`."""
        self._process.kill()

    async def close(self, *, kill: bool = False) -> None:
        """Have the engine process leave, within a bounded time, and wait for it."""
        self._closing = True
        self._send(messages.Shutdown())
        if not kill:
            await asyncio.wait([self._burial], timeout=LEAVE_S)
        self.kill()
        await asyncio.shield(self._burial)

    # How it ends

    async def _epitaph(self) -> str:
        code = await asyncio.to_thread(self._wait_for_process)
        if self._closing:
            return "the device is shutting down"
        if code < 0:
            return f"the engine process was killed by signal {-code}"
        return f"the engine process left with code {code}"

    def _wait_for_process(self) -> int:
        try:
            return self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _give_up(self) -> None:
        self.kill()
