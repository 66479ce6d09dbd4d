"""Parking: a gated engine sleeps until there is a reason to look again, instead of asking a thousand times a second.

vLLM's engine loop polls while its scheduler has requests that it does not run, and a polling engine on the core of a
serving one starves it. So a closed gate says that there are no requests, and the loop sleeps on its input queue; adds,
aborts and calls still get through. A thread puts a wake-up into that queue when the gate may have opened. vLLM gives a
scheduler no way to its engine, hence the wrapper around the method that sleeps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

GLANCE_S = 0.004  # with rollouts waiting: what an opening gate loses at most, at half a percent of a core
REST_S = 0.05  # without any: how late the agent's word is heard
ASK_S = 0.05  # however little changed: grants begin and end by time too


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
    """Wakes one engine while it is parked."""

    def __init__(self, core: Any, has_work: Callable[[], bool], is_worth_waking: Callable[[], bool]) -> None:
        super().__init__(name="rose-alarm", daemon=True)
        self.is_parked = False  # by the engine's thread: it is about to sleep
        self._queue = core.input_queue
        self._has_work, self._is_worth_waking = has_work, is_worth_waking

    def run(self) -> None:
        woken_s = 0.0
        while True:
            has_work = self._has_work()
            time.sleep(GLANCE_S if has_work else REST_S)
            if not self.is_parked:
                continue
            if time.monotonic() - woken_s > (ASK_S if has_work else 10 * ASK_S) or self._is_worth_waking():
                self.is_parked, woken_s = False, time.monotonic()
                self._queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
