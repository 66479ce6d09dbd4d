"""The sleep of an SGLang scheduler that may not step: until a message arrives, or admission may have changed.

SGLang's event loop polls without a pause while its scheduler has nothing to run, and a polling engine starves a serving
engine on the same core. This scheduler sleeps in one `poll` on the sockets of its requests and on an eventfd. Threads
wait on the futexes of the agent and of the serving engine, and write to the eventfd while the scheduler sleeps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any


class ParkedSleep:
    """The sleep of one scheduler. `poller` has the interface of `zmq.Poller`."""

    def __init__(self, poller: Any, sockets: Iterable[Any]) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_parked = threading.Event()
        self._poller = poller
        for socket in [*sockets, self._event]:
            poller.register(socket, 1)  # POLLIN

    def watch(self, is_due: Callable[[], bool]) -> None:
        """Start a thread that ends the sleep whenever `is_due`, which blocks, returns true."""
        threading.Thread(target=self._watch, args=(is_due,), name="rose-wake-up", daemon=True).start()

    def _watch(self, is_due: Callable[[], bool]) -> None:
        while True:
            self._is_parked.wait()
            if is_due() and self._is_parked.is_set():
                self._is_parked.clear()
                os.eventfd_write(self._event, 1)

    def sleep(self, timeout_s: float) -> None:
        """Sleep until a message or an event, at most for so long."""
        self._is_parked.set()
        self._poller.poll(timeout_s * 1e3)
        self._is_parked.clear()
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
