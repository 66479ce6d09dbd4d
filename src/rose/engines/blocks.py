"""KV blocks: who holds which, and which of them may be found again by their content.

A block is in exactly one of three places: *referenced* by one or more requests, *cached* (nobody references
it, but its content has a digest under which a later request may find it), or *free*. Referenced and cached
blocks together never exceed `limit`, which may be lowered and raised at run time up to `capacity`.

The digest of a block covers everything in front of it: it is chained from a root that is salted with the
tenant and the weight version, so one tenant never finds another's blocks and no block survives its weights.
Cached blocks are dropped least recently used first; free blocks are handed out lowest number first, which
keeps the used ones close together.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def root_digest(tenant: str, version: str) -> bytes:
    return blake2b(f"{len(tenant)}:{tenant}:{version}".encode(), digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class BlockPool:
    """Hands out block numbers. `references[block]` counts the requests that hold it."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self.limit = capacity
        self.references = [0] * capacity
        self.used = 0
        self._free = list(range(capacity))  # a heap
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now; negative after the limit was lowered below use."""
        return self.limit - self.used

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks for one owner, or None if that many are not to be had."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self.used + len(self._cached) >= self.limit:
                self._drop_oldest_cached()
            block = heapq.heappop(self._free)
            self.references[block] = 1
            self.used += 1
            taken.append(block)
        return taken

    def find(self, digest: bytes) -> int | None:
        """The block with this content, without taking it."""
        return self._block_of.get(digest)

    def take(self, block: int) -> None:
        """One more owner for a block that `find` named."""
        if self.references[block] == 0:
            del self._cached[block]
            self.used += 1
        self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each. Tails go first, so that of a chain the tail is forgotten first."""
        for block in reversed(list(blocks)):
            assert self.references[block] > 0, f"block {block} released twice"
            self.references[block] -= 1
            if self.references[block]:
                continue
            self.used -= 1
            if block in self._digest_of:
                self._cached[block] = None
            else:
                heapq.heappush(self._free, block)
        self._trim()

    def publish(self, block: int, digest: bytes) -> None:
        """Let later requests find this block. The first block with a digest keeps it."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def forget_digests(self) -> None:
        """Nothing that is here now will ever be found again (the weights changed)."""
        for block in self._cached:
            heapq.heappush(self._free, block)
        self._cached.clear()
        self._digest_of.clear()
        self._block_of.clear()

    def set_limit(self, limit: int) -> None:
        """Cached blocks go at once; if requests hold more than `limit`, the caller must release some."""
        self.limit = max(0, min(limit, self.capacity))
        self._trim()

    def check(self) -> None:
        """Every block is in exactly one place, and the counts agree."""
        free, cached = set(self._free), set(self._cached)
        referenced = {block for block, count in enumerate(self.references) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & referenced or cached & referenced), "a block is in two places"
        assert len(free) + len(cached) + len(referenced) == self.capacity, "a block is lost"
        assert self.used == len(referenced)
        assert self.used + len(cached) <= max(self.limit, self.used), "more cached than the limit allows"
        assert cached <= self._digest_of.keys() and not free & self._digest_of.keys()
        assert {digest: block for block, digest in self._digest_of.items()} == self._block_of

    def _trim(self) -> None:
        while self._cached and self.used + len(self._cached) > self.limit:
            self._drop_oldest_cached()

    def _drop_oldest_cached(self) -> None:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        heapq.heappush(self._free, block)
