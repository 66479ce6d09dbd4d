"""KV memory in two halves: addresses that never move, and physical pages that do.

Each model reserves one contiguous `VirtualRange` for its own layout, large enough for the whole pool, and computes in
it as in plain memory. Physical memory is one `PagePool` of fixed-size pages in a memfd. A page is mapped into a range
and unmapped at run time; the other model's addresses, contents and code see nothing of it. The calls are those of a
GPU driver's virtual-memory interface, so that another device needs another module and no other design:

    here                   CUDA driver            Linux
    VirtualRange(...)      cuMemAddressReserve    mmap(PROT_NONE)
    pool.create            cuMemCreate            fallocate: there is memory, or an error here
    range.map              cuMemMap               mmap(MAP_SHARED | MAP_FIXED | MAP_POPULATE)
    range.set_access       cuMemSetAccess         mprotect
    range.unmap            cuMemUnmap             mmap(PROT_NONE | MAP_FIXED)
    pool.release           cuMemRelease           fallocate(PUNCH_HOLE): the memory is the system's again
    range.free             cuMemAddressFree       munmap

A page is absent, spare (created, in no range) or mapped in exactly one range; every call asserts it. Neighbouring
pages go in one system call. Creating a page costs far more than moving one, since the kernel must find and zero its
memory: move pages between models with `hand_over`, and release them only when memory shall leave the pool.

**A page keeps its content when it moves.** A created page is zero; a handed-over page still holds the other model's
keys and values. The new owner makes each block ready when a request takes it (the embedded engine zeroes the value
half; keys are written before they are read), so nothing is wiped twice and nothing stale is ever read.

Touching an address that has no page kills the process (SIGSEGV). `floats()` spans the whole range: only a block pool
that knows which pages are mapped may hand out places in it. It gets them from a `PageShare`: one model's range with
a budget, which takes spare pages before it creates any and leaves spare what it gives back. So pages flow from a
model whose budget fell to one whose budget rose, and nobody waits for the system to find or zero memory.
"""

from __future__ import annotations

import ctypes
import enum
import fcntl
import heapq
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import ConfigError, Unavailable

PAGE_BYTES = 2 << 20  # a GPU's page, and a huge page of this machine's memory

# From linux/mman.h and linux/falloc.h; Python's modules do not name them.
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
NO_MEMORY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE  # addresses with nothing behind them
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
MAP_FAILED = ctypes.c_void_p(-1).value

ABSENT, SPARE = -2, -1  # states of a page that is in no range


class Access(enum.IntEnum):
    NONE = 0
    READ = mmap.PROT_READ
    READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


@dataclass(frozen=True, slots=True)
class Group:
    """The smallest run of pages that holds whole blocks: `pages` of them hold `blocks` without a gap."""

    pages: int
    blocks: int


def group_of(page_bytes: int, block_bytes: int) -> Group:
    together = math.lcm(page_bytes, block_bytes)
    return Group(together // page_bytes, together // block_bytes)


class PagePool:
    """All physical pages. A page is named by its handle, a number in [0, pages)."""

    def __init__(self, pages: int, page_bytes: int = PAGE_BYTES) -> None:
        _check_sizes(pages, page_bytes)
        self.pages = pages
        self.page_bytes = page_bytes
        self._descriptor = _sealed_memory(pages * page_bytes)
        self._state = [ABSENT] * pages  # or the number of the range that holds it
        self._absent = list(range(pages))  # a heap
        self._spare: set[int] = set()
        self._ranges: dict[int, VirtualRange] = {}

    @property
    def created(self) -> int:
        return self.pages - len(self._absent)

    @property
    def spare(self) -> int:
        return len(self._spare)

    @property
    def left(self) -> int:
        """Pages that `take` could hand out, if the system has the memory."""
        return len(self._spare) + len(self._absent)

    def create(self, count: int) -> list[int]:
        """Physical memory for `count` more pages, zeroed. Raises Unavailable when the system has none left."""
        assert count <= len(self._absent), f"{count} pages of {len(self._absent)} left"
        handles = [heapq.heappop(self._absent) for _ in range(count)]
        try:
            for first, _, run in _runs(handles, handles):
                self._allocate(first, run)
        except Unavailable:
            self._forget(handles)
            raise
        for handle in handles:
            self._state[handle] = SPARE
        self._spare.update(handles)
        return handles

    def take(self, count: int) -> list[int]:
        """`count` spare pages, with whatever they hold, created as far as there are none. Raises Unavailable."""
        if count > len(self._spare):
            self.create(count - len(self._spare))
        return heapq.nsmallest(count, self._spare)

    def release(self, handles: Sequence[int]) -> None:
        """The memory of these spare pages goes back to the system, and their content is gone."""
        handles = sorted(handles)
        for handle in handles:
            assert self._state[handle] == SPARE, f"page {handle} is {self._word(handle)}"
        self._spare.difference_update(handles)
        self._forget(handles)

    def release_spare(self) -> int:
        """All that no model uses goes back to the system; how many pages that were."""
        count = len(self._spare)
        self.release(list(self._spare))
        return count

    def owner_of(self, handle: int) -> VirtualRange | None:
        return self._ranges.get(self._state[handle])

    def resident_bytes(self) -> int:
        """What the system itself counts as this pool's memory."""
        return os.fstat(self._descriptor).st_blocks * 512

    def close(self) -> None:
        """Everything goes back to the system. Ranges must have been freed."""
        assert not self._ranges, f"still in use by {[owner.name for owner in self._ranges.values()]}"
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def check(self) -> None:
        """Every page is in one place, as the ranges see it too."""
        held = {
            handle: number
            for number, owner in self._ranges.items()
            for place in range(owner.pages)
            if (handle := owner.handle_at(place)) is not None
        }
        assert sum(len(owner) for owner in self._ranges.values()) == len(held), "a page is mapped twice"
        assert held == {handle: state for handle, state in enumerate(self._state) if state >= 0}
        assert sorted(self._absent) == [h for h, state in enumerate(self._state) if state == ABSENT]
        assert self._spare == {h for h, state in enumerate(self._state) if state == SPARE}
        assert self.resident_bytes() == self.created * self.page_bytes

    # For ranges

    def _enter(self, owner: VirtualRange) -> int:
        number = max(self._ranges, default=-1) + 1
        self._ranges[number] = owner
        return number

    def _leave(self, number: int) -> None:
        assert number not in self._state, "a range was freed with pages in it"
        del self._ranges[number]

    def _move(self, handle: int, before: int, after: int) -> None:
        assert self._state[handle] == before, f"page {handle} is {self._word(handle)}"
        self._state[handle] = after
        if after == SPARE:
            self._spare.add(handle)
        else:
            self._spare.discard(handle)

    def _word(self, handle: int) -> str:
        owner = self.owner_of(handle)
        return f"mapped in {owner.name}" if owner else {ABSENT: "absent", SPARE: "spare"}[self._state[handle]]

    def _allocate(self, first: int, run: int) -> None:
        start, length = first * self.page_bytes, run * self.page_bytes
        try:
            os.posix_fallocate(self._descriptor, start, length)
        except OSError as error:
            raise Unavailable(
                f"no memory for {length >> 20} MiB more of KV pages: {error.strerror}",
                hint="lower the KV memory or stop something else on this machine",
            ) from error

    def _forget(self, handles: Sequence[int]) -> None:
        for first, _, run in _runs(handles, handles):
            self._punch(first, run)
        for handle in handles:
            self._state[handle] = ABSENT
            heapq.heappush(self._absent, handle)

    def _punch(self, first: int, run: int) -> None:
        mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
        start, length = first * self.page_bytes, run * self.page_bytes
        _checked(_libc().fallocate(self._descriptor, mode, start, length), "fallocate")


class VirtualRange:
    """Addresses for `pages` pages of one pool, in one piece; `len()` says how many have memory behind them."""

    def __init__(self, pool: PagePool, pages: int, name: str) -> None:
        self.pool = pool
        self.pages = pages
        self.name = name
        self._handles: list[int | None] = [None] * pages
        self._mapped = 0
        # One page more than asked for, so that pages begin where a huge page could.
        self._reserved = (pages + 1) * pool.page_bytes
        self._base = _map(None, self._reserved, Access.NONE, NO_MEMORY)
        self.address = -(-self._base // pool.page_bytes) * pool.page_bytes
        self._number = pool._enter(self)

    def __len__(self) -> int:
        return self._mapped

    def map(self, places: Sequence[int], handles: Sequence[int], access: Access = Access.READ_WRITE) -> None:
        """Put spare pages at these places, ready to be touched without a fault. On Unavailable nothing changed."""
        assert len(set(places)) == len(places), "a place is named twice"
        for place, handle in zip(places, handles, strict=True):
            assert self._handles[place] is None, f"{self.name} has a page at {place} already"
            self.pool._move(handle, SPARE, self._number)
            self._handles[place] = handle
        self._mapped += len(places)
        size, flags = self.pool.page_bytes, mmap.MAP_SHARED | MAP_FIXED
        if access != Access.NONE:
            flags |= mmap.MAP_POPULATE
        try:
            for place, handle, run in _runs(places, handles):
                _map(self._at(place), run * size, access, flags, self.pool._descriptor, handle * size)
        except Unavailable:
            self.unmap(places)
            raise

    def set_access(self, places: Sequence[int], access: Access) -> None:
        for place in places:
            assert self._handles[place] is not None, f"{self.name} has no page at {place}"
        for place, _, run in _runs(places, places):
            _checked(_libc().mprotect(self._at(place), run * self.pool.page_bytes, int(access)), "mprotect")

    def unmap(self, places: Sequence[int]) -> list[int]:
        """Take the pages out of the range, content untouched: spare, in the order of `places`."""
        handles = []
        for place in places:
            handle = self._handles[place]
            assert handle is not None, f"{self.name} has no page at {place}"
            self.pool._move(handle, self._number, SPARE)
            self._handles[place] = None
            handles.append(handle)
        self._mapped -= len(handles)
        ordered = sorted(places)
        for place, _, run in _runs(ordered, ordered):
            _map(self._at(place), run * self.pool.page_bytes, Access.NONE, NO_MEMORY | MAP_FIXED)
        return handles

    def handle_at(self, place: int) -> int | None:
        return self._handles[place]

    def floats(self) -> NDArray[np.float32]:
        """The whole range as numbers. Only what is mapped may be touched, and nothing after `free`."""
        memory = (ctypes.c_float * (self.pages * self.pool.page_bytes // 4)).from_address(self.address)
        return np.ctypeslib.as_array(memory)

    def free(self) -> None:
        """Give the addresses back; pages must have been unmapped. Doing it twice is harmless."""
        if self._base:
            self.pool._leave(self._number)
            _checked(_libc().munmap(self._base, self._reserved), "munmap")
            self._base = 0

    def _at(self, place: int) -> int:
        assert self._base and 0 <= place < self.pages, f"{self.name} has no place {place}"
        return self.address + place * self.pool.page_bytes


def hand_over(source: VirtualRange, places: Sequence[int], target: VirtualRange, at: Sequence[int]) -> None:
    """Pages change their model, content and all; nobody else is touched and no memory is asked for."""
    target.map(at, source.unmap(places))


class PageShare:
    """One model's side of a pool: a `PageSource` (see `rose.engines.blocks`) over its range, within a budget.

    What a block pool calls a page is here `group_pages` neighbours (see `group_of`); the budget counts single pages.

    `on_short` is for the model that comes first. It is called when a request waits, nothing is left to drop and the
    budget or the pool has too few pages, with how many pages the model asks for beyond those it holds; it must make
    them spare and raise the budget before it returns (see `rose.core.memory`: ask the policy, evict, shrink). With it,
    `room` counts every page of the pool. Without it, a model gets what its budget and the pool have.

    `on_refused` is for the same model, when the pool has pages left that the system has no memory for and the other
    model holds some. It is called with how many pages are asked for and how many of them were refused; those it makes
    spare come instead.
    """

    def __init__(
        self,
        memory: VirtualRange,
        budget_pages: int,
        group_pages: int = 1,
        on_short: Callable[[int], None] | None = None,
        on_refused: Callable[[int, int], None] | None = None,
    ) -> None:
        assert memory.pages % group_pages == 0, "a range of broken groups"
        self.memory = memory
        self.budget_pages = budget_pages
        self.group_pages = group_pages
        self.on_short = on_short
        self.on_refused = on_refused
        self.refused = ""  # why the system last had no memory
        self._away = list(range(memory.pages // group_pages))  # a heap of groups that are not mapped

    @property
    def held(self) -> int:
        """Pages, not groups."""
        return len(self.memory)

    @property
    def groups_over(self) -> int:
        """How many groups must go before the model is within its budget."""
        return max(0, -(-(self.held - self.budget_pages) // self.group_pages))

    def room(self) -> int:
        return self._groups_in(self.memory.pool.pages - self.held) if self.on_short else self._room_now()

    def acquire(self, count: int, *, urgent: bool = False) -> list[int]:
        if urgent and self.on_short is not None and self._room_now() < min(count, self.room()):
            self.on_short(count * self.group_pages)
        groups = heapq.nsmallest(min(count, self._room_now()), self._away)
        if not groups:
            return []
        try:
            handles = self._take(len(groups) * self.group_pages, urgent)
            groups = groups[: len(handles) // self.group_pages]
            self.memory.map(self._places(groups), handles)
        except Unavailable as error:
            self.refused = str(error)
            return []
        for _ in groups:
            heapq.heappop(self._away)
        return groups

    def give_back(self, pages: Sequence[int]) -> None:
        """The groups' pages are spare now, for whoever has room in its budget."""
        self.memory.unmap(self._places(pages))
        for group in pages:
            heapq.heappush(self._away, group)

    def _take(self, pages: int, urgent: bool) -> list[int]:
        """From the pool; those that the system has no memory for, from the other model, as many as it holds."""
        pool = self.memory.pool
        try:
            return pool.take(pages)
        except Unavailable as error:
            others_hold = pool.created - pool.spare - self.held
            if not urgent or self.on_refused is None or not others_hold:
                raise
            self.refused = str(error)
            self.on_refused(pages, pages - pool.spare)
        return pool.take(min(pages, pool.spare // self.group_pages * self.group_pages))

    def _room_now(self) -> int:
        return self._groups_in(min(self.budget_pages - self.held, self.memory.pool.left))

    def _groups_in(self, pages: int) -> int:
        return max(0, min(pages // self.group_pages, len(self._away)))

    def _places(self, groups: Sequence[int]) -> list[int]:
        size = self.group_pages
        return [place for group in groups for place in range(group * size, (group + 1) * size)]


def _runs(places: Sequence[int], handles: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place, handle, count) for each stretch in which both go up by one: one system call each."""
    start = 0
    for index in range(1, len(places) + 1):
        whole = index < len(places) and places[index] == places[index - 1] + 1
        if whole and handles[index] == handles[index - 1] + 1:
            continue
        yield places[start], handles[start], index - start
        start = index


def _check_sizes(pages: int, page_bytes: int) -> None:
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
    free_bytes = _available_bytes()
    if pages * page_bytes > free_bytes:
        raise ConfigError(
            f"a KV pool of {pages * page_bytes >> 20} MiB does not fit: this machine has {free_bytes >> 20} MiB free",
            hint="lower the KV memory",
        )


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


def _sealed_memory(size: int) -> int:
    descriptor = os.memfd_create("rose-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    # Nobody can pull a mapped page away by cutting the file short.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, number, number, number, offset]
    libc.munmap.argtypes = [address, size]
    libc.mprotect.argtypes = libc.madvise.argtypes = [address, size, number]
    libc.fallocate.argtypes = [number, number, offset, offset]
    return libc


def _map(address: int | None, size: int, access: Access, flags: int, descriptor: int = -1, offset: int = 0) -> int:
    found = _libc().mmap(address, size, int(access), flags, descriptor, offset)
    if found == MAP_FAILED:
        error = ctypes.get_errno()
        raise Unavailable(
            f"mmap of {size >> 10} KiB failed: {os.strerror(error)}",
            hint="see vm.max_map_count and vm.overcommit_memory, or take larger KV pages",
        ) from OSError(error, os.strerror(error))
    return int(found)


def _checked(status: int, call: str) -> None:
    if status != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
