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

from rose.front.handle import EngineHandle
from rose.observe.metrics import Metrics

logger = logging.getLogger("rose.front")


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
    """Its failure is logged and is nobody else's: the device goes on."""
    if companion is None:
        yield
        return
    task = asyncio.create_task(_run(engine, metrics, companion))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run(engine: EngineHandle, metrics: Metrics, companion: Companion) -> None:
    module, _, name = companion.factory.partition(":")
    try:
        await getattr(importlib.import_module(module), name)(engine, metrics, companion.arguments)
    except Exception:
        logger.exception("%s failed; the device goes on without it", companion.factory)
