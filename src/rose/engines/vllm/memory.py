"""Gives the memory of KV blocks back to the machine, in vLLM's worker; `--worker-extension-cls` mixes it in there.

On a CPU vLLM writes its whole KV cache at start-up, so it takes all its memory at once. The pages of blocks that
nobody can have (balloon.py) are dropped here; when the blocks are used again the kernel brings pages of zeros. On a
GPU memory inside an allocation cannot be returned, and nothing is done.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any

DONT_NEED = 4  # MADV_DONTNEED


class KvMemory:
    """Methods that the scheduler calls by name, between two steps."""

    def return_kv_blocks(self, runs: Iterable[tuple[int, int]]) -> int:
        """Runs of blocks [first, end) in every layer. Returns how many bytes went back."""
        caches: list[Any] = self.model_runner.kv_caches  # type: ignore[attr-defined]
        return sum([_drop(cache, first, end) for first, end in runs for cache in caches])


def _drop(cache: Any, first: int, end: int) -> int:
    if cache.device.type != "cpu":
        return 0
    stride = cache.stride(0) * cache.element_size()
    begin = -(-(cache.data_ptr() + first * stride) // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (cache.data_ptr() + end * stride) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if size <= 0:
        return 0
    failed = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), DONT_NEED)
    return 0 if failed else size
