"""Pages with free blocks, ordered by how full they are.

The level of a page is 0 when it is wholly free, else one more than the number of its blocks that requests hold. The
pages of a level are the bits of one number, so that filing a page and finding the lowest or the highest of a level
take a few machine words each; the levels in use are a short sorted list.
"""

from __future__ import annotations

from bisect import bisect_left, insort

NOT_ON_SHELF = -1  # the level of a page without a free block, or one that is away


class PageShelf:
    """Give `put` every change of a page's level."""

    def __init__(self, pages: int) -> None:
        self._level_of = [NOT_ON_SHELF] * pages
        self._pages_at: dict[int, int] = {}
        self._levels: list[int] = []

    def level_of(self, page: int) -> int:
        return self._level_of[page]

    def put(self, page: int, level: int) -> None:
        before = self._level_of[page]
        if level == before:
            return
        self._level_of[page] = level
        bit = 1 << page
        if before != NOT_ON_SHELF:
            self._pages_at[before] ^= bit
            if not self._pages_at[before]:
                del self._pages_at[before]
                del self._levels[bisect_left(self._levels, before)]
        if level != NOT_ON_SHELF:
            if level not in self._pages_at:
                self._pages_at[level] = 0
                insort(self._levels, level)
            self._pages_at[level] |= bit

    def fullest(self) -> int:
        pages = self._pages_at[self._levels[-1]]
        return (pages & -pages).bit_length() - 1

    def highest_at(self, level: int, count: int) -> list[int]:
        pages = self._pages_at.get(level, 0)
        found: list[int] = []
        while pages and len(found) < count:
            page = pages.bit_length() - 1
            pages ^= 1 << page
            found.append(page)
        return found

    def check(self) -> None:
        assert self._levels == sorted(self._pages_at)
        filed = {
            page: level
            for level, bits in self._pages_at.items()
            for page in range(len(self._level_of))
            if bits >> page & 1
        }
        assert filed == {page: level for page, level in enumerate(self._level_of) if level != NOT_ON_SHELF}
