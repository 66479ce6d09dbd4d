"""Anchors are decoded several blocks in step: the same numbers as one by one, and the same verdict on damaged bytes."""

from __future__ import annotations

import numpy as np
import pytest

from rose.weights import codec
from rose.weights.codec import CodecError, ElementType, Mode
from rose.weights.codec.format import PACKED_TOGETHER, parse
from rose.weights.codec.reference import ReferenceBlocks

BLOCK = 64


def numbers(count: int, kind: ElementType, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return values.astype(np.float16) if kind is ElementType.FP16 else (values.view(np.uint32) >> 16).astype(np.uint16)


def outcome(payload: bytes, count: int, kind: ElementType, **options) -> bytes | None:
    """What comes of it; None if it is refused."""
    held = np.zeros(count, numbers(1, kind).dtype)
    try:
        codec.apply(payload, held, **options)
    except CodecError:
        return None
    return held.tobytes()


@pytest.mark.parametrize("kind", [ElementType.BF16, ElementType.FP16])
@pytest.mark.parametrize("blocks", [1, PACKED_TOGETHER, 2 * PACKED_TOGETHER + 3])
@pytest.mark.parametrize("more", [0, 17])
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_in_step_are_the_blocks(kind, blocks, more, threads):
    new = numbers(blocks * BLOCK + more, kind)
    payload = codec.encode_full(new, element_type=kind, block_elements=BLOCK)
    assert outcome(payload, new.size, kind, threads=threads) == new.tobytes()


@pytest.mark.parametrize("start, stop", [(0, 5 * BLOCK), (1, 6 * BLOCK), (BLOCK, 6 * BLOCK - 1), (100, 101)])
def test_a_range_is_that_range(start, stop):
    new = numbers(8 * BLOCK, ElementType.BF16)
    payload = codec.encode_full(new, block_elements=BLOCK)
    assert codec.describe(payload).blocks_by_mode == {Mode.PACKED: 8}
    held = np.zeros(stop - start, np.uint16)
    codec.apply(payload, held, start=start, stop=stop)
    assert np.array_equal(held, new[start:stop])


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_seen_as_it_is_one_by_one(seed):
    rng = np.random.default_rng(seed)
    new = numbers(PACKED_TOGETHER * BLOCK, ElementType.BF16, seed)
    payload = codec.encode_full(new, block_elements=BLOCK)
    first = int(parse(payload).offsets[0])
    refused = 0
    for _ in range(50):
        damaged = bytearray(payload)
        damaged[rng.integers(first, len(payload))] ^= 1 << rng.integers(8)
        found = outcome(damaged, new.size, ElementType.BF16)
        assert found == outcome(damaged, new.size, ElementType.BF16, blocks=ReferenceBlocks)
        refused += found is None
    assert refused > 0


def test_the_damaged_block_is_named():
    new = numbers(PACKED_TOGETHER * BLOCK, ElementType.BF16)
    payload = bytearray(codec.encode_full(new, block_elements=BLOCK))
    third = parse(payload).offsets[2:4]
    payload[third[0] : third[1]] = b"\xff" * int(third[1] - third[0])
    with pytest.raises(CodecError, match="block 2 "):
        codec.apply(payload, np.zeros_like(new))
