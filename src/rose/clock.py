"""Real and virtual time behind one interface.

Code that waits gets a `Clock` and takes the time from nowhere else. `RealClock` is the machine's monotonic clock, which
all processes share on Linux, so two processes of a device can compare their times. `VirtualClock` moves only under
`run_virtual`: an asyncio loop that never waits, but jumps to the next timer when nothing is ready. A day of traffic
takes as long as its computation, and the same coroutine takes the same steps every time.

Real input and output do not work under virtual time: a socket or thread that would wake the loop is ignored. If
nothing is ready and no timer is set, `Deadlock` names the waiting tasks.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Clock(Protocol):
    """A source of time."""

    def now_s(self) -> float:
        """Return the seconds since a fixed moment; never goes back."""

    async def sleep_s(self, seconds: float) -> None:
        """Suspend the task for at least this long."""


class RealClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep_s(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class VirtualClock:
    """Time that only `run_virtual` and `advance_to` move."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, when_s: float) -> None:
        assert when_s >= self._now_s, f"time would go back from {self._now_s} s to {when_s} s"
        self._now_s = when_s

    async def sleep_s(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _VirtualLoop) and loop.clock is self, "a VirtualClock sleeps only under its run_virtual"
        await asyncio.sleep(seconds)


class Deadlock(RuntimeError):
    """A state of virtual time in which nothing is ready and no timer is set."""


def run_virtual(coroutine: Coroutine[Any, Any, Result], clock: VirtualClock) -> Result:
    """Run a coroutine to its end in virtual time, and cancel the tasks that it left, as `asyncio.run` does."""
    loop = _VirtualLoop(clock)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        try:
            tasks = _tasks_in_order(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with its own heap of timers, so that time jumps exactly to the next active one."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        now_s = self.clock.now_s()
        # asyncio runs timers that are due before time() plus this. One unit in the last place means "now or earlier":
        # asyncio's constant runs timers early near zero, and after some weeks it is too small to reach any.
        self._clock_resolution = math.ulp(now_s)
        return now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def jump(self) -> None:
        """Move the time to the next timer; called when nothing is ready."""
        while self._timers and (self._timers[0][2].cancelled() or self._timers[0][0] <= self.time()):
            heapq.heappop(self._timers)
        if self._timers:
            self.clock.advance_to(self._timers[0][0])

    def deadlock(self) -> Deadlock:
        lines = [f"virtual time stands still at {self.time()} s: nothing is ready and no timer is set; waiting:"]
        for task in _tasks_in_order(self):
            coroutine = task.get_coro()
            places = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in task.get_stack(limit=1)]
            name = getattr(coroutine, "__qualname__", coroutine)
            lines.append(f"  {task.get_name()}: {name} {' '.join(places)}")
        return Deadlock("\n".join(lines))


class _JumpingSelector(selectors.SelectSelector):
    """A selector that never waits. A positive timeout means that only timers are left, None that nothing is."""

    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise self._loop.deadlock()
        if timeout > 0:
            self._loop.jump()
        return []


def _tasks_in_order(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    # all_tasks is a set; default names end in a counter, so by length and text they are in order of creation.
    return sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name()))
