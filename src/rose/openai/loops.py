"""The event loop of a server, and the rules that keep it free.

Work that takes longer than the loop may wait goes through `offload` into one of a few threads, a bounded number at a
time. A thread keeps the loop free only if the work releases Python's lock (tokenising a batch, decompressing) or is
Python code, which gives the lock up regularly. A long call into C code that holds the lock blocks the loop from any
thread: such work must be bounded instead (request_parsing.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from rose.errors import QueueFull

GARBAGE_AFTER = 5000  # allocations that were not freed; some requests that are cut off wait for it, body and all

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of <malloc.h>
MAPPED_BYTES = 256 << 10  # a page fault per 4 KB is cheap beside the work on a buffer of this size
HEAPS = 2  # one per thread by default, each with its own waste
SWITCH_S = 0.001  # a fifth of the usual; threads here are few, and rarely run Python code

THREADS = 2  # large requests must not take the cores of small ones
THREAD_NICENESS = 10  # as trainers; more, and others on the core could keep it from giving Python's lock back
RELEASE_S = 1.0  # after a large request, for the others that came with it
WAITING_MAX = 256  # a large request takes a tenth of a second or so: a client that would wait longer retries later

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_under_way = 0
_release_due_s = 0.0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def settle_process() -> None:
    """Set the process up for its event loop, once everything is loaded.

    Objects loaded so far live as long as the process, so the collector skips them: a full collection stops the loop for
    as long as it looks at every object. Threads give Python's lock back to the loop sooner. glibc maps buffers over a
    fixed size by themselves and returns them when they are freed. By default that size grows with the largest buffer
    that was freed, up to 32 MB: then the bodies of large requests share the heap with small objects, and a burst of
    them is kept for as long as the process lives.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, 4 * MAPPED_BYTES)
        mallopt(M_ARENA_MAX, HEAPS)
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER, 20, 20)


def trim_heap() -> None:
    """Return free pages inside the heap to the system: about 8 ms for 100 MB, from any thread.

    A large request allocates many small buffers. One of them that lives on, in a cache, say, keeps glibc from returning
    all that were freed below it.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _lower_priority() -> None:
    """Lower the priority of this thread, and of threads that libraries start from here."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(THREAD_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="rose-offload", initializer=_lower_priority)


async def offload(work: Callable[Parameters, Result], *arguments: Parameters.args, **more: Parameters.kwargs) -> Result:
    """Do the work in a thread and return its result. Raise what it raises, and QueueFull if too much waits."""
    if _under_way >= WAITING_MAX:
        raise QueueFull(f"{_under_way} large requests are being prepared", hint="retry a little later")
    return await offload_surely(work, *arguments, **more)


async def offload_surely(
    work: Callable[Parameters, Result], *arguments: Parameters.args, **more: Parameters.kwargs
) -> Result:
    """Do the work in a thread however much waits: for a response, which has cost more than its rendering will."""
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
    now_s, loop = time.monotonic(), asyncio.get_running_loop()
    if now_s >= _release_due_s:
        _release_due_s = now_s + RELEASE_S
        # Not in a thread of low priority: while the heap is trimmed, the event loop may wait for it.
        loop.call_later(RELEASE_S, lambda: loop.run_in_executor(None, trim_heap))
