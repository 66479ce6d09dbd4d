"""One HTTP server of a device, from listening to leaving, and the sidecar task that runs beside it.

The engine's end is the server's end too: if the engine cannot be kept running, the server stops with that error. A
sidecar task, such as the agent of a gateway, uses the server's engine client and exposes its metrics there. It is known
by name only and imported late, in the process that has the engine client for rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from rose.device.admin_routes import ADMIN_ROUTES, LentContext
from rose.device.supervision import supervise
from rose.engines.base import EngineClient
from rose.engines.process_keeper import RestartPolicy, keep_running
from rose.observe.metrics import Metrics
from rose.openai.application import application
from rose.openai.http_context import HttpContext
from rose.openai.http_server import HttpServer, InFlight, Say, Signals, connections_limit, drain
from rose.openai.loops import settle_process

logger = logging.getLogger("rose.device")

SIDECAR_RESTARTS = RestartPolicy(pause_first_s=1.0, pause_longest_s=60.0, healthy_s=math.inf)


@dataclass(frozen=True, slots=True)
class SidecarTask:
    """A task by name: `factory` is "module:function" of an `async def f(engine, metrics, arguments)`."""

    factory: str
    arguments: dict[str, Any]

    def with_defaults(self, **more: Any) -> SidecarTask:
        """Return the same task with more arguments; those that are there already stay."""
        return SidecarTask(self.factory, {**more, **self.arguments})


@contextlib.asynccontextmanager
async def sidecar_running(engine: EngineClient, metrics: Metrics, task: SidecarTask | None) -> AsyncIterator[None]:
    """Run the sidecar task meanwhile. If it fails, that is logged and it is started again: the device goes on."""
    if task is None:
        yield
        return
    module, _, name = task.factory.partition(":")

    async def run_once() -> str:
        try:
            await getattr(importlib.import_module(module), name)(engine, metrics, task.arguments)
        except Exception as error:
            logger.exception("%s failed; the device goes on without it", task.factory)
            return repr(error)
        return ""

    async def keep() -> None:
        await keep_running(
            run_once,
            SIDECAR_RESTARTS,
            lambda why, pause_s: logger.error("%s is started again in %g s", task.factory, pause_s),
        )

    keeper = supervise(keep(), task.factory, lambda reason: None)
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def answer_until(
    context: HttpContext,
    engine: EngineClient,
    listener: socket.socket,
    signals: Signals,
    say: Say,
    *,
    on_open: Callable[[], None],
) -> None:
    """Answer requests until a signal comes; `on_open` is called once the server listens."""
    settle_process()
    in_flight, settings = InFlight(), context.settings
    routes = ADMIN_ROUTES if isinstance(context, LentContext) else ()
    most = connections_limit(settings.max_connections, say)
    server = HttpServer(application(context, in_flight, routes), settings, "rose.device.http", most)
    try:
        await server.listen(listener)
        on_open()
        ends: list[asyncio.Future[Any]] = [signals.first, engine.gave_up]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        server.stop_listening()
        if engine.gave_up.done():
            raise engine.gave_up.result()
        await drain(in_flight, settings.shutdown_s, signals, say)
    finally:
        in_flight.draining = True
        server.stop_listening()
        await engine.close()
        await server.close()
