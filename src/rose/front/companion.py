"""Something that runs beside a device's door with the device's engine in its hands, such as the agent of a gateway.

The front knows nothing of it but its name, `module:function`, and the plain arguments it is called with: it is
imported late, in the process that holds the engine for rollouts, and lives no longer than the door. What it measures is
shown at the door, beside the device's own numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from rose.coserve.supervision import supervise
from rose.front.handle import EngineHandle
from rose.observe.metrics import Metrics

logger = logging.getLogger("rose.front")

PAUSE_FIRST_S, PAUSE_LONGEST_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Companion:
    """`factory` names an `async def f(engine, metrics, arguments)` that runs until it is cancelled."""

    factory: str
    arguments: dict[str, Any]

    def told(self, **more: Any) -> Companion:
        """With what only the device knows; what was given before stays."""
        return Companion(self.factory, {**more, **self.arguments})


@contextlib.asynccontextmanager
async def accompanied(engine: EngineHandle, metrics: Metrics, companion: Companion | None) -> AsyncIterator[None]:
    """Run the companion meanwhile. If it fails, that is logged and it is started again: the device goes on."""
    if companion is None:
        yield
        return
    task = supervise(_keep(engine, metrics, companion), companion.factory, lambda reason: None)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _keep(engine: EngineHandle, metrics: Metrics, companion: Companion) -> None:
    """Until the companion ends by itself, or is cancelled."""
    pause_s = PAUSE_FIRST_S
    while not await _run(engine, metrics, companion):
        logger.error("%s is started again in %g s", companion.factory, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(PAUSE_LONGEST_S, 2 * pause_s)


async def _run(engine: EngineHandle, metrics: Metrics, companion: Companion) -> bool:
    """Return whether it ended by itself, not by an error."""
    module, _, name = companion.factory.partition(":")
    try:
        await getattr(importlib.import_module(module), name)(engine, metrics, companion.arguments)
    except Exception:
        logger.exception("%s failed; the device goes on without it", companion.factory)
        return False
    return True
