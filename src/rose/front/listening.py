"""One door of a device, from opening to leaving.

A first signal stops listening and gives running requests `shutdown_s` to end; then, or at a second signal, they are
ended with an error. An engine that cannot be kept running ends the door too, with that error.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from rose.front.application import InFlight, application
from rose.front.connections import Doorkeeper
from rose.front.context import Front
from rose.front.ports import cannot_listen

BACKLOG = 1024
KEEP_ALIVE_S = 75.0
FAREWELL_S = 1.0  # for handlers to say that the device is going
Say = Callable[[str], None]


async def answer_until(
    front: Front, listener: socket.socket, signals: Signals, say: Say, *, on_open: Callable[[], None]
) -> None:
    """Answer at this door until a signal comes; `on_open` is called when it is open."""
    in_flight = InFlight()
    runner = web.AppRunner(
        application(front, in_flight),
        handler_cancellation=True,  # a client that leaves is noticed, and its request cancelled
        access_log=None,
        logger=_quiet_logger(),
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=FAREWELL_S,
    )
    await runner.setup()
    http = runner.server
    assert http is not None
    try:
        server = await asyncio.get_running_loop().create_server(
            lambda: Doorkeeper(http, front.settings.max_connections, front.settings.read_timeout_s),
            sock=listener,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise cannot_listen(front.settings, error) from error
    try:
        on_open()
        ends: list[asyncio.Future[Any]] = [signals.first, front.engine.gave_up]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        server.close()
        if front.engine.gave_up.done():
            raise front.engine.gave_up.result()
        await _drain(front, in_flight, signals, say)
    finally:
        in_flight.draining = True
        server.close()
        await front.engine.close()
        await runner.cleanup()


def _quiet_logger() -> logging.Logger:
    """aiohttp reports what clients do wrong with a traceback; what we do wrong, the application reports itself."""
    found = logging.getLogger("rose.front.http")
    found.setLevel(logging.CRITICAL)
    return found


async def _drain(front: Front, in_flight: InFlight, signals: Signals, say: Say) -> None:
    """Nothing new; what runs has a bounded time to end."""
    in_flight.draining = True
    if in_flight.count:
        limit_s = front.settings.shutdown_s
        say(f"stopping: {in_flight.count} requests have {limit_s:g} s to end; stop again to end them now")
    deadline_s = asyncio.get_running_loop().time() + front.settings.shutdown_s
    while in_flight.count and not signals.second.done() and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.wait([signals.second], timeout=0.05)


class Signals:
    """SIGINT and SIGTERM of this process, the first and the second."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._arrived)

    async def interrupts(self, work: Coroutine[None, None, None]) -> None:
        """Do this work, unless a signal comes first; then leave as if by Ctrl-C."""
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, self.first], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise KeyboardInterrupt
        await task

    def _arrived(self) -> None:
        for waiting in (self.first, self.second):
            if not waiting.done():
                waiting.set_result(None)
                return
