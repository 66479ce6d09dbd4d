"""One door of a device, from opening to leaving.

A first signal stops listening and gives running requests `shutdown_s` to end; then, or at a second signal, they are
ended with an error. An engine that cannot be kept running ends the door too, with that error.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from rose.front.application import InFlight, application
from rose.front.connections import HttpServer
from rose.front.context import Front
from rose.front.loops import settle_process
from rose.front.ports import connections_limit

Say = Callable[[str], None]


async def answer_until(
    front: Front, listener: socket.socket, signals: Signals, say: Say, *, on_open: Callable[[], None]
) -> None:
    """Answer at this door until a signal comes; `on_open` is called when it is open."""
    settle_process()
    in_flight = InFlight()
    most = connections_limit(front.settings.max_connections, say)
    server = HttpServer(application(front, in_flight), front.settings, "rose.front.http", most)
    try:
        await server.listen(listener)
        on_open()
        ends: list[asyncio.Future[Any]] = [signals.first, front.engine.gave_up]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        server.stop_listening()
        if front.engine.gave_up.done():
            raise front.engine.gave_up.result()
        await _drain(front, in_flight, signals, say)
    finally:
        in_flight.draining = True
        server.stop_listening()
        await front.engine.close()
        await server.close()


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
