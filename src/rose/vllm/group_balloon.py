"""A balloon of whole groups: it holds the KV blocks that have no memory, so that no request can use them.

vLLM's block pool is told that all its blocks are there. Those of a group without memory are held here: each counts as
referenced once, so vLLM neither hands it out nor looks for it in the prefix cache. Releasing a group makes its blocks
free; holding one needs them unreferenced, and forgets what they had cached. Uses fields of `BlockPool` that vLLM does
not call public (`supported_versions.PRIVATE_NAMES`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rose.vllm.kv_groups import NULL_GROUP


class GroupBalloon:
    """The groups of one block pool that are held, and what is in the others. At first only the null group is not."""

    def __init__(self, pool: Any, blocks_per_group: int, groups: int) -> None:
        self._pool, self.size, self.groups = pool, blocks_per_group, groups
        self._held: set[int] = set()
        self.hold(range(NULL_GROUP + 1, groups))

    @property
    def present(self) -> list[int]:
        """Return the groups that are not held, in order."""
        return [group for group in range(self.groups) if group not in self._held]

    @property
    def absent(self) -> list[int]:
        return sorted(self._held)

    @property
    def held_blocks(self) -> int:
        return len(self._held) * self.size

    @property
    def limit(self) -> int:
        """Return how many blocks requests and the prefix cache may use, without the null block."""
        return (self.groups - len(self._held)) * self.size - 1

    @property
    def free(self) -> int:
        """Return how many of these no request refers to."""
        return int(self._pool.get_num_free_blocks())

    @property
    def used(self) -> int:
        return self.limit - self.free

    @property
    def cached(self) -> int:
        """Return how many unreferenced blocks are kept for prefix hits."""
        return sum(1 for block in self._pool.blocks if block.ref_cnt == 0 and block.block_hash is not None)

    def free_uncached(self, enough: int) -> int:
        """Return how many blocks vLLM can hand out before it takes one from its prefix cache; `enough` at most."""
        block, count = self._pool.free_block_queue.fake_free_list_head.next_free_block, 0
        while count < enough and block is not None and block.next_free_block is not None and block.block_hash is None:
            block, count = block.next_free_block, count + 1
        return count

    def blocks_of(self, group: int) -> list[Any]:
        blocks: list[Any] = self._pool.blocks[group * self.size : (group + 1) * self.size]
        return blocks

    def empty(self) -> list[int]:
        """Return the groups that no request refers to and that are not held, those with the least cached first."""
        cached = {}
        for group in self.present[1:]:
            blocks = self.blocks_of(group)
            if all(block.ref_cnt == 0 for block in blocks):
                cached[group] = sum(1 for block in blocks if block.block_hash is not None)
        return sorted(cached, key=lambda group: (cached[group], -group))

    def hold(self, groups: Iterable[int]) -> None:
        """Hold groups that no request refers to."""
        pool = self._pool
        for group in groups:
            for block in self.blocks_of(group):
                assert block.ref_cnt == 0 and not block.is_null, f"block {block.block_id} is in use"
                pool.free_block_queue.remove(block)
                pool._maybe_evict_cached_block(block)
                block.ref_cnt += 1
            self._held.add(group)

    def release(self, groups: Iterable[int]) -> None:
        """Let requests have the blocks of these groups again."""
        for group in groups:
            self._held.remove(group)
            self._pool.free_blocks(self.blocks_of(group))

    def references(self) -> Counter[int]:
        """Return how many blocks of each group requests refer to."""
        return Counter(
            {group: sum(1 for block in self.blocks_of(group) if block.ref_cnt > 0) for group in self.present}
        )
