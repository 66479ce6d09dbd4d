"""KV blocks: which requests hold them, and which can be found again by their content.

A block is *referenced* by requests, *cached* (found by its digest), *free*, or *away* with its page. Referenced and
cached blocks never exceed `limit`, which may change at any time. Blocks lie in pages, which a `PageSource` lends and
takes back whole; without a source every page is here from the start. docs/engine.md ("Blocks and pages") says how
blocks are placed, cached and moved, and why.

The pool hands out numbers, not memory, and a page that comes back may hold another model's keys and values: the engine
must make a block ready when a request takes it (`prepared_blocks` in the scheduler).
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Protocol

DIGEST_BYTES = 16
UNFILED = -1  # the level of a page without a free block, or one that is away


def root_digest(tenant: str, version: str) -> bytes:
    """Return where a chain of digests starts: no tenant finds another's blocks, and no block survives its weights."""
    return blake2b(f"{len(tenant)}:{tenant}:{version}".encode(), digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of a block and everything in front of it."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class PageSource(Protocol):
    """The lender of a pool's pages, which are named by their number in the pool's own order."""

    def room(self) -> int:
        """Return how many more pages an urgent `acquire` would give now. Cheap."""

    def acquire(self, count: int, *, urgent: bool) -> list[int]:
        """Return at most `count` pages, usable at once. Urgent: a request waits, and the pool has nothing to drop."""

    def give_back(self, pages: Sequence[int]) -> None:
        """Take back pages that hold nothing any more."""


class PagesByOccupancy:
    """The pages with free blocks by level: 0 if wholly free, else one more than the referenced blocks.

    The pages of a level are the bits of one number, so that filing and finding a page takes a few machine words.
    """

    def __init__(self, pages: int) -> None:
        self._level_of = [UNFILED] * pages
        self._pages_at: dict[int, int] = {}
        self._levels: list[int] = []  # those in use, sorted

    def put(self, page: int, level: int) -> None:
        """File a page under its new level."""
        before = self._level_of[page]
        if level == before:
            return
        self._level_of[page] = level
        bit = 1 << page
        if before != UNFILED:
            self._pages_at[before] ^= bit
            if not self._pages_at[before]:
                del self._pages_at[before]
                del self._levels[bisect_left(self._levels, before)]
        if level != UNFILED:
            if level not in self._pages_at:
                self._pages_at[level] = 0
                insort(self._levels, level)
            self._pages_at[level] |= bit

    def fullest(self) -> int:
        """Return the lowest page of the highest level."""
        pages = self._pages_at[self._levels[-1]]
        return (pages & -pages).bit_length() - 1

    def empty(self, count: int) -> list[int]:
        """Return at most `count` wholly free pages, highest first."""
        pages = self._pages_at.get(0, 0)
        found: list[int] = []
        while pages and len(found) < count:
            found.append(pages.bit_length() - 1)
            pages ^= 1 << found[-1]
        return found

    def check(self, levels: Sequence[int]) -> None:
        """Assert that every page is filed under the level given for it."""
        assert self._level_of == levels and self._levels == sorted(self._pages_at)
        for page, level in enumerate(levels):
            assert [at for at, pages in self._pages_at.items() if pages >> page & 1] == [level] * (level != UNFILED)


class BlockPool:
    """The KV blocks of one engine, by number. `references[block]` counts the requests that hold it."""

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
        self._by_occupancy = PagesByOccupancy(pages)
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
        """Return how many blocks `allocate` could hand out now; negative after the limit was lowered below use."""
        if self.source is None:
            return self.limit - self.used
        return min(self.limit, (self.pages_held + self.source.room()) * self.blocks_per_page) - self.used

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks for one owner, of the fullest pages first, or None if there are not so many."""
        at_hand = count <= self._free_count and self.used + len(self._cached) + count <= self.limit
        if not at_hand and (count > self.available or not self._make_room(count)):
            return None
        taken: list[int] = []
        while len(taken) < count:
            page = self._by_occupancy.fullest()
            free = self._free[page]
            fresh = min(count - len(taken), len(free))
            taken += [heapq.heappop(free) for _ in range(fresh)]
            self._free_count -= fresh
            self._refile(page, fresh)
        for block in taken:
            self.references[block] = 1
        self.used += count
        return taken

    def find(self, digest: bytes) -> int | None:
        """Return the block with this content, without taking it."""
        return self._block_of.get(digest)

    def take(self, block: int) -> None:
        """Add one owner to a block that `find` returned."""
        if self.references[block] == 0:
            del self._cached[block]
            self.used += 1
            self._refile(block // self.blocks_per_page, 1)
        self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one owner from each block. Tails go first, so that the tail of a chain is forgotten first."""
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
            self._refile(page, -count)
        self._trim()

    def publish(self, block: int, digest: bytes) -> None:
        """Let later requests find this block. The first block with a digest keeps it."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def forget_digests(self) -> None:
        """Make everything that is here now unfindable, because the weights changed."""
        by_page: dict[int, list[int]] = {}
        for block in self._cached:
            by_page.setdefault(block // self.blocks_per_page, []).append(block)
        self._cached.clear()
        self._digest_of.clear()
        self._block_of.clear()
        for page, blocks in by_page.items():
            self._free_all(page, blocks)

    def set_limit(self, limit: int) -> None:
        """Drop cached blocks above the limit; if requests hold more, the caller must release some."""
        self.limit = max(0, min(limit, self.capacity))
        self._trim()

    # Pages

    def grow(self, pages: int) -> int:
        """Take pages in before they are needed, and return how many came."""
        assert self.source is not None, "all pages are here already"
        fresh = self.source.acquire(pages, urgent=False)
        self._take_in(fresh)
        return len(fresh)

    def shrink(self, pages: int) -> int:
        """Give back up to this many pages that no request uses, with what they cache; return how many went."""
        assert self.source is not None, "without a source no page can be given back"
        # Empty pages from the highest down, then those whose cache was used longest ago.
        going = self._by_occupancy.empty(pages)
        going += islice(self._idle, pages - len(going))
        for page in going:
            self._drop_page(page)
            self._held[page] = False
            self._free[page].clear()
            self._by_occupancy.put(page, UNFILED)
        self.pages_held -= len(going)
        self._free_count -= len(going) * self.blocks_per_page
        if going:
            self.source.give_back(going)
        return len(going)

    def gather(self, pages: int, blocks_max: int | None = None) -> dict[int, int]:
        """Move referenced blocks together until this many pages hold none, if the other pages have places for them.

        Returns {from: to}, at most `blocks_max` of them. No place is also a source, so they may be copied in any
        order. The caller must copy these blocks and rename them in its lists before anything else.
        """
        going = self._pages_to_vacate(pages, self.used if blocks_max is None else blocks_max)
        staying = [page for page, referenced in enumerate(self._referenced) if referenced and page not in going]
        leaving = {page: [block for block in self._blocks_of(page) if self.references[block]] for page in going}
        blocks = [block for inside in leaving.values() for block in inside]
        moves = dict(zip(blocks, self._take_places(staying, len(blocks)), strict=True))
        for block, place in moves.items():
            self.references[place], self.references[block] = self.references[block], 0
            digest = self._digest_of.pop(block, None)
            if digest is not None:  # a block that moved is still found
                self._digest_of[place], self._block_of[digest] = digest, place
        for page, inside in leaving.items():
            self._free[page] = sorted(self._free[page] + inside)  # which is a heap
            self._refile(page, -len(inside))
        return moves

    def check(self) -> None:
        """Assert that every block is in exactly one place, that the counts agree, and that no page away is used."""
        free, cached = {block for page in self._free for block in page}, set(self._cached)
        referenced = {block for block, count in enumerate(self.references) if count}
        held = {page for page, here in enumerate(self._held) if here}
        assert len(free) == self._free_count == sum(map(len, self._free)), "a block is free twice"
        assert not (free & cached or free & referenced or cached & referenced), "a block is in two places"
        here = self.pages_held * self.blocks_per_page
        assert len(free) + len(cached) + len(referenced) == here, "a block is lost"
        assert self._pages_of(free | cached | referenced) == held and len(held) == self.pages_held
        assert self.used == len(referenced)
        assert self.used + len(cached) <= max(self.limit, self.used), "more cached than the limit allows"
        assert cached <= self._digest_of.keys() and not free & self._digest_of.keys()
        assert {digest: block for block, digest in self._digest_of.items()} == self._block_of
        pinned = self._pages_of(referenced)
        assert self.pages_pinned == len(pinned)
        assert self._idle.keys() == self._pages_of(cached) - pinned
        for page, inside in enumerate(self._free):
            blocks = set(self._blocks_of(page))
            assert blocks.issuperset(inside), "a free block lies in another page"
            assert self._referenced[page] == len(referenced & blocks)
        self._by_occupancy.check([self._level(page) for page in range(len(self._free))])

    # Free places

    def _make_room(self, count: int) -> bool:
        """Free blocks for `count` within the limit, the cheapest way first."""
        self._drop_oldest(self.used + len(self._cached) + count - self.limit)
        self._request_pages(count, urgent=False)
        self._drop_oldest(count - self._free_count)
        self._request_pages(count, urgent=True)
        return self._free_count >= count

    def _request_pages(self, blocks: int, *, urgent: bool) -> None:
        missing = blocks - self._free_count
        if missing > 0 and self.source is not None:
            self._take_in(self.source.acquire(-(-missing // self.blocks_per_page), urgent=urgent))

    def _take_in(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert not self._held[page], f"page {page} is here already"
            self._held[page] = True
            self.pages_held += 1
            self._free[page] = list(self._blocks_of(page))
            self._free_count += self.blocks_per_page
            self._by_occupancy.put(page, self._level(page))

    def _pages_to_vacate(self, pages: int, blocks_max: int) -> list[int]:
        """Return enough of the least full pages to have `pages` unpinned, if the rest can take their blocks."""
        pinned = [page for page, referenced in enumerate(self._referenced) if referenced]
        pinned.sort(key=lambda page: (self._referenced[page], -page))
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
        """Take free blocks of these pages, fullest page first; if too few, drop what was cached longest ago."""
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
            self._refile(page, len(taken))
            found += taken
        return found

    # The cache

    def _trim(self) -> None:
        if self.source is not None:  # a lower limit means that whole pages are wanted
            while self._idle and self.used + len(self._cached) > self.limit:
                self._drop_page(next(iter(self._idle)))
        self._drop_oldest(self.used + len(self._cached) - self.limit)

    def _drop_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self._cached))):
            self._drop(next(iter(self._cached)))

    def _drop(self, block: int) -> None:
        page = block // self.blocks_per_page
        del self._cached[block]
        del self._block_of[self._digest_of.pop(block)]
        heapq.heappush(self._free[page], block)
        self._free_count += 1
        self._refile(page, 0)

    def _drop_page(self, page: int) -> None:
        going = [block for block in self._blocks_of(page) if block in self._cached]
        for block in going:
            del self._cached[block]
            del self._block_of[self._digest_of.pop(block)]
        self._free_all(page, going)

    def _free_all(self, page: int, blocks: list[int]) -> None:
        """Free blocks of one page at once: new weights free all that is cached, while requests wait."""
        self._free[page] = sorted(self._free[page] + blocks)  # which is a heap
        self._free_count += len(blocks)
        self._refile(page, 0)

    def _refile(self, page: int, change: int) -> None:
        """Count so many more referenced blocks in this page, and file it as fuller, idle or empty."""
        before = self._referenced[page]
        after = self._referenced[page] = before + change
        self.pages_pinned += bool(after) - bool(before)
        self._by_occupancy.put(page, self._level(page))
        if after == 0 and len(self._free[page]) < self.blocks_per_page:
            if before:
                self._idle[page] = None
        elif page in self._idle:
            del self._idle[page]

    def _level(self, page: int) -> int:
        free = len(self._free[page])
        if free == 0:
            return UNFILED
        return 0 if free == self.blocks_per_page else 1 + self._referenced[page]

    def _blocks_of(self, page: int) -> range:
        return range(page * self.blocks_per_page, (page + 1) * self.blocks_per_page)

    def _pages_of(self, blocks: Iterable[int]) -> set[int]:
        return {block // self.blocks_per_page for block in blocks}
