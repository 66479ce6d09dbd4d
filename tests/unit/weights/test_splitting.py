"""Anchors are decoded four streams in step: the same numbers as one by one, and the same verdict on damaged bytes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.codec_reference import ReferenceBlocks

from rose.weights import codec
from rose.weights.codec import CodecError, ElementType, Mode
from rose.weights.codec.codec_kernels import KernelBlocks
from rose.weights.codec.format import SPLIT_ELEMENTS_MIN, SPLIT_HEAD_BYTES, parse
from rose.weights.codec.splitting import PART_ELEMENTS

BLOCK = 600


def numbers(count: int, kind: ElementType = ElementType.BF16, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return values.astype(np.float16) if kind is ElementType.FP16 else (values.view(np.uint32) >> 16).astype(np.uint16)


def outcome(payload: bytes, count: int, **options) -> bytes | None:
    """What comes of it; None if it is refused."""
    held = np.zeros(count, np.uint16)
    try:
        codec.apply(payload, held, **options)
    except CodecError:
        return None
    return held.tobytes()


@pytest.mark.parametrize("kind, mode", [(ElementType.BF16, Mode.SPLIT), (ElementType.FP16, Mode.PACKED)])
@pytest.mark.parametrize("blocks, more", [(1, 0), (4, SPLIT_ELEMENTS_MIN + 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_payload_is_its_numbers(kind, mode, blocks, more, threads):
    new = numbers(blocks * BLOCK + more, kind)
    payload = codec.encode_full(new, element_type=kind, block_elements=BLOCK)
    assert codec.describe(payload).blocks_by_mode == {mode: blocks + (more > 0)}
    assert outcome(payload, new.size, threads=threads) == new.tobytes()


@pytest.mark.parametrize(
    "count", [SPLIT_ELEMENTS_MIN, 4 * PART_ELEMENTS - 3, 4 * PART_ELEMENTS, 4 * PART_ELEMENTS + 1, 9 * PART_ELEMENTS]
)
@pytest.mark.parametrize("spread", ["weights", "one exponent", "every exponent", "rarely another"])
def test_streams_of_any_length_and_any_code(count, spread):
    """One code of one bit, codes of up to 12 bits, and streams that get out of step."""
    new, draw = numbers(count), np.random.default_rng(1)
    if spread == "one exponent":
        new = (new & 0x807F) | 0x3C00
    elif spread == "every exponent":
        new = new ^ (draw.geometric(0.4, count) * (draw.random(count) < 0.3)).astype(np.uint16) << 7
    elif spread == "rarely another":
        new = ((new & 0x807F) | 0x3C00) ^ ((draw.random(count) < 0.001) << 8).astype(np.uint16)
    payload = codec.encode_full(new)
    assert codec.describe(payload).blocks_by_mode == {Mode.SPLIT: 1}
    assert outcome(payload, count) == new.tobytes()


def test_small_blocks_and_noise_are_not_split():
    few, noise = numbers(SPLIT_ELEMENTS_MIN - 1), np.random.default_rng(0).integers(0, 1 << 16, 5000).astype(np.uint16)
    assert codec.describe(codec.encode_full(few)).blocks_by_mode == {Mode.PACKED: 1}
    assert codec.describe(codec.encode_full(noise)).blocks_by_mode == {Mode.FULL: 1}


@pytest.mark.parametrize("start, stop", [(0, 5 * BLOCK), (1, 6 * BLOCK), (BLOCK, 6 * BLOCK - 1), (100, 101)])
def test_a_range_is_that_range(start, stop):
    new = numbers(8 * BLOCK)
    payload = codec.encode_full(new, block_elements=BLOCK)
    held = np.zeros(stop - start, np.uint16)
    codec.apply(payload, held, start=start, stop=stop)
    assert np.array_equal(held, new[start:stop])


def test_damage_is_seen_as_the_reference_sees_it():
    """Every bit of the head and of the codes, and some of the rest."""
    new = numbers(SPLIT_ELEMENTS_MIN)
    mode, body = ReferenceBlocks(ElementType.BF16).encode_full(new)
    fast, slow, refused = KernelBlocks(ElementType.BF16, 0), ReferenceBlocks(ElementType.BF16), 0
    rest = len(body) - new.size
    bits = [
        *range(8 * SPLIT_HEAD_BYTES),
        *range(8 * SPLIT_HEAD_BYTES, 8 * rest, 5),
        *range(8 * rest, 8 * len(body), 97),
    ]
    for bit in bits:
        damaged, left, right = bytearray(body), np.zeros_like(new), np.zeros_like(new)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        verdict = fast.apply(mode, bytes(damaged), left, new.size, 0)
        assert verdict == slow.apply(mode, bytes(damaged), right, new.size, 0)
        assert not verdict or np.array_equal(left, right)
        refused += not verdict
    assert refused > len(bits) / 4


def test_the_damaged_block_is_named():
    new = numbers(4 * BLOCK)
    payload = bytearray(codec.encode_full(new, block_elements=BLOCK))
    third = parse(payload).offsets[2:4]
    payload[third[0] : third[1]] = b"\xff" * int(third[1] - third[0])
    with pytest.raises(CodecError, match="block 2 "):
        codec.apply(payload, np.zeros_like(new))


def test_blocks_of_other_types_are_not_split():
    new = numbers(SPLIT_ELEMENTS_MIN)
    mode, body = ReferenceBlocks(ElementType.BF16).encode_full(new)
    for coder in (KernelBlocks(ElementType.FP16, 0), ReferenceBlocks(ElementType.FP16)):
        assert coder.apply(mode, body, np.zeros_like(new), new.size, 0) is False
