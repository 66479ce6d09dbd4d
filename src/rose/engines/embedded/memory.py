"""The memory an engine keeps keys and values in: one flat array of blocks, and the pool that says who holds which.

An engine of its own takes what it needs from the system. A device that is shared hands in an array whose pages come and
go, with a pool that knows which of them are there; the engine does not see the difference, because it touches only the
blocks its pool has handed out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rose.engines.blocks import BlockPool
from rose.engines.embedded.kernels import BLOCK_TOKENS
from rose.engines.embedded.weights import aligned_floats, pad16
from rose.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Block number b is floats[b * size : (b + 1) * size], with the size of the model's blocks."""

    floats: NDArray[np.float32]
    pool: BlockPool

    def copy(self, moves: Mapping[int, int]) -> None:
        """Blocks that were moved, {from: to}; what is not moved is not touched, for its page may be away."""
        blocks = self.floats.reshape(self.pool.capacity, -1)
        for block, place in moves.items():
            blocks[place] = blocks[block]


def block_bytes(spec: ModelSpec) -> int:
    """Keys and values of sixteen tokens, all layers, in float32."""
    return 4 * spec.layers * 2 * spec.kv_heads * pad16(spec.head_size) * BLOCK_TOKENS


def own_memory(spec: ModelSpec, size_bytes: int) -> KvMemory:
    """As many blocks as fit, none of them shared; memory is the system's until it is touched."""
    blocks = max(1, size_bytes // block_bytes(spec))
    return KvMemory(aligned_floats(blocks * block_bytes(spec) // 4), BlockPool(blocks))
