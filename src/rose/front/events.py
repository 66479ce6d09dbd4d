"""Server-sent events to one client.

Chunks of one step go out in one write. A client that takes nothing for `slow_reader_s` is cut off, so that it holds
no more than its own buffers; nobody else waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
from aiohttp import web

from rose.front.connections import cut
from rose.front.failures import Failure

DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
ROOM_BYTES = 32 << 10  # half of what a transport takes before it makes writers wait: below it, no need for a timer

_encoder = msgspec.json.Encoder()


def event(data: msgspec.Struct) -> bytes:
    """One event. JSON has no raw line ends, so a chunk is always one line."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


class ReaderGone(Exception):
    """The client does not read, or is not there any more; there is nobody to answer."""


class EventStream:
    """A response that is written as it comes."""

    def __init__(self, request: web.Request, slow_reader_s: float) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._slow_reader_s = slow_reader_s

    async def open(self) -> None:
        """Raises ReaderGone."""
        self.response.enable_chunked_encoding()
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ReaderGone from error

    async def send(self, chunks: Iterable[msgspec.Struct]) -> None:
        """Raises ReaderGone."""
        await self._write(b"".join(map(event, chunks)))

    async def fail(self, failure: Failure) -> None:
        """The status has gone out already: the error comes as an event."""
        await self._write(event(failure.body))

    async def close(self) -> None:
        """Raises ReaderGone; aiohttp ends the response itself when the handler returns it."""
        await self._write(DONE)

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        transport = self._request.transport
        try:
            if transport is not None and transport.get_write_buffer_size() + len(data) < ROOM_BYTES:
                await self.response.write(data)
                return
            async with asyncio.timeout(self._slow_reader_s):
                await self.response.write(data)
        except (TimeoutError, ConnectionError) as error:
            if transport is not None:
                cut(transport)
            raise ReaderGone from error
