"""The event loop of a front, uvloop's if it is installed, else asyncio's; and its garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

GARBAGE_AFTER = 20_000  # allocations; a request makes hundreds, and nearly all of them go without the collector


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def settle_memory() -> None:
    """Spare the collector what was loaded so far, since it lives as long as the process.

    A full collection stops the event loop for as long as it looks at every object.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER, 20, 20)
