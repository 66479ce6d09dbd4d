"""Parking: a gated engine sleeps until there is a reason to look again, instead of asking a thousand times a second.

vLLM's engine loop polls while its scheduler has requests that it does not run, and a polling engine on the core of a
serving one starves it. So a closed gate says that there are no requests, and the loop sleeps on its input queue; adds,
aborts and calls still get through. Threads that sleep themselves put a wake-up into that queue when the gate may have
opened. vLLM gives a scheduler no way to its engine, hence the wrapper around the method that sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc


def install() -> None:
    """Let every engine tell its scheduler who it is, before it first sleeps. Installed once per process."""
    plain = EngineCoreProc._process_input_queue
    if getattr(plain, "is_roses", False):
        return

    def told(core: Any) -> Any:
        attach = getattr(core.scheduler, "attach", None)
        if attach is not None:
            attach(core)
        return plain(core)

    told.is_roses = True  # type: ignore[attr-defined]
    EngineCoreProc._process_input_queue = told


class Alarm(threading.Thread):
    """Wakes one engine while it is parked, whenever `is_due` says so, which waits as long as it likes."""

    def __init__(self, core: Any, is_parked: threading.Event, is_due: Callable[[], bool]) -> None:
        super().__init__(name="rose-alarm", daemon=True)
        self._queue, self._is_parked, self._is_due = core.input_queue, is_parked, is_due

    def run(self) -> None:
        while True:
            self._is_parked.wait()
            if self._is_due() and self._is_parked.is_set():
                self._is_parked.clear()
                self._queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
