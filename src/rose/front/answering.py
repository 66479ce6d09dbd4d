"""How an answer goes out, the same for every route that generates: whole, or as a stream of events.

A route gives its `Form`: what the whole answer looks like and what a chunk looks like. A stream starts with its first
piece, so that a request that is refused still gets a status of its own; after that an error is an event.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from rose.errors import RoseError
from rose.front.connections import drained
from rose.front.context import Front
from rose.front.encoding import ENCODER, encode_parts
from rose.front.events import EventStream, ReaderGone
from rose.front.failures import bad_request, failure_of
from rose.front.generation import Choice, Generation, Piece, WeightSpan
from rose.front.offload import offload_surely
from rose.front.replies import Placed, PromptTokensDetails, Usage, WeightVersion
from rose.front.requests import StreamOptions

ARRIVAL = web.RequestKey("arrival_s", float)
INLINE_ENTRIES = 8192  # rendered in some 10 ms; more is done in a thread


class Form(Protocol):
    """The shape of one route's answers to one request."""

    def whole(self, choices: Sequence[Choice]) -> msgspec.Struct:
        """The answer when all choices have ended."""

    def opening(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        """Chunks before the first piece."""

    def chunk(self, choice: Choice, piece: Piece) -> msgspec.Struct | None:
        """The chunk for a piece; None if there is nothing to show yet."""

    def closing(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        """Chunks after the last piece: the usage, if it was asked for."""


async def answer(
    front: Front, request: web.Request, choices: Sequence[Choice], form: Form, *, stream: bool
) -> web.StreamResponse:
    """Run the choices and send what comes of them."""
    with front.generate(choices) as generation:
        if stream:
            return await _stream(front, request, generation, form)
        await generation.finish()
    if sum(map(_entries, choices)) <= INLINE_ENTRIES:
        return json_response(form.whole(choices))
    return await _send_parts(request, await offload_surely(lambda: encode_parts(form.whole(choices))))


async def _send_parts(request: web.Request, parts: Sequence[bytes]) -> web.StreamResponse:
    """Send a large answer without ever holding it in one piece."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = sum(map(len, parts))
    await response.prepare(request)
    for part in parts:
        await response.write(part)
        await drained(request)
    return response


def _entries(choice: Choice) -> int:
    """How many tokens and alternatives its answer may list."""
    return len(choice.token_ids) * (1 + choice.request.sampling.top_logprobs)


def json_response(body: msgspec.Struct) -> web.Response:
    return web.Response(body=ENCODER.encode(body), content_type="application/json")


def new_id(prefix: str, wanted: str | None = None) -> str:
    """Unique even when callers repeat themselves: the engine knows requests by it."""
    return f"{prefix}-{wanted}-{uuid.uuid4().hex[:8]}" if wanted else f"{prefix}-{uuid.uuid4().hex}"


def now_unix_s() -> int:
    return int(time.time())


def check_stream(stream: bool | None, options: StreamOptions | None) -> None:
    """Options of a stream go with a stream, and only with what it can do."""
    if options is None:
        return
    if not stream:
        raise bad_request("`stream_options` needs `stream` to be true", param="stream_options")
    for name in ("continuous_usage_stats", "include_obfuscation"):
        if getattr(options, name):
            param = f"stream_options.{name}"
            raise bad_request(f"`{param}` is not implemented", param=param, code="unsupported_parameter")


def wants_usage(options: StreamOptions | None) -> bool:
    return options is not None and bool(options.include_usage)


def usage_of(choices: Sequence[Choice], prompt_choices: int = 1) -> Usage:
    """Prompts count once however many choices they have; so do their cached tokens."""
    firsts = choices[::prompt_choices]
    prompt = sum(len(choice.request.prompt_ids) for choice in firsts)
    completion = sum(len(choice.token_ids) for choice in choices)
    cached = PromptTokensDetails(sum(choice.cached_tokens for choice in firsts))
    return Usage(prompt, completion, prompt + completion, cached)


def versions_of(spans: Iterable[WeightSpan]) -> list[WeightVersion]:
    return [WeightVersion(span.version, span.start, span.end) for span in spans]


def piece_versions(piece: Piece) -> list[WeightVersion]:
    """The spans of a chunk's own tokens."""
    end = piece.start + len(piece.token_ids)
    return [WeightVersion(piece.version, piece.start, end)] if piece.token_ids else []


def placed_of(choices: Sequence[Choice], place: Placed | None) -> Placed | UnsetType:
    """Where choices ran. A device says nothing: it is the only place."""
    workers = list(dict.fromkeys(worker for choice in choices for worker in choice.workers))
    if place is None:
        return Placed(workers) if workers else UNSET
    return Placed(workers, place.trajectory, place.turn, place.is_fork)


async def _stream(front: Front, request: web.Request, generation: Generation, form: Form) -> web.StreamResponse:
    pieces = await generation.next()
    stream = EventStream(request)
    # Without a reader there is nobody to tell; leaving the generation cancels what is left of it.
    with contextlib.suppress(ReaderGone):
        await stream.open()
        try:
            await _send_all(stream, generation, form, pieces)
        except RoseError as error:
            await stream.fail(failure_of(error))
        await stream.close()
    return stream.response


async def _send_all(
    stream: EventStream, generation: Generation, form: Form, pieces: list[tuple[Choice, Piece]]
) -> None:
    chunks: list[msgspec.Struct] = list(form.opening(generation.choices))
    while pieces:
        chunks += [chunk for found in pieces if (chunk := form.chunk(*found)) is not None]
        await stream.send(chunks)
        chunks = []
        pieces = await generation.next()
    await stream.send(form.closing(generation.choices))
