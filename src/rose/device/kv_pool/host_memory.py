"""The system calls for pages of host memory: addresses without memory, sealed memory files, mapping and unmapping.

Every other module that places KV pages in host memory uses these functions, so this is the one place that calls mmap
and fallocate. Addresses are plain integers: Python's `mmap` objects can neither map at a fixed address nor leave one
without access. A mapping that is made here is not inherited by a forked child.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from rose.errors import ConfigError, Unavailable

PAGE_BYTES = 2 << 20  # a GPU's page, and a huge page of this machine's memory

# From linux/mman.h and linux/falloc.h; Python's modules do not name them.
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
NO_MEMORY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE  # addresses with nothing behind them
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
MADV_COLLAPSE = 25
MAP_FAILED = ctypes.c_void_p(-1).value

CONTROL_GROUP = Path("/sys/fs/cgroup")  # a container's own
HUGE_PAGE_BYTES = 2 << 20
HUGE_FILL_S_MAX = 3.0  # some 15 GiB on an idle machine; a busy one takes thirty times as long

NO_ACCESS, READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # cutting the file short would pull pages away


def sealed_file(size_bytes: int) -> int:
    """Return the descriptor of a new memory file of this size, with no memory in it yet. Raises Unavailable."""
    try:
        descriptor = os.memfd_create("rose-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise Unavailable(
            f"no memory file for KV pages: {error.strerror}", hint="see the limits of this user"
        ) from error
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Return whether this is a memory file whose size can no longer change."""
    with suppress(OSError):
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    return False


def fill_file(descriptor: int, offset: int, size_bytes: int) -> None:
    """Put memory behind a part of the file, zeroed; what has memory keeps it. Raises Unavailable."""
    try:
        os.posix_fallocate(descriptor, offset, size_bytes)
    except OSError as error:
        raise Unavailable(
            f"no memory for {size_bytes >> 20} MiB more of KV pages: {error.strerror}",
            hint="lower the KV memory or stop something else on this machine",
        ) from error


def fill_file_huge(descriptor: int, size_bytes: int) -> int:
    """Put huge pages behind an empty file of whole ones, as far as the system has any. Return how many bytes have one.

    A huge page is mapped and unmapped in 8 and 5 us, one of 512 small pages in 180 and 100.
    """
    address, huge = reserve_addresses(size_bytes // HUGE_PAGE_BYTES, HUGE_PAGE_BYTES), 0
    try:
        _map(address, size_bytes, READ_WRITE, mmap.MAP_SHARED | MAP_FIXED, descriptor)
        end_s = time.monotonic() + HUGE_FILL_S_MAX
        while huge + HUGE_PAGE_BYTES <= size_bytes and time.monotonic() < end_s:
            fill_file(descriptor, huge, mmap.PAGESIZE)  # the call below joins the pages that are there
            if _libc().madvise(address + huge, HUGE_PAGE_BYTES, MADV_COLLAPSE):
                break  # an older system, or one with its memory in pieces
            huge += HUGE_PAGE_BYTES
    finally:
        release_addresses(address, size_bytes)
    return huge


def empty_file(descriptor: int, offset: int, size_bytes: int) -> None:
    """Give the memory behind a part of the file back to the system. Raises OSError."""
    mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    _check_status(_libc().fallocate(descriptor, mode, offset, size_bytes), "fallocate")


def reserve_addresses(pages: int, page_bytes: int) -> int:
    """Return the first of so many pages of addresses without memory, aligned to a page. Raises Unavailable."""
    size = pages * page_bytes
    base = _map(None, size + page_bytes, NO_ACCESS, NO_MEMORY)
    address = -(-base // page_bytes) * page_bytes
    if address > base:
        release_addresses(base, address - base)
    release_addresses(address + size, base + page_bytes - address)
    return address


def release_addresses(address: int, size_bytes: int) -> None:
    """Give addresses back to the system, and take them from the file that is mapped there. Raises OSError."""
    _check_status(_libc().munmap(address, size_bytes), "munmap")


def map_file(address: int, size_bytes: int, descriptor: int, offset: int) -> None:
    """Map a part of a file at reserved addresses, ready to be touched without a fault. Raises Unavailable."""
    flags = mmap.MAP_SHARED | MAP_FIXED | mmap.MAP_POPULATE
    _map(address, size_bytes, READ_WRITE, flags, descriptor, offset)
    _libc().madvise(address, size_bytes, mmap.MADV_DONTFORK)


def unmap_file(address: int, size_bytes: int) -> None:
    """Take the memory away from these addresses, which stay reserved. Raises Unavailable."""
    _map(address, size_bytes, NO_ACCESS, NO_MEMORY | MAP_FIXED)


def check_sizes(pages: int, page_bytes: int) -> None:
    """Raise ConfigError unless this machine can hold so many pages of host memory."""
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"sharing KV memory between two models needs Linux, and this is {sys.platform}",
            hint="run `rose doctor` to see what works on this machine",
        )
    if page_bytes <= 0 or page_bytes % mmap.PAGESIZE:
        raise ConfigError(
            f"KV pages of {page_bytes} bytes are not possible: this machine's memory comes in {mmap.PAGESIZE} bytes",
            hint=f"take a multiple of it, for example {PAGE_BYTES}",
        )
    if pages <= 0:
        raise ConfigError("a KV pool needs at least one page", hint="raise the KV memory or take smaller pages")
    free_bytes = available_bytes()
    if pages * page_bytes > free_bytes:
        raise ConfigError(
            f"a KV pool of {pages * page_bytes >> 20} MiB does not fit: this machine has {free_bytes >> 20} MiB free",
            hint="lower the KV memory",
        )


def available_bytes() -> int:
    """Return the memory that this process could still get, within the limit of its control group."""
    free = sys.maxsize
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines():
            if line.startswith(("active_file ", "inactive_file ")):  # cached files, which make room
                used -= int(line.split()[1])
        free = min(free, limit - used)
    return free


def runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, second, length) of the stretches over which both sequences rise by one each step."""
    start = 0
    for end in range(1, len(first) + 1):
        if end == len(first) or first[end] != first[end - 1] + 1 or second[end] != second[end - 1] + 1:
            yield first[start], second[start], end - start
            start = end


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, number, number, number, offset]
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    libc.fallocate.argtypes = [number, number, offset, offset]
    return libc


def _map(address: int | None, size: int, access: int, flags: int, descriptor: int = -1, offset: int = 0) -> int:
    mapped = _libc().mmap(address, size, access, flags, descriptor, offset)
    if mapped == MAP_FAILED:
        error = ctypes.get_errno()
        raise Unavailable(
            f"mmap of {size >> 10} KiB failed: {os.strerror(error)}",
            hint="see vm.max_map_count and vm.overcommit_memory, or take larger KV pages",
        ) from OSError(error, os.strerror(error))
    return int(mapped)


def _check_status(status: int, call: str) -> None:
    if status != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
