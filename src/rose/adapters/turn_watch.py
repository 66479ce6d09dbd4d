"""Waiting for turns of a pool: a turn may wait long for a worker, and must not wait for a gateway that is away.

A full pool makes turns wait without end. So while any of them waits, one look at the pool every `WATCH_S` serves all.
It notices a gateway that is away, and a pool in which no turn ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from rose.adapters.rose_pool import shortage
from rose.errors import Unavailable

WATCH_S = 5.0  # between two looks at the pool
QUIET_S = 30.0  # without an ended turn, after which the log says why

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class TurnWatch:
    """The turns of one event loop. `status` asks the gateway for the state of its pool."""

    def __init__(self, status: Callable[[], Awaitable[Mapping[str, Any]]], stale_after_s: float) -> None:
        self._status, self._stale_after_s = status, stale_after_s
        self._look: asyncio.Future[Mapping[str, Any]] | None = None
        self._playing, self._is_reported = 0, False
        self._ended_s = self._looked_s = 0.0

    async def __call__(self, turn: Awaitable[Result]) -> Result:
        """Return what a turn returns. Raise Unavailable if the gateway is away, or no turn has ended for long."""
        if not self._playing:
            self._ended_s = time.monotonic()
        self._playing += 1
        playing = asyncio.ensure_future(turn)
        try:
            while not (await asyncio.wait([playing], timeout=WATCH_S))[0]:
                await self._check()
            return playing.result()
        finally:
            playing.cancel()
            self._playing -= 1
            self._ended_s, self._is_reported = time.monotonic(), False

    async def _check(self) -> None:
        if self._look is None or time.monotonic() - self._looked_s >= WATCH_S:
            self._looked_s, self._look = time.monotonic(), asyncio.ensure_future(self._status())
        status = await asyncio.shield(self._look)
        quiet_s = time.monotonic() - self._ended_s
        if quiet_s > self._stale_after_s:
            hint = "start workers, or wait longer for a turn if turns take longer"
            raise Unavailable(f"no turn has ended for {quiet_s:.0f} s: {shortage(status)}", hint=hint)
        if quiet_s > QUIET_S and not self._is_reported:
            self._is_reported = True
            logger.warning("no turn has ended for %.0f s: %s", quiet_s, shortage(status))
