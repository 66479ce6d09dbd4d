"""Token streams: the events of requests on their way to the reader of an HTTP response.

An engine client delivers events to a `TokenSink`. A `TokenStream` is the sink of a reader in another task: it keeps
events in order and wakes the reader. What a reader leaves unread is bounded: the engine client looks at `is_full` and
cancels the requests of a reader that is too slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from rose.api.requests import Request, TokenEvent
from rose.errors import RequestRefused, RoseError, Unavailable

UNREAD_TOKENS_MAX = 1 << 16  # tokens and alternatives one reader may leave unread: some ten megabytes
PATIENT_TOKENS = 4096  # so many wake even a reader that waits for an end: decoding them takes some 10 ms


class TokenSink(Protocol):
    """Receiver of the events of the requests it was submitted with."""

    @property
    def is_full(self) -> bool:
        """Return whether too much is unread; its requests are then cancelled, and it fails."""

    def put(self, event: TokenEvent) -> None:
        """Take the next event of a request; the last one has a finish reason."""

    def fail(self, error: RoseError) -> None:
        """Take the error that ends what has not ended: a refusal, or the loss of the engine."""


class TokenStream:
    """A `TokenSink` for one reader, which ends by an error."""

    def __init__(self, tokens_max: float = UNREAD_TOKENS_MAX) -> None:
        self._tokens_max = tokens_max
        self._events: list[TokenEvent] = []
        self._tokens = 0
        self._error: RoseError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ends_wanted = 0
        self._ends = 0

    @property
    def is_full(self) -> bool:
        return self._tokens > self._tokens_max

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._tokens += len(event.token_ids) + sum(map(len, event.top_logprobs))
        self._ends += event.finish_reason is not None
        if self._ends >= self._ends_wanted or self._tokens > PATIENT_TOKENS:
            self._wake()

    def fail(self, error: RoseError) -> None:
        """End the stream: the reader gets this error after the events put before."""
        self._error = self._error or error
        self._wake()

    async def take(self, *, ends: int = 0) -> list[TokenEvent]:
        """Return all events since the last call, at least one. Raises the error that ended the stream.

        A reader that needs no single tokens passes `ends`: it is woken when that many requests have ended, or when
        much is unread. That saves a wake-up per token.
        """
        if (not self._events or self._ends < ends) and self._error is None:
            self._ends_wanted = ends
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._events:
            events, self._events, self._tokens, self._ends = self._events, [], 0, 0
            return events
        assert self._error is not None
        raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SinkTable:
    """The sinks of one engine's requests, by request id."""

    def __init__(self) -> None:
        self._sinks: dict[str, TokenSink] = {}

    def __len__(self) -> int:
        return len(self._sinks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sinks

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._sinks))

    def add(self, requests: Sequence[Request], sink: TokenSink) -> None:
        """Enter these requests. Raises RequestRefused, and enters none, if an id is in use."""
        for request in requests:
            if request.request_id in self._sinks:
                raise RequestRefused(f"request id `{request.request_id}` is already in use")
        self._sinks |= dict.fromkeys((request.request_id for request in requests), sink)

    def remove(self, request_id: str) -> bool:
        """Forget a request, and return whether it was there."""
        return self._sinks.pop(request_id, None) is not None

    def deliver(self, event: TokenEvent) -> Iterable[str]:
        """Hand an event to its sink, and return the requests to cancel: those of a sink that is full."""
        sink = self._sinks.get(event.request_id)
        if sink is None:  # cancelled while the step ran
            return ()
        if event.finish_reason is not None:
            del self._sinks[event.request_id]
            sink.put(event)
            return ()
        sink.put(event)
        if not sink.is_full:
            return ()
        sink.fail(Unavailable("the reader of this request is too slow"))
        return [request_id for request_id, known in self._sinks.items() if known is sink]

    def fail(self, request_id: str, error: RoseError) -> None:
        """End one request with an error, if it is here."""
        sink = self._sinks.pop(request_id, None)
        if sink is not None:
            sink.fail(error)

    def fail_all(self, error: RoseError) -> None:
        """End every request with an error, each sink once."""
        sinks, self._sinks = dict.fromkeys(self._sinks.values()), {}
        for sink in sinks:
            sink.fail(error)
