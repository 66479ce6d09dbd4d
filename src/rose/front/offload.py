"""Work that takes longer than the event loop may wait: done in one of a few threads, a bounded number at a time.

A thread keeps the loop free only if the work releases Python's lock (tokenising a batch, decompressing) or is Python
code, which gives the lock up every 5 ms. A long call into C code that holds the lock blocks the loop from any thread:
such work must be bounded instead (structure.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from rose.coserve.device import stand_back
from rose.errors import QueueFull
from rose.front.loops import trim_heap

THREADS = 2  # large requests must not take the cores of small ones
RELEASE_S = 1.0  # after a large request, for the others that came with it
WAITING_MAX = 256  # a large request takes a tenth of a second or so: who would wait longer comes back later

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# At a lower priority, which threads that the libraries start from here inherit: the event loop goes first.
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="rose-offload", initializer=stand_back)
_under_way = 0
_release_due_s = 0.0


async def offload(work: Callable[Parameters, Result], *arguments: Parameters.args, **more: Parameters.kwargs) -> Result:
    """Do the work in a thread and return its result. Raises what it raises, and QueueFull if too much waits."""
    if _under_way >= WAITING_MAX:
        raise QueueFull(f"{_under_way} large requests are being prepared", hint="retry a little later")
    return await offload_surely(work, *arguments, **more)


async def offload_surely(
    work: Callable[Parameters, Result], *arguments: Parameters.args, **more: Parameters.kwargs
) -> Result:
    """As `offload`, however much waits: for an answer, which has cost more than its rendering will."""
    global _under_way
    _under_way += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, lambda: work(*arguments, **more))
    finally:
        _under_way -= 1
        release_memory_soon()


def release_memory_soon() -> None:
    """Return the memory of large requests to the system in a while, once for all that come until then."""
    global _release_due_s
    now_s = time.monotonic()
    if now_s >= _release_due_s:
        _release_due_s = now_s + RELEASE_S
        asyncio.get_running_loop().call_later(RELEASE_S, _release)


def _release() -> None:
    # Not in a thread of low priority: while the heap is trimmed, the event loop may wait for it.
    asyncio.get_running_loop().run_in_executor(None, trim_heap)
