"""A balloon in vLLM's block pool: blocks that are taken so that nobody else can have them.

vLLM has no way to make its KV cache smaller. Blocks held here are as good as gone; the highest numbers are taken
first, so that they lie together and their memory can be given back to the machine. Blocks that only the prefix cache
holds are taken like free ones, and forgotten by it.
"""

from __future__ import annotations

from typing import Any


class Balloon:
    """One per pool. Uses fields of `BlockPool` that vLLM does not call public."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: dict[int, Any] = {}

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def blocks(self) -> int:
        """Of the pool, the held ones included; its null block is not for use."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def limit(self) -> int:
        """What requests and the prefix cache may have."""
        return self.blocks - self.held

    @property
    def free(self) -> int:
        """Of these, what no request refers to."""
        return int(self._pool.get_num_free_blocks())

    @property
    def used(self) -> int:
        return self.limit - self.free

    @property
    def cached(self) -> int:
        """Not referred to, and kept for prefix hits."""
        return sum(1 for block in self._pool.blocks if block.ref_cnt == 0 and block.block_hash is not None)

    def missing(self, limit: int) -> int:
        """How many more blocks must be free before the limit can be this low."""
        return self.blocks - limit - self.held - self.free

    def resize(self, limit: int) -> list[tuple[int, int]]:
        """As near to this limit as free blocks allow. Returns the runs of blocks [first, end) that were taken."""
        wanted = self.blocks - max(0, limit)
        if wanted < self.held:
            self._give_back(self.held - wanted)
            return []
        return _runs(self._take(wanted - self.held))

    def _give_back(self, count: int) -> None:
        lowest = sorted(self._held)[:count]
        self._pool.free_blocks([self._held.pop(number) for number in lowest])

    def _take(self, count: int) -> list[int]:
        pool, taken = self._pool, list[int]()
        for block in reversed(pool.blocks):
            if len(taken) == count:
                break
            if block.ref_cnt == 0 and not block.is_null:
                pool.free_block_queue.remove(block)
                pool._maybe_evict_cached_block(block)
                block.ref_cnt += 1
                self._held[block.block_id] = block
                taken.append(block.block_id)
        return taken


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
