"""The edges of a connection: how many there may be, how long one may say nothing, and how one is cut.

One connection too many is told so and closed, at no cost to the others. One that has not said what it wants within a
while must go: it would hold a place for ever. A connection that is cut is reset, so that the kernel drops what it still
held for a client that does not read.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import cast

from aiohttp import web

from rose.front.failures import Failure

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger for zero seconds


class Doorkeeper(asyncio.Protocol):
    """The first protocol of every connection: hands it to aiohttp, or turns it away."""

    def __init__(self, server: web.Server, most: int, patience_s: float) -> None:
        self._server, self._most, self._patience_s = server, most, patience_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        if len(self._server.connections) >= self._most:
            stream.write(_too_many(self._most))
            stream.close()
            return
        handler = self._server()
        stream.set_protocol(handler)
        handler.connection_made(stream)
        asyncio.get_running_loop().call_later(self._patience_s, _cut_if_silent, stream)


def _cut_if_silent(transport: asyncio.Transport) -> None:
    """Its first request has not come, headers and all; a body that does not come is the reader's affair."""
    if not transport.is_closing() and getattr(transport.get_protocol(), "_request_count", 1) == 0:
        cut(transport)


def cut(transport: asyncio.Transport) -> None:
    """Close a connection at once and forget what was not sent."""
    found = transport.get_extra_info("socket")
    if found is not None and found.fileno() >= 0:
        with socket.socket(fileno=os.dup(found.fileno())) as same:
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
