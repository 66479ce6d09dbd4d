"""Memory before it is written: a page is given when it is first touched, which can take longer than decoding into it.

The system fills a new page with zeros. In a virtual machine whose free memory went back to the host, it has to be
fetched from there as well: that takes seconds per GB, and decoding half a second. Who joins late writes all its weights
for the first time. So a thread touches what will be written last, beginning while the first bytes are on their way, and
comes towards the writer; where the two meet depends on how fast each is, and neither waits for the other.

Touching changes nothing, whatever is written at the same time. Where the system does not know how (before Linux 5.14),
pages come one by one as they are written.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

from rose.weights.shards import Array

POPULATE_WRITE = 23  # of madvise: as if every page were written, without changing any
STEP_BYTES = 2 << 20  # who maps or unmaps memory meanwhile waits for one step at most
BYTES_MIN = 64 << 20  # less is there before a thread is


class Touching:
    """While entered, a thread takes the pages of these arrays, the last ones first."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        self._arrays = list(arrays)
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Touching:
        if sum(array.nbytes for array in self._arrays) >= BYTES_MIN:
            self._thread = threading.Thread(target=self._touch_all, name="weights-touch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _touch_all(self) -> None:
        for address, size_bytes in steps(self._arrays):
            if self._is_stopping.is_set() or not touch(address, size_bytes):
                return


def steps(arrays: Iterable[Array]) -> Iterator[tuple[int, int]]:
    """Address and size of what is touched at a time: whole pages within an array, from the last to the first."""
    for array in reversed(list(arrays)):
        begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        for stop in range(end, begin, -STEP_BYTES):
            start = max(begin, stop - STEP_BYTES)
            yield start, stop - start


def touch(address: int, size_bytes: int) -> bool:
    """Take these pages, without Python's lock. False if the system does not, for whatever reason: no harm is done."""
    return _madvise is not None and _madvise(address, size_bytes, POPULATE_WRITE) == 0


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found


_madvise = _find_madvise()
