"""KV blocks: who holds which, and which of them may be found again by their content.

A block is in exactly one of four places: *referenced* by one or more requests, *cached* (nobody references
it, but its content has a digest under which a later request may find it), *free*, or *away* with its page.
Referenced and cached blocks together never exceed `limit`, which may be lowered and raised at run time.

The digest of a block covers everything in front of it: it is chained from a root that is salted with the
tenant and the weight version, so one tenant never finds another's blocks and no block survives its weights.

Blocks lie in pages, which a `PageSource` lends and takes back whole while requests run; only blocks of pages
held here are ever handed out. A fresh block comes from the fullest page (most referenced blocks, then lowest
number), so that the emptier ones run dry and can go. When the pool lacks a block it uses free ones, then asks
for a page, then drops the cached block used longest ago, then insists on a page. When a page is wanted back
(`shrink`) the cache is dropped page by page instead: first the pages in which no request holds a block, used
longest ago first. In-place reuse goes block by block because dropping whole pages there costs prefix hits
and saves no page. Where requests come and go among cached blocks they end up in nearly every page, so that
hardly one can go; `gather` then moves their blocks together (benchmarks/pages.py shows how much it matters).
A move is a copy of keys and values, and a block that moved is still found under its digest.

Without a source every page is here from the start, and by default there is one page of all blocks.

A page that comes back may hold another model's keys and values. The pool hands out numbers, not memory:
whoever computes must make a block ready when a request takes it (see `prepared_blocks` in the scheduler).
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Protocol

from rose.engines.shelf import NOT_ON_SHELF, PageShelf

DIGEST_BYTES = 16


def root_digest(tenant: str, version: str) -> bytes:
    return blake2b(f"{len(tenant)}:{tenant}:{version}".encode(), digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class PageSource(Protocol):
    """Where a pool's pages come from and go to. Pages are named by their number in the pool's own order."""

    def room(self) -> int:
        """How many more pages an urgent `acquire` would give now. Cheap."""

    def acquire(self, count: int, *, urgent: bool) -> list[int]:
        """At most `count` pages, usable at once. Urgent: a request waits, and nothing is left to drop here."""

    def give_back(self, pages: Sequence[int]) -> None:
        """These pages hold nothing any more, and the pool will not touch them again."""


class BlockPool:
    """Hands out block numbers. `references[block]` counts the requests that hold it."""

    def __init__(self, capacity: int, *, blocks_per_page: int | None = None, source: PageSource | None = None) -> None:
        self.blocks_per_page = blocks_per_page or capacity
        assert capacity > 0 and capacity % self.blocks_per_page == 0
        self.capacity = capacity
        self.limit = capacity
        self.source = source
        self.references = [0] * capacity
        self.used = 0
        self.pages_held = 0
        self.pages_pinned = 0  # pages in which a request holds a block
        pages = capacity // self.blocks_per_page
        self._held = [False] * pages
        self._free: list[list[int]] = [[] for _ in range(pages)]  # a heap for each page
        self._free_count = 0
        self._referenced = [0] * pages
        self._shelf = PageShelf(pages)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()  # pages with cached blocks and no referenced one
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        if source is None:
            self._take_in(range(pages))

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now; negative after the limit was lowered below use."""
        if self.source is None:
            return self.limit - self.used
        return min(self.limit, (self.pages_held + self.source.room()) * self.blocks_per_page) - self.used

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks for one owner, or None if that many are not to be had."""
        at_hand = count <= self._free_count and self.used + len(self._cached) + count <= self.limit
        if not at_hand and (count > self.available or not self._make_room(count)):
            return None
        taken: list[int] = []
        while len(taken) < count:
            page = self._shelf.fullest()
            free = self._free[page]
            fresh = min(count - len(taken), len(free))
            taken += [heapq.heappop(free) for _ in range(fresh)]
            self._free_count -= fresh
            self._refer(page, fresh)
        for block in taken:
            self.references[block] = 1
        self.used += count
        return taken

    def find(self, digest: bytes) -> int | None:
        """The block with this content, without taking it."""
        return self._block_of.get(digest)

    def take(self, block: int) -> None:
        """One more owner for a block that `find` named."""
        if self.references[block] == 0:
            del self._cached[block]
            self.used += 1
            self._refer(block // self.blocks_per_page, 1)
        self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each. Tails go first, so that of a chain the tail is forgotten first."""
        left: dict[int, int] = {}
        for block in reversed(list(blocks)):
            assert self.references[block] > 0, f"block {block} released twice"
            self.references[block] -= 1
            if self.references[block]:
                continue
            page = block // self.blocks_per_page
            left[page] = left.get(page, 0) + 1
            if block in self._digest_of:
                self._cached[block] = None
            else:
                heapq.heappush(self._free[page], block)
                self._free_count += 1
        for page, count in left.items():
            self.used -= count
            self._refer(page, -count)
        self._trim()

    def publish(self, block: int, digest: bytes) -> None:
        """Let later requests find this block. The first block with a digest keeps it."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def forget_digests(self) -> None:
        """Nothing that is here now will ever be found again (the weights changed)."""
        by_page: dict[int, list[int]] = {}
        for block in self._cached:
            by_page.setdefault(block // self.blocks_per_page, []).append(block)
        self._cached.clear()
        self._digest_of.clear()
        self._block_of.clear()
        for page, blocks in by_page.items():
            self._free_all(page, blocks)

    def set_limit(self, limit: int) -> None:
        """Cached blocks go at once; if requests hold more than `limit`, the caller must release some."""
        self.limit = max(0, min(limit, self.capacity))
        self._trim()

    # Pages

    def pages_of(self, blocks: Iterable[int]) -> frozenset[int]:
        return frozenset(block // self.blocks_per_page for block in blocks)

    def grow(self, pages: int) -> int:
        """Take pages in before they are needed; how many came."""
        assert self.source is not None, "all pages are here already"
        fresh = self.source.acquire(pages, urgent=False)
        self._take_in(fresh)
        return len(fresh)

    def shrink(self, pages: int) -> int:
        """Give back up to this many pages that no request stands in, with what they cache; how many went."""
        assert self.source is not None, "there is nobody to give pages back to"
        going = self._unpinned(pages)
        for page in going:
            self._drop_cached_of(page)
            self._held[page] = False
            self._free[page].clear()
            self._shelf.put(page, NOT_ON_SHELF)
        self.pages_held -= len(going)
        self._free_count -= len(going) * self.blocks_per_page
        if going:
            self.source.give_back(going)
        return len(going)

    def gather(self, pages: int, blocks_max: int | None = None) -> dict[int, int]:
        """Move requests' blocks together until this many pages hold none of them, as far as others have places.

        {from: to}, at most `blocks_max` of them. No place is also a source, so they may be copied in any order. Before
        anything else whoever computes must copy these blocks and whoever lists blocks rename them.
        """
        going = self._pages_to_vacate(pages, self.used if blocks_max is None else blocks_max)
        staying = [p for p, referenced in enumerate(self._referenced) if referenced and p not in going]
        leaving = {page: [block for block in self._blocks_of(page) if self.references[block]] for page in going}
        blocks = [block for inside in leaving.values() for block in inside]
        moves = dict(zip(blocks, self._take_places(staying, len(blocks)), strict=True))
        for block, place in moves.items():
            self._rename(block, place)
        for page, inside in leaving.items():
            self._free[page] = sorted(self._free[page] + inside)  # which is a heap
            self._refer(page, -len(inside))
        return moves

    def pages_to_free(self, count: int) -> dict[int, list[int]]:
        """Which pages could go most easily, and the blocks in them that requests hold; none: the page can go now."""
        found: dict[int, list[int]] = {page: [] for page in self._unpinned(count)}
        if len(found) < count:
            for page in self._pinned_pages()[: count - len(found)]:
                found[page] = [block for block in self._blocks_of(page) if self.references[block]]
        return found

    def check(self) -> None:
        """Every block is in exactly one place, the counts agree, and nothing lies in a page that is away."""
        free, cached = {block for page in self._free for block in page}, set(self._cached)
        referenced = {block for block, count in enumerate(self.references) if count}
        held = {page for page, here in enumerate(self._held) if here}
        assert len(free) == self._free_count == sum(map(len, self._free)), "a block is free twice"
        assert not (free & cached or free & referenced or cached & referenced), "a block is in two places"
        here = self.pages_held * self.blocks_per_page
        assert len(free) + len(cached) + len(referenced) == here, "a block is lost"
        assert self.pages_of(free | cached | referenced) == held and len(held) == self.pages_held
        assert self.used == len(referenced)
        assert self.used + len(cached) <= max(self.limit, self.used), "more cached than the limit allows"
        assert cached <= self._digest_of.keys() and not free & self._digest_of.keys()
        assert {digest: block for block, digest in self._digest_of.items()} == self._block_of
        self._check_pages(cached, referenced)

    def _check_pages(self, cached: set[int], referenced: set[int]) -> None:
        pinned = self.pages_of(referenced)
        assert self.pages_pinned == len(pinned)
        assert self._idle.keys() == self.pages_of(cached) - pinned
        for page, free in enumerate(self._free):
            inside = set(free)
            assert inside <= set(self._blocks_of(page)), "a free block lies in another page"
            assert self._referenced[page] == len(referenced & set(self._blocks_of(page)))
            assert self._shelf.level_of(page) == self._level(page), "a page is filed under another level"
        self._shelf.check()

    # Room

    def _make_room(self, count: int) -> bool:
        """Free blocks for `count` within the limit, the cheapest way first."""
        excess = self.used + len(self._cached) + count - self.limit
        self._drop_oldest(excess)
        self._ask(count, urgent=False)
        self._drop_oldest(count - self._free_count)
        self._ask(count, urgent=True)
        return self._free_count >= count

    def _ask(self, count: int, *, urgent: bool) -> None:
        missing = count - self._free_count
        if missing > 0 and self.source is not None:
            self._take_in(self.source.acquire(-(-missing // self.blocks_per_page), urgent=urgent))

    def _take_in(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert not self._held[page], f"page {page} is here already"
            self._held[page] = True
            self.pages_held += 1
            self._free[page] = list(self._blocks_of(page))
            self._free_count += self.blocks_per_page
            self._shelf.put(page, self._level(page))

    def _unpinned(self, count: int) -> list[int]:
        """Pages that no request stands in: empty ones from the highest down, then the least recently used."""
        found = self._shelf.highest_at(0, count)
        for page in self._idle:
            if len(found) >= count:
                break
            found.append(page)
        return found

    def _pinned_pages(self) -> list[int]:
        """Least full first."""
        pinned = [page for page, referenced in enumerate(self._referenced) if referenced]
        return sorted(pinned, key=lambda page: (self._referenced[page], -page))

    def _pages_to_vacate(self, pages: int, blocks_max: int) -> list[int]:
        """Enough of the least full pages to have `pages` without a request, if the rest can take their blocks."""
        pinned = self._pinned_pages()
        missing = pages - (self.pages_held - len(pinned))
        places = len(pinned) * self.blocks_per_page - self.used
        going: list[int] = []
        for page in pinned[: max(0, missing)]:
            places -= self.blocks_per_page
            blocks_max -= self._referenced[page]
            if places < 0 or blocks_max < 0:
                break
            going.append(page)
        return going

    def _take_places(self, pages: Sequence[int], count: int) -> list[int]:
        """Free blocks of these pages, fullest page first; if they are too few, what was used longest ago is dropped."""
        missing = count - sum(len(self._free[page]) for page in pages)
        if missing > 0:
            inside = set(pages)
            cached = (block for block in self._cached if block // self.blocks_per_page in inside)
            for block in list(islice(cached, missing)):
                self._drop(block)
        found: list[int] = []
        for page in sorted(pages, key=lambda page: (-self._referenced[page], page)):
            free = sorted(self._free[page])
            taken = free[: count - len(found)]
            self._free[page] = free[len(taken) :]
            self._refer(page, len(taken))
            found += taken
        return found

    def _rename(self, block: int, place: int) -> None:
        self.references[place], self.references[block] = self.references[block], 0
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            self._digest_of[place], self._block_of[digest] = digest, place

    def _trim(self) -> None:
        if self.source is not None:  # a lower limit means that pages are wanted
            while self._idle and self.used + len(self._cached) > self.limit:
                self._drop_cached_of(next(iter(self._idle)))
        self._drop_oldest(self.used + len(self._cached) - self.limit)

    def _drop_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self._cached))):
            self._drop(next(iter(self._cached)))

    def _drop_cached_of(self, page: int) -> None:
        going = [block for block in self._blocks_of(page) if block in self._cached]
        for block in going:
            del self._cached[block]
            del self._block_of[self._digest_of.pop(block)]
        self._free_all(page, going)

    def _free_all(self, page: int, blocks: list[int]) -> None:
        """Of one page, at once: new weights free all that is cached, and somebody waits meanwhile."""
        self._free[page] = sorted(self._free[page] + blocks)  # which is a heap
        self._free_count += len(blocks)
        self._refer(page, 0)

    def _drop(self, block: int) -> None:
        page = block // self.blocks_per_page
        del self._cached[block]
        del self._block_of[self._digest_of.pop(block)]
        heapq.heappush(self._free[page], block)
        self._free_count += 1
        self._refer(page, 0)

    def _refer(self, page: int, change: int) -> None:
        """So many more blocks of this page are referenced; then it may be fuller, idle or empty."""
        before = self._referenced[page]
        after = self._referenced[page] = before + change
        self.pages_pinned += bool(after) - bool(before)
        self._shelf.put(page, self._level(page))
        if after == 0 and len(self._free[page]) < self.blocks_per_page:
            if before:
                self._idle[page] = None
        elif page in self._idle:
            del self._idle[page]

    def _level(self, page: int) -> int:
        free = len(self._free[page])
        if free == 0:
            return NOT_ON_SHELF
        return 0 if free == self.blocks_per_page else 1 + self._referenced[page]

    def _blocks_of(self, page: int) -> range:
        return range(page * self.blocks_per_page, (page + 1) * self.blocks_per_page)
