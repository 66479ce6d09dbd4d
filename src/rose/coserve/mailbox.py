"""Where the events of a request wait for their reader.

A mailbox belongs to one reader and holds the events of one or more requests, in the order in which they came. What a
reader may leave unread is bounded; who fills the mailbox looks at `full` and does something about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rose.engines.base import TokenEvent
from rose.errors import RoseError

MAILBOX_TOKENS = 1 << 16  # tokens and alternatives one reader may leave unread: some ten megabytes
PATIENT_TOKENS = 4096  # even a reader that waits for an end is woken by this much: decoding it takes some 10 ms


class Mailbox:
    """Events for one reader, in order. Ends by an error, or by `close`."""

    def __init__(self, tokens_max: float = MAILBOX_TOKENS) -> None:
        self._tokens_max = tokens_max
        self._events: list[TokenEvent] = []
        self._tokens = 0
        self._error: RoseError | None = None
        self.closed = False
        self.on_error: Callable[[RoseError], None] | None = None  # of a reader that sees the events elsewhere
        self._waiter: asyncio.Future[None] | None = None
        self._ends_wanted = 0
        self._ends = 0

    @property
    def full(self) -> bool:
        return self._tokens > self._tokens_max

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._tokens += len(event.token_ids) + sum(map(len, event.top_logprobs))
        self._ends += event.finish_reason is not None
        if self._ends >= self._ends_wanted or self._tokens > PATIENT_TOKENS:
            self._wake()

    def fail(self, error: RoseError) -> None:
        """What was put before is still read; then the reader gets this error."""
        self._error = self._error or error
        self._wake()
        if self.on_error is not None:
            self.on_error(error)

    def close(self) -> None:
        """Nothing more to read, not even what is there."""
        self._events.clear()
        self.closed = True
        self._wake()

    async def take(self, *, ends: int = 0) -> list[TokenEvent]:
        """All events since the last call, at least one; empty only after `close`.

        A reader that has no use for single tokens gives `ends`: it is woken when that many requests have ended, or
        when much has come. That saves it, and the event loop, a wake-up per token.
        """
        if (not self._events or self._ends < ends) and self._error is None and not self.closed:
            self._ends_wanted = ends
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._events or self.closed:
            events, self._events, self._tokens, self._ends = self._events, [], 0, 0
            return events
        assert self._error is not None
        raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
