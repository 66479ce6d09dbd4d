"""KV memory in two halves: addresses that never move, and physical pages that do.

Each model reserves one contiguous `VirtualRange` for its layout, large enough for the whole pool. Physical memory is
one `PagePool` of pages in a memfd; a page is mapped into a range and unmapped at run time, as by a GPU driver's calls
for virtual memory (docs/coserving.md has the table). A page is absent, spare (created, in no range) or mapped in
exactly one range, and keeps its content when it moves: its new owner makes each block ready when a request takes it.
Touching an address without a page kills the process, so only a block pool on top of a `PageShare` hands out places.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rose.device.kv_pool import host_memory
from rose.device.kv_pool.host_memory import PAGE_BYTES, runs
from rose.errors import Unavailable

ABSENT, SPARE = -2, -1  # states of a page that is in no range


@dataclass(frozen=True, slots=True)
class PageGroup:
    """The smallest run of pages that holds whole blocks: `pages` of them hold `blocks` without a gap."""

    pages: int
    blocks: int


def group_of(page_bytes: int, block_bytes: int) -> PageGroup:
    """Return the smallest run of such pages that holds whole blocks of this size."""
    together = math.lcm(page_bytes, block_bytes)
    return PageGroup(together // page_bytes, together // block_bytes)


class PagePool:
    """All physical pages. A page is named by its handle, a number in [0, pages)."""

    def __init__(self, pages: int, page_bytes: int = PAGE_BYTES) -> None:
        host_memory.check_sizes(pages, page_bytes)
        self.pages = pages
        self.page_bytes = page_bytes
        self.descriptor = host_memory.sealed_file(pages * page_bytes)
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
        """Return `count` new spare pages, zeroed. Raises Unavailable when the system has no memory left."""
        assert count <= len(self._absent), f"{count} pages of {len(self._absent)} left"
        handles = [heapq.heappop(self._absent) for _ in range(count)]
        try:
            for first, _, run in runs(handles, handles):
                host_memory.fill_file(self.descriptor, first * self.page_bytes, run * self.page_bytes)
        except Unavailable:
            self._give_to_system(handles)
            raise
        for handle in handles:
            self._state[handle] = SPARE
        self._spare.update(handles)
        return handles

    def take(self, count: int) -> list[int]:
        """Return `count` spare pages, with whatever they hold; create what is missing. Raises Unavailable."""
        if count > len(self._spare):
            self.create(count - len(self._spare))
        return heapq.nsmallest(count, self._spare)

    def release_spare(self) -> int:
        """Give all spare pages back to the system, and return how many there were; their content is gone."""
        handles = sorted(self._spare)
        self._spare.clear()
        self._give_to_system(handles)
        return len(handles)

    def owner_of(self, handle: int) -> VirtualRange | None:
        return self._ranges.get(self._state[handle])

    def resident_bytes(self) -> int:
        """Return what the system itself counts as this pool's memory."""
        return os.fstat(self.descriptor).st_blocks * 512

    def close(self) -> None:
        """Give everything back to the system. Ranges must have been freed."""
        assert not self._ranges, f"still in use by {[owner.name for owner in self._ranges.values()]}"
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def check(self) -> None:
        """Assert that every page is in one place, as the ranges see it too."""
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

    def enter(self, owner: VirtualRange) -> int:
        """Return the number of a new range."""
        number = max(self._ranges, default=-1) + 1
        self._ranges[number] = owner
        return number

    def leave(self, number: int) -> None:
        assert number not in self._state, "a range was freed with pages in it"
        del self._ranges[number]

    def move(self, handle: int, before: int, after: int) -> None:
        """Change the state of a page, which must be `before`."""
        if self._state[handle] != before:
            owner = self.owner_of(handle)
            state = f"mapped in {owner.name}" if owner else {ABSENT: "absent", SPARE: "spare"}[self._state[handle]]
            raise AssertionError(f"page {handle} is {state}")
        self._state[handle] = after
        if after == SPARE:
            self._spare.add(handle)
        else:
            self._spare.discard(handle)

    def _give_to_system(self, handles: Sequence[int]) -> None:
        for first, _, run in runs(handles, handles):
            host_memory.empty_file(self.descriptor, first * self.page_bytes, run * self.page_bytes)
        for handle in handles:
            self._state[handle] = ABSENT
            heapq.heappush(self._absent, handle)


class VirtualRange:
    """Addresses for `pages` pages of one pool, in one piece; `len()` says how many have memory behind them."""

    def __init__(self, pool: PagePool, pages: int, name: str) -> None:
        self.pool = pool
        self.pages = pages
        self.name = name
        self._handles: list[int | None] = [None] * pages
        self._mapped = 0
        self.address = host_memory.reserve_addresses(pages, pool.page_bytes)
        self._number = pool.enter(self)

    def __len__(self) -> int:
        return self._mapped

    def map(self, places: Sequence[int], handles: Sequence[int]) -> None:
        """Put spare pages at these places, ready to be touched without a fault. On Unavailable nothing changed."""
        assert len(set(places)) == len(places), "a place is named twice"
        for place, handle in zip(places, handles, strict=True):
            assert self._handles[place] is None, f"{self.name} has a page at {place} already"
            self.pool.move(handle, SPARE, self._number)
            self._handles[place] = handle
        self._mapped += len(places)
        size = self.pool.page_bytes
        try:
            for place, handle, run in runs(places, handles):
                host_memory.map_file(self._at(place), run * size, self.pool.descriptor, handle * size)
        except Unavailable:
            self.unmap(places)
            raise

    def unmap(self, places: Sequence[int]) -> list[int]:
        """Take pages out of the range, content untouched, and return them, now spare, in the order of `places`."""
        handles = []
        for place in places:
            handle = self._handles[place]
            assert handle is not None, f"{self.name} has no page at {place}"
            self.pool.move(handle, self._number, SPARE)
            self._handles[place] = None
            handles.append(handle)
        self._mapped -= len(handles)
        ordered = sorted(places)
        for place, _, run in runs(ordered, ordered):
            host_memory.unmap_file(self._at(place), run * self.pool.page_bytes)
        return handles

    def handle_at(self, place: int) -> int | None:
        return self._handles[place]

    def floats(self) -> NDArray[np.float32]:
        """Return the whole range as numbers. Only what is mapped may be touched, and nothing after `free`."""
        memory = (ctypes.c_float * (self.pages * self.pool.page_bytes // 4)).from_address(self.address)
        return np.ctypeslib.as_array(memory)

    def free(self) -> None:
        """Give the addresses back; pages must have been unmapped. Doing it twice is harmless."""
        if self.address:
            self.pool.leave(self._number)
            host_memory.release_addresses(self.address, self.pages * self.pool.page_bytes)
            self.address = 0

    def _at(self, place: int) -> int:
        assert self.address and 0 <= place < self.pages, f"{self.name} has no place {place}"
        return self.address + place * self.pool.page_bytes


class PageShare:
    """One model's range with a budget: a `PageSource` (see `rose.engines.blocks`) that takes spare pages first.

    What a block pool calls a page is here a group of `group_pages` pages; the budget counts single pages. The two
    callbacks are for the model that comes first. `on_short` gets how many pages the model asks for beyond those it
    holds, when a request waits and the budget or the pool has too few; it must make them spare and raise the budget
    (see `rose.core.memory`). `on_refused` gets how many pages were asked for, and for how many the system has no
    memory while the other model holds some; those it makes spare come instead.
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
        """The pages, not groups, that the model holds."""
        return len(self.memory)

    @property
    def groups_over(self) -> int:
        """The groups that must go before the model is within its budget."""
        return max(0, -(-(self.held - self.budget_pages) // self.group_pages))

    def room(self) -> int:
        """Return how many groups the model could get: with `on_short`, every page of the pool."""
        return self._groups_in(self.memory.pool.pages - self.held) if self.on_short else self._room_now()

    def acquire(self, count: int, *, urgent: bool = False) -> list[int]:
        """Return up to `count` groups that are mapped now; `urgent` if a request waits for them."""
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
        """Make the groups' pages spare, for either model."""
        self.memory.unmap(self._places(pages))
        for group in pages:
            heapq.heappush(self._away, group)

    def _take(self, pages: int, urgent: bool) -> list[int]:
        """Take pages from the pool; those that the system has no memory for, from the other model."""
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
