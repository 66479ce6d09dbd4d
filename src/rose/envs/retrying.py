"""HTTP clients that send a failed request again for a time, not for a number of tries, as `rose.client` does.

The official OpenAI client counts tries: with its eight-second pauses, eight tries end after 37 s, and the episode is
lost though the gateway is back a moment later. The gateway recognises a request that it has seen, so sending it again
runs no turn twice. The OpenAI client is built on httpx or on httpx2, by its version; the classes here are made from
the one it brings.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import time
from collections.abc import Callable
from typing import Any

HTTPX = ("httpx", "httpx2")  # modules of the client classes
RETRIED_STATUSES = (429, 502, 503, 504)
PAUSE_S, PAUSE_LONGEST_S = 0.25, 5.0


class Retries:
    """The retries of one request."""

    def __init__(self, patience_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._now_s = patience_s, now_s
        self._deadline_s = math.inf
        self._pause_s = PAUSE_S

    def pause_s(self, retry_after: str | None = None) -> float | None:
        """Return the wait before the next try, or None when time is up. `retry_after` is the response's header."""
        now_s = self._now_s()
        self._deadline_s = min(self._deadline_s, now_s + self._patience_s)
        left_s = self._deadline_s - now_s
        if left_s <= 0:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_LONGEST_S)
        return min(left_s, _seconds(retry_after) or pause_s)

    def pause_after_s(self, response: Any) -> float | None:
        """Return the wait before the next try if a response asks for one, else None."""
        return self.pause_s(response.headers.get("Retry-After")) if response.status_code in RETRIED_STATUSES else None


def _seconds(header: str | None) -> float | None:
    """Return the pause that a server asks for, None if it names a date or nonsense."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return min(seconds, PAUSE_LONGEST_S) if seconds > 0 else None


def retrying_client(client: Any, patience_s: float, on_response: Callable[[Any], None]) -> type:
    """Return a subclass of an httpx client, synchronous or not, that sends failed requests again.

    `on_response` is called with each response that is handed on, once its body is there unless it is a stream.
    """
    http: Any = importlib.import_module(next(base.__module__ for base in client.__mro__ if base.__module__ in HTTPX))

    class RetryingClient(client):  # type: ignore[misc]
        def send(self, request: Any, **options: Any) -> Any:
            retries = Retries(patience_s)
            while True:
                try:
                    response = super().send(request, **options)
                except http.TransportError:
                    if (pause_s := retries.pause_s()) is None:
                        raise
                else:
                    if (pause_s := retries.pause_after_s(response)) is None:
                        on_response(response)
                        return response
                    response.close()
                time.sleep(pause_s)

    class RetryingAsyncClient(client):  # type: ignore[misc]
        async def send(self, request: Any, **options: Any) -> Any:
            retries = Retries(patience_s)
            while True:
                try:
                    response = await super().send(request, **options)
                except http.TransportError:
                    if (pause_s := retries.pause_s()) is None:
                        raise
                else:
                    if (pause_s := retries.pause_after_s(response)) is None:
                        on_response(response)
                        return response
                    await response.aclose()
                await asyncio.sleep(pause_s)

    return RetryingAsyncClient if issubclass(client, http.AsyncClient) else RetryingClient
