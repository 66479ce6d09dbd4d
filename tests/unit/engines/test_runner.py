"""The sharing out of rows, and KV memory."""

from __future__ import annotations

import numpy as np
import pytest

from rose.engines.blocks import BlockPool
from rose.engines.embedded import engine_kernels as k
from rose.engines.embedded.runner import KvMemory, block_bytes, own_memory, share_out
from rose.models.presets import PRESETS, preset_spec


@pytest.mark.parametrize("rows", [[1], [1] * 16, [500], [1, 500], [3, 3, 3], [200, 1, 1, 200], [7, 1000, 2]])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_shares_cover_every_row_once_in_order(rows: list[int], threads: int) -> None:
    first = np.cumsum([0, *rows[:-1]])
    segments = np.array([[a, n, 10 * i, i] for i, (a, n) in enumerate(zip(first, rows, strict=True))], np.int64)
    shares, is_whole = share_out(segments, threads)
    covered = [
        (int(row), int(position) + int(row) - int(start), int(slot))
        for part in shares
        for start, count, position, slot in part.segments
        for row in range(int(start), int(start) + int(count))
    ]
    wanted = [
        (int(row), 10 * i + int(row) - int(a), i)
        for i, (a, n) in enumerate(zip(first, rows, strict=True))
        for row in range(int(a), int(a) + n)
    ]
    assert covered == wanted
    slots = [{int(s[3]) for s in part.segments} for part in shares]
    assert is_whole == (sum(map(len, slots)) == len(set().union(*slots)))
    assert sum(part.rows for part in shares) == sum(rows)


def test_own_memory_has_as_many_blocks_as_fit_and_at_least_one() -> None:
    spec = preset_spec(PRESETS["qwen3-3m"])
    size = block_bytes(spec)
    assert size == 4 * spec.kv_values_per_token * k.BLOCK_TOKENS, "a head of 64 needs no padding"
    memory = own_memory(spec, 5 * size + 1)
    assert memory.pool.capacity == 5 and memory.floats.nbytes == 5 * size
    assert own_memory(spec, 0).pool.capacity == 1


def test_copying_moves_blocks_and_touches_no_other() -> None:
    floats = np.repeat(np.arange(6, dtype=np.float32), 4)
    KvMemory(floats, BlockPool(6)).copy({5: 0, 3: 1})
    assert floats.reshape(6, 4)[:, 0].tolist() == [5, 3, 2, 3, 4, 5]
    assert (floats.reshape(6, 4) == floats.reshape(6, 4)[:, :1]).all()
