"""The edges of a connection: how many there may be, how long one may stay silent or unread, and how one is cut.

A server has a limit on open connections. When it is reached, the connection that has been idle longest makes room for
a new one; one that has shown a valid token is never closed for that. So idle connections of strangers cannot keep
workers, trainers or agents out. Only if every connection is at work is the new one told so and closed.

A client must send its first request within `read_timeout_s` and take what it is sent: one that takes nothing for
`slow_reader_s` is cut off, whether it is sent a stream, a whole answer or WebSocket frames, since all of them end in
the same write buffer. What waits in these buffers is bounded over all connections too. A connection that is cut is
reset, so that the kernel drops what it still held for the client.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from typing import Any, cast

from aiohttp import web

from rose.config.device import FrontSettings
from rose.front.failures import Failure
from rose.front.ports import cannot_listen, tls_context

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger for zero seconds
BACKLOG = 1024
KEEP_ALIVE_S = 75.0
FAREWELL_S = 1.0  # for handlers to say that the server is going
HANDSHAKE_S = 10.0  # for TLS
GRACE_S = 0.25  # for a new connection to send its request before it may have to make room for a newer one
UNSENT_BYTES_MAX = 256 << 20  # over all clients that do not read as fast as they are answered


class Crowd:
    """The open connections of one server."""

    def __init__(self, most: int, read_timeout_s: float, slow_reader_s: float) -> None:
        self.most, self.read_timeout_s, self.slow_reader_s = most, read_timeout_s, slow_reader_s
        self._open: dict[Connection, None] = {}
        self._unread: dict[Connection, None] = {}  # those that wait for their client to read, longest first

    def enter(self, connection: Connection) -> bool:
        """Take a place for this connection, at the cost of an idle one if need be. Returns whether there was one."""
        if len(self._open) >= self.most:
            idle = [one for one in self._open if one.is_idle and not one.is_authenticated]
            longest = min(idle, key=lambda one: one.idle_since_s, default=None)
            if longest is None or asyncio.get_running_loop().time() - longest.idle_since_s < GRACE_S:
                return False
            self.leave(longest)
            longest.force_close()
        self._open[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._unread.pop(connection, None)

    def stalls(self, connection: Connection) -> None:
        """This connection has more to send than its client takes. If all wait for too much, the first is cut."""
        self._unread[connection] = None
        unsent_bytes = sum(one.unsent_bytes for one in self._unread)
        for one in list(self._unread):
            if unsent_bytes <= UNSENT_BYTES_MAX:
                return
            unsent_bytes -= one.unsent_bytes
            one.cut()

    def flows(self, connection: Connection) -> None:
        self._unread.pop(connection, None)


class Connection(web.RequestHandler):
    """One connection: aiohttp's protocol, with a place in the crowd and an eye on clients that do not read."""

    __slots__ = (
        "_crowd",
        "_is_in",
        "_left_bytes",
        "_progress_timer",
        "_silence_timer",
        "is_authenticated",
        "is_refused",
    )

    def __init__(self, crowd: Crowd, server: web.Server, options: dict[str, Any]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self.is_authenticated = self.is_refused = False
        self._crowd = crowd
        self._is_in = False
        self._left_bytes = 0
        self._silence_timer: asyncio.TimerHandle | None = None
        self._progress_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered, but for a refusal; also before the first one."""
        return not self._request_in_progress or self.is_refused

    @property
    def idle_since_s(self) -> float:
        return self._next_keepalive_close_time - self._keepalive_timeout

    @property
    def unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    async def drained(self) -> None:
        if self._paused:
            await self._drain_helper()

    def cut(self) -> None:
        self._crowd.leave(self)
        if self.transport is not None:
            cut(self.transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not HTTP. The error holds the frame that holds it, with all that was received: part them."""
        try:
            return super().handle_error(request, status, exc, message)
        finally:
            _forget_frames(exc)

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._crowd.enter(self):
            stream = cast(asyncio.Transport, transport)
            self._force_close = True  # nothing that comes is read
            stream.write(_too_many(self._crowd.most))
            stream.close()
            return
        self._is_in = True
        super().connection_made(transport)
        self._silence_timer = self._loop.call_later(self._crowd.read_timeout_s, self._cut_if_silent)

    def connection_lost(self, error: BaseException | None) -> None:
        for timer in (self._silence_timer, self._progress_timer):
            if timer is not None:
                timer.cancel()
        self._crowd.leave(self)
        for message, _ in self._messages:  # what is not HTTP and was not answered before its client left
            _forget_frames(getattr(message, "exc", None))
        if self._is_in:
            super().connection_lost(error)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._is_in:
            self._left_bytes = self.unsent_bytes
            self._progress_timer = self._loop.call_later(self._crowd.slow_reader_s, self._cut_without_progress)
            self._crowd.stalls(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._crowd.flows(self)
        if self._progress_timer is not None:
            self._progress_timer.cancel()

    def _cut_without_progress(self) -> None:
        """Nothing is written while a client is behind, so what is left shrinks if it reads anything at all."""
        if self.unsent_bytes >= self._left_bytes:
            self.cut()
            return
        self._left_bytes = self.unsent_bytes
        self._progress_timer = self._loop.call_later(self._crowd.slow_reader_s, self._cut_without_progress)

    def _cut_if_silent(self) -> None:
        """Its first request has not come, headers and all; a body that does not come is the reader's affair."""
        if self._request_count == 0:
            self.cut()


class HttpServer:
    """An application on a socket: aiohttp's runner with our connections."""

    def __init__(self, application: web.Application, settings: FrontSettings, logger_name: str, most: int) -> None:
        options: dict[str, Any] = {
            "access_log": None,
            "logger": _quiet_logger(logger_name),
            "keepalive_timeout": KEEP_ALIVE_S,
            "auto_decompress": False,  # compression.py does it, within limits
        }
        # A client that leaves is noticed, and its request cancelled.
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=FAREWELL_S, **options)
        self._settings, self._options = settings, options
        self._crowd = Crowd(most, settings.read_timeout_s, settings.slow_reader_s)
        self._server: asyncio.Server | None = None

    async def listen(self, listener: socket.socket) -> None:
        """Raises ConfigError."""
        tls = tls_context(self._settings)
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connection,
                sock=listener,
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
            )
        except OSError as error:
            raise cannot_listen(self._settings, error) from error

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        self.stop_listening()
        await self._runner.cleanup()

    def _connection(self) -> Connection:
        assert self._runner.server is not None
        return Connection(self._crowd, self._runner.server, self._options)


def _forget_frames(error: BaseException | None) -> None:
    if error is not None:
        error.__traceback__ = None


def is_behind(request: web.Request) -> bool:
    """Whether the client takes less than it is sent; cheaper to ask than to wait for nothing, once per token."""
    return getattr(request.protocol, "_paused", False)


async def drained(request: web.Request) -> None:
    """Wait until the client has taken most of what was written. Raises ConnectionError if it is gone."""
    if isinstance(request.protocol, Connection):
        await request.protocol.drained()


def mark_authenticated(request: web.Request) -> None:
    """The request has shown a valid token: its connection is not closed to make room for others."""
    if isinstance(request.protocol, Connection):
        request.protocol.is_authenticated = True


def mark_refused(request: web.Request) -> None:
    """The request is being refused: its connection may be closed to make room for others."""
    if isinstance(request.protocol, Connection):
        request.protocol.is_refused = True


def cut(transport: asyncio.Transport) -> None:
    """Close a connection at once and forget what was not sent."""
    found = transport.get_extra_info("socket")
    if found is not None and found.fileno() >= 0:
        with socket.socket(fileno=os.dup(found.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    transport.abort()


def _quiet_logger(name: str) -> logging.Logger:
    """aiohttp reports what clients do wrong with a traceback; what we do wrong, the application reports itself."""
    found = logging.getLogger(name)
    found.setLevel(logging.CRITICAL)
    return found


def _too_many(most: int) -> bytes:
    message = f"{most} connections are open already"
    body = Failure(503, message, kind="service_unavailable", code="too_many_connections").encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Retry-After: 1\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
