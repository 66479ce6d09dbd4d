"""Responses as bytes: JSON in one piece, in parts, or as server-sent events.

A whole response with log-probabilities may have tens of megabytes. To encode or copy it in one call would hold Python's
lock, and with it the event loop, for a tenth of a second. So long lists arrive here encoded in batches (`EncodedList`).
The encoder writes a mark in their place, and the response is the text between the marks with the batches in between.

Events of one step go out in one write. While a client is behind nothing more is written for it; if it takes nothing
for too long its connection is cut (connections.py).
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import msgspec
from aiohttp import web

from rose.openai.connections import drained, is_behind
from rose.openai.http_errors import Failure

DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

# Part of no response, since it cannot be guessed.
_MARK = b'"%s"' % secrets.token_hex(16).encode()


class EncodedList:
    """A JSON list in batches: the items of each, encoded, without brackets. Not a type that msgspec knows."""

    def __init__(self, batches: Sequence[bytes]) -> None:
        self.batches = batches


def _joined(value: object) -> msgspec.Raw:
    assert isinstance(value, EncodedList), f"{type(value).__name__} is not part of a response"
    return msgspec.Raw(b"[" + b",".join(value.batches) + b"]")


ENCODER = msgspec.json.Encoder(enc_hook=_joined)  # of responses that are not large, and of the chunks of a stream


def json_response(body: msgspec.Struct) -> web.Response:
    return web.Response(body=ENCODER.encode(body), content_type="application/json")


def encode_parts(body: msgspec.Struct) -> list[bytes]:
    """Return the JSON of a large response as parts to be sent one after the other."""
    lists: list[EncodedList] = []

    def leave_out(value: object) -> msgspec.Raw:
        assert isinstance(value, EncodedList), f"{type(value).__name__} is not part of a response"
        lists.append(value)
        return msgspec.Raw(_MARK)

    first, *rest = msgspec.json.encode(body, enc_hook=leave_out).split(_MARK)
    parts = [first]
    for items, after in zip(lists, rest, strict=True):
        for number, batch in enumerate(items.batches):
            parts += (b"," if number else b"[", batch)
        parts += (b"]", after)
    return parts


async def send_parts(request: web.Request, parts: Sequence[bytes]) -> web.StreamResponse:
    """Send a large response without ever holding it in one piece."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = sum(map(len, parts))
    await response.prepare(request)
    for part in parts:
        await response.write(part)
        await drained(request)
    return response


def event(data: msgspec.Struct) -> bytes:
    """Return one event. JSON has no raw line ends, so a chunk is always one line."""
    return b"data: " + ENCODER.encode(data) + b"\n\n"


def named_event(data: msgspec.Struct) -> bytes:
    """Return one event under the name that its type has as its tag."""
    return b"event: " + str(data.__struct_config__.tag).encode() + b"\n" + event(data)


class ReaderGone(Exception):
    """The client does not read or has disconnected; there is no reader to answer."""


class EventStream:
    """A response that is written as its chunks come. Its methods raise ReaderGone."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request

    async def open(self) -> None:
        self.response.enable_chunked_encoding()
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ReaderGone from error

    async def send(self, chunks: Iterable[msgspec.Struct]) -> None:
        await self._write(b"".join(map(event, chunks)))

    async def fail(self, failure: Failure) -> None:
        """Send the error as an event: the status has gone out already."""
        await self._write(event(failure.body))

    async def close(self) -> None:
        """Send the last event; aiohttp ends the response itself when the handler returns it."""
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


class NamedEvents(EventStream, ABC):
    """A stream whose events have names, and no mark at the end."""

    @abstractmethod
    def errors(self, failure: Failure) -> Iterable[msgspec.Struct]:
        """Return the events that tell an error."""

    async def send(self, chunks: Iterable[msgspec.Struct]) -> None:
        await self._write(b"".join(map(named_event, chunks)))

    async def fail(self, failure: Failure) -> None:
        await self.send(self.errors(failure))

    async def close(self) -> None:
        """End without a last event of its own."""
