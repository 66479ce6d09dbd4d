"""How our schedulers reach the engine that runs them: vLLM gives a scheduler no reference to its engine.

The method in which an engine sleeps is wrapped, once per process: before every sleep a scheduler with an `attach`
method gets its engine. A thread can then wake the engine through its input queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc


def attach_schedulers() -> None:
    """Let every engine of this process attach its scheduler before it sleeps."""
    plain = EngineCoreProc._process_input_queue
    if getattr(plain, "is_roses", False):
        return

    def attached(core: Any) -> Any:
        attach = getattr(core.scheduler, "attach", None)
        if attach is not None:
            attach(core)
        return plain(core)

    attached.is_roses = True  # type: ignore[attr-defined]
    EngineCoreProc._process_input_queue = attached


class WakeUpThread(threading.Thread):
    """A thread that wakes one parked engine whenever `is_due`, which blocks, returns true."""

    def __init__(self, core: Any, is_parked: threading.Event, is_due: Callable[[], bool]) -> None:
        super().__init__(name="rose-wake-up", daemon=True)
        self._queue, self._is_parked, self._is_due = core.input_queue, is_parked, is_due

    def run(self) -> None:
        while True:
            self._is_parked.wait()
            if self._is_due() and self._is_parked.is_set():
                self._is_parked.clear()
                self._queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
