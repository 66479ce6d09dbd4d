"""How long the kernel has kept a thread from running though it was ready: others had its core.

On a shared core a step takes as long as it computes and as long as others compute in between, serving first of all.
Only the former says what the step costs, and what serving may find in its way: whoever is kept waiting holds nothing.

That is so on one core. On several, while this thread is kept from running, others of the same step may hold theirs; so
there nothing is excused, and all of the time counts.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Stalled:
    """Of the thread that asks first."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._is_alone = len(os.sched_getaffinity(0)) == 1  # on its core, but for other processes

    def seconds(self) -> float:
        """In all, so far; always 0 on several cores, and where the kernel does not tell."""
        if not self._is_alone:
            return 0.0
        with suppress(OSError, IndexError, ValueError):
            if self._file is None:
                self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
            return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        return 0.0
