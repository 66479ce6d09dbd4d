"""Limits on connections: their number, how long one may stay silent or unread, and how one is cut.

A server has a limit on open connections. When it is reached, the connection that has been idle longest makes room for
a new one; one that has shown a valid token is never closed for that. So idle connections of strangers cannot keep
workers, trainers or agents out. If every connection is busy, the new one gets a 503 and is closed.

A client must send its first request within `read_timeout_s` and read its responses: one that reads nothing for
`slow_reader_s` is cut off, whether it gets a stream, a whole response or WebSocket frames, since all of them end in
the same write buffer. The bytes in these buffers are bounded over all connections too. A connection that is cut is
reset, so that the kernel drops the data that it still holds for the client.

A WebSocket frame costs microseconds to parse, however little it holds, and one read may bring 40,000 of them. So what
is read is parsed in pieces, and the loop turns to other connections between two pieces.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from rose.openai.http_errors import Failure

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger for zero seconds
GRACE_S = 0.25  # for a new connection to send its request before it may have to make room for a newer one
UNSENT_BYTES_MAX = 256 << 20  # over all clients that do not read as fast as they are answered
PARSED_BYTES_AT_ONCE = 32 << 10  # of a WebSocket: 5,000 frames without content, 10 ms


class ConnectionTable:
    """The open connections of one server."""

    def __init__(self, most: int, read_timeout_s: float, slow_reader_s: float) -> None:
        self.most, self.read_timeout_s, self.slow_reader_s = most, read_timeout_s, slow_reader_s
        self._open: dict[HttpConnection, None] = {}
        self._unread: dict[HttpConnection, None] = {}  # that wait for their client to read, longest first

    def enter(self, connection: HttpConnection) -> bool:
        """Take a place for this connection, closing an idle one if necessary; return whether there was one."""
        if len(self._open) >= self.most:
            idle = [one for one in self._open if one.is_idle and not one.is_authenticated]
            longest = min(idle, key=lambda one: one.idle_since_s, default=None)
            if longest is None or asyncio.get_running_loop().time() - longest.idle_since_s < GRACE_S:
                return False
            self.leave(longest)
            longest.force_close()
        self._open[connection] = None
        return True

    def leave(self, connection: HttpConnection) -> None:
        self._open.pop(connection, None)
        self._unread.pop(connection, None)

    def on_stall(self, connection: HttpConnection) -> None:
        """Note a connection whose client reads too slowly. If too much is unsent over all, cut the first ones."""
        self._unread[connection] = None
        unsent_bytes = sum(one.unsent_bytes for one in self._unread)
        for one in list(self._unread):
            if unsent_bytes <= UNSENT_BYTES_MAX:
                return
            unsent_bytes -= one.unsent_bytes
            one.cut()

    def on_drain(self, connection: HttpConnection) -> None:
        self._unread.pop(connection, None)


class HttpConnection(web.RequestHandler):
    """One connection: aiohttp's protocol, with a place in the table and a timer for clients that do not read."""

    __slots__ = (
        "_table",
        "_is_in",
        "_left_bytes",
        "_next_piece",
        "_progress_timer",
        "_silence_timer",
        "_unparsed",
        "is_authenticated",
        "is_refused",
    )

    def __init__(self, table: ConnectionTable, server: web.Server, options: dict[str, Any]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self.is_authenticated = self.is_refused = False
        self._table = table
        self._is_in = False
        self._left_bytes = 0
        self._silence_timer: asyncio.TimerHandle | None = None
        self._progress_timer: asyncio.TimerHandle | None = None
        self._unparsed = b""
        self._next_piece: asyncio.Handle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request runs, but for one that is being refused; also before the first one."""
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
        self._table.leave(self)
        if self.transport is not None:
            cut(self.transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not HTTP. The error holds the frame that holds it, with all that was received: break that."""
        try:
            return super().handle_error(request, status, exc, message)
        finally:
            _forget_frames(exc)

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._table.enter(self):
            stream = cast(asyncio.Transport, transport)
            self._force_close = True  # nothing that comes is read
            stream.write(_too_many(self._table.most))
            stream.close()
            return
        self._is_in = True
        super().connection_made(transport)
        self._silence_timer = self._loop.call_later(self._table.read_timeout_s, self._cut_if_silent)

    def set_parser(self, parser: Any, data_received_cb: Callable[[], None] | None = None) -> None:
        """Give the data that came before its parser to it in pieces, too."""
        tail, self._message_tail = self._message_tail, b""
        super().set_parser(parser, data_received_cb)
        if tail:
            self.data_received(tail)

    def data_received(self, data: bytes) -> None:
        if self._payload_parser is None or not (self._unparsed or len(data) > PARSED_BYTES_AT_ONCE):
            super().data_received(data)
            return
        is_waiting = bool(self._unparsed)
        self._unparsed += data
        if not is_waiting:
            self._pause_transport_reading()
            self._parse_piece()

    def _parse_piece(self) -> None:
        self._next_piece = None
        piece, self._unparsed = self._unparsed[:PARSED_BYTES_AT_ONCE], self._unparsed[PARSED_BYTES_AT_ONCE:]
        super().data_received(piece)
        if not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _resume_transport_reading(self) -> None:
        """Read on, or parse the next piece when the loop has run what else is ready."""
        if not self._unparsed:
            super()._resume_transport_reading()
        elif self._next_piece is None:
            self._next_piece = self._loop.call_soon(self._parse_piece)

    def connection_lost(self, error: BaseException | None) -> None:
        self._unparsed = b""
        for timer in (self._silence_timer, self._progress_timer):
            if timer is not None:
                timer.cancel()
        self._table.leave(self)
        for message, _ in self._messages:  # what is not HTTP and was not answered before its client left
            _forget_frames(getattr(message, "exc", None))
        if self._is_in:
            super().connection_lost(error)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._is_in:
            self._left_bytes = self.unsent_bytes
            self._progress_timer = self._loop.call_later(self._table.slow_reader_s, self._cut_without_progress)
            self._table.on_stall(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._table.on_drain(self)
        if self._progress_timer is not None:
            self._progress_timer.cancel()

    def _cut_without_progress(self) -> None:
        """Cut a client that has read nothing. No more is written for it, so its buffer shrinks if it reads."""
        if self.unsent_bytes >= self._left_bytes:
            self.cut()
            return
        self._left_bytes = self.unsent_bytes
        self._progress_timer = self._loop.call_later(self._table.slow_reader_s, self._cut_without_progress)

    def _cut_if_silent(self) -> None:
        """Cut a client whose first headers have not come; for a body that does not come, `read_body` has a limit."""
        if self._request_count == 0:
            self.cut()


def _forget_frames(error: BaseException | None) -> None:
    if error is not None:
        error.__traceback__ = None


def is_behind(request: web.Request) -> bool:
    """Return whether the client reads less than it is sent; cheaper than to await `drained` once per token."""
    return getattr(request.protocol, "_paused", False)


async def drained(request: web.Request) -> None:
    """Wait until the client has read most of its data. Raise ConnectionError if it is gone."""
    if isinstance(request.protocol, HttpConnection):
        await request.protocol.drained()


def mark_authenticated(request: web.Request) -> None:
    """Never close the connection of this request, which has shown a valid token, to make room for others."""
    if isinstance(request.protocol, HttpConnection):
        request.protocol.is_authenticated = True


def mark_refused(request: web.Request) -> None:
    """Allow closing the connection of this request, which is being refused, to make room for others."""
    if isinstance(request.protocol, HttpConnection):
        request.protocol.is_refused = True


def cut(transport: asyncio.Transport) -> None:
    """Close a connection at once and drop unsent data."""
    plain = transport.get_extra_info("socket")
    if plain is not None and plain.fileno() >= 0:
        with socket.socket(fileno=os.dup(plain.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    transport.abort()


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
