"""The event loop of a front, uvloop's if it is installed, else asyncio's; and a process that rarely stops it."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable

GARBAGE_AFTER = 20_000  # allocations; a request makes hundreds, and nearly all of them go without the collector

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
    as long as it looks at every object. Threads give Python's lock back to the loop sooner.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER, 20, 20)
