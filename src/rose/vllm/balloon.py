"""A balloon in vLLM's pool of KV blocks: it holds blocks so that no request can use them.

vLLM has no way to make its KV cache smaller. The highest numbers are taken first, so that held blocks lie together and
their memory can be returned to the machine. Blocks that only the prefix cache holds are taken like free ones.
"""

from __future__ import annotations

from typing import Any


class Balloon:
    """The blocks that are held out of one pool. Uses fields of `BlockPool` that vLLM does not call public."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: dict[int, Any] = {}

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def blocks(self) -> int:
        """Return the blocks of the pool, held ones included, without its null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def limit(self) -> int:
        """Return how many blocks requests and the prefix cache may use."""
        return self.blocks - self.held

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

    def missing(self, limit: int) -> int:
        """Return how many more blocks must be free before the limit can be this low."""
        return self.blocks - limit - self.held - self.free

    def resize(self, limit: int) -> list[tuple[int, int]]:
        """Move the limit as far as free blocks allow. Return the runs of blocks [first, end) that were taken."""
        pool, count = self._pool, self.blocks - max(0, limit) - self.held
        if count < 0:
            lowest = sorted(self._held)[:-count]
            pool.free_blocks([self._held.pop(number) for number in lowest])
            return []
        runs: list[tuple[int, int]] = []
        for block in reversed(pool.blocks):
            if count == 0:
                break
            if block.ref_cnt == 0 and not block.is_null:
                count -= 1
                pool.free_block_queue.remove(block)
                pool._maybe_evict_cached_block(block)
                block.ref_cnt += 1
                number = block.block_id
                self._held[number] = block
                if runs and runs[-1][0] == number + 1:
                    runs[-1] = (number, runs[-1][1])
                else:
                    runs.append((number, number + 1))
        return runs[::-1]
