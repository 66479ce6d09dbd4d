"""A thread beside the event loop, for work that computes: the trainer's.

It has its own priority and cores, as Linux gives them to single threads. Arithmetic under way cannot be interrupted,
and a process that ends in the middle of it ends badly; so whoever stops a run waits a little for the update to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class Aside:
    """Runs one function after the other."""

    def __init__(self, name: str, niceness: int, cores: tuple[int, ...]) -> None:
        self.cpu_s = 0.0
        self._waiting = 0  # functions that were given and have not ended
        self._niceness, self._cores = niceness, cores
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def do(self, function: Callable[[], Result]) -> Result:
        answer: asyncio.Future[Result] = self._loop.create_future()
        self._waiting += 1
        self._work.put((function, answer))
        return await answer

    async def idle(self, patience_s: float) -> None:
        """Until nothing is under way, or this long."""
        deadline_s = time.monotonic() + patience_s
        while self._waiting and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)

    def _run(self) -> None:
        thread = threading.get_native_id()
        niceness = max(self._niceness, os.getpriority(os.PRIO_PROCESS, thread))  # only root may go up
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
        os.sched_setaffinity(thread, self._cores)
        while True:
            function, answer = self._work.get()
            result: Any = None
            error: BaseException | None = None
            try:
                result = function()
            except Exception as raised:
                error = raised
            self.cpu_s = time.thread_time()
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for this any more
                self._loop.call_soon_threadsafe(self._settle, answer, result, error)

    def _settle(self, answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._waiting -= 1
        if answer.done():  # nobody waits for it any more
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)
