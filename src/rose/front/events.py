"""Server-sent events to one client.

Chunks of one step go out in one write. While a client is behind nothing more is written for it; if it takes nothing
for too long its connection is cut (connections.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from aiohttp import web

from rose.front.connections import drained, is_behind
from rose.front.encoding import ENCODER
from rose.front.failures import Failure

DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: msgspec.Struct) -> bytes:
    """One event. JSON has no raw line ends, so a chunk is always one line."""
    return b"data: " + ENCODER.encode(data) + b"\n\n"


class ReaderGone(Exception):
    """The client does not read, or is not there any more; there is nobody to answer."""


class EventStream:
    """A response that is written as it comes."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request

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
        try:
            await self.response.write(data)
            if is_behind(self._request):
                await drained(self._request)
        except ConnectionError as error:
            raise ReaderGone from error
