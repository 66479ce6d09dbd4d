"""HTTP clients that send a request again while the gateway is away or busy, for a time and not for a number of tries.

The official OpenAI client counts tries: with its eight-second pauses, eight tries end after 37 s, and the episode is
lost though the gateway is back a moment later. Here a request that fails is sent again until `patience_s` have passed
since it first failed, as `rose.rollout.client` does. The gateway recognises a request that it has seen, so sending it
again runs no turn twice.

The OpenAI client is built on httpx or on httpx2, by its version. The classes here are made from the one it brings.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import time
from collections.abc import Callable
from typing import Any

TRY_AGAIN = (429, 502, 503, 504)
PAUSE_S, PAUSE_LONGEST_S = 0.25, 5.0


class Retries:
    """The retries of one request. `pause_s` returns how long to wait before the next, or None when time is up."""

    def __init__(self, patience_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._now_s = patience_s, now_s
        self._deadline_s = math.inf
        self._pause_s = PAUSE_S

    def pause_s(self, retry_after: str | None = None) -> float | None:
        """`retry_after` is the header of a reply that asks for patience."""
        now_s = self._now_s()
        self._deadline_s = min(self._deadline_s, now_s + self._patience_s)
        left_s = self._deadline_s - now_s
        if left_s <= 0:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_LONGEST_S)
        return min(left_s, _seconds(retry_after) or pause_s)


def _seconds(header: str | None) -> float | None:
    """Return the pause that a server asks for, None if it names a date or nonsense."""
    try:
        found = float(header or "")
    except ValueError:
        return None
    return min(found, PAUSE_LONGEST_S) if found > 0 else None


def patient(client: type, patience_s: float, answered: Callable[[Any], None]) -> type:
    """Return a subclass of an httpx client, synchronous or not, that sends failed requests again.

    `answered` is called with each reply that is handed on, once its body is there unless it is a stream.
    """
    http: Any = importlib.import_module(next(base.__module__ for base in client.__mro__ if _is_httpx(base)))
    failures = (http.TransportError,)
    is_asynchronous = issubclass(client, http.AsyncClient)
    return (_asynchronous if is_asynchronous else _synchronous)(client, failures, patience_s, answered)


def _is_httpx(base: type) -> bool:
    return base.__module__ in ("httpx", "httpx2")


def _synchronous(client: Any, failures: Any, patience_s: float, answered: Callable[[Any], None]) -> type:
    class PatientClient(client):  # type: ignore[misc]
        def send(self, request: Any, **options: Any) -> Any:
            retries = Retries(patience_s)
            while True:
                try:
                    reply = super().send(request, **options)
                except failures:
                    if (pause_s := retries.pause_s()) is None:
                        raise
                else:
                    pause = retries.pause_s(reply.headers.get("Retry-After")) if _asks_again(reply) else None
                    if (pause_s := pause) is None:
                        answered(reply)
                        return reply
                    reply.close()
                time.sleep(pause_s)

    return PatientClient


def _asynchronous(client: Any, failures: Any, patience_s: float, answered: Callable[[Any], None]) -> type:
    class PatientAsyncClient(client):  # type: ignore[misc]
        async def send(self, request: Any, **options: Any) -> Any:
            retries = Retries(patience_s)
            while True:
                try:
                    reply = await super().send(request, **options)
                except failures:
                    if (pause_s := retries.pause_s()) is None:
                        raise
                else:
                    pause = retries.pause_s(reply.headers.get("Retry-After")) if _asks_again(reply) else None
                    if (pause_s := pause) is None:
                        answered(reply)
                        return reply
                    await reply.aclose()
                await asyncio.sleep(pause_s)

    return PatientAsyncClient


def _asks_again(reply: Any) -> bool:
    return reply.status_code in TRY_AGAIN
