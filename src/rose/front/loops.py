"""The event loop of a front, uvloop's if it is installed, else asyncio's; and a process that rarely stops it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable

GARBAGE_AFTER = 5000  # allocations that were not freed; some requests that are cut off wait for it, body and all

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of <malloc.h>
MAPPED_BYTES = 256 << 10  # a page fault per 4 KB is cheap beside the work on a buffer of this size
HEAPS = 2  # one per thread by default, each with its own waste
SWITCH_S = 0.001  # a fifth of the usual; threads here are few, and rarely run Python code


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def settle_process() -> None:
    """Set the process up for its event loop, once everything is loaded.

    What was loaded lives as long as the process, and the collector is spared it: a full collection stops the loop for
    as long as it looks at every object. Threads give Python's lock back to the loop sooner. Buffers of large requests
    go back to the system when they are freed.
    """
    _return_large_buffers()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER, 20, 20)


def _return_large_buffers() -> None:
    """Have glibc map buffers over a fixed size by themselves; `trim_heap` returns what smaller ones leave behind.

    By default that size grows with the largest buffer that was freed, up to 32 MB. From then on the bodies of large
    requests share the heap with small objects, and a burst of them is kept for as long as the process lives.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, 4 * MAPPED_BYTES)
        mallopt(M_ARENA_MAX, HEAPS)


def trim_heap() -> None:
    """Return free pages inside the heap to the system: about 8 ms for 100 MB, from any thread.

    A large request allocates many small buffers. One of them that lives on, in a cache, say, keeps glibc from returning
    all that were freed below it.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
