"""The delta codec tells the truth about any bits, picks the smallest mode, and says what is wrong with bad input."""

from __future__ import annotations

import numpy as np
import pytest

from rose.errors import RoseError
from rose.models.bits import to_bf16
from rose.weights import codec
from rose.weights.codec import CodecError, ElementType, Kind, Mode
from rose.weights.codec.format import ENTRY_BYTES, HEADER
from rose.weights.codec.reference import ReferenceBlocks

BOTH = pytest.mark.parametrize("blocks", [None, ReferenceBlocks], ids=["kernels", "reference"])


def weights(elements: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(elements, dtype=np.float32) * np.float32(0.02)


def update(elements: int, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """bf16 weights before and after a small step of their fp32 masters."""
    before = weights(elements, seed)
    return to_bf16(before), to_bf16(before + weights(elements, seed + 1) * np.float32(50 * noise))


@BOTH
@pytest.mark.parametrize("element_type, patterns", [
    (ElementType.BF16, [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x7F7F, 0x3F80]),
    (ElementType.FP16, [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x0001, 0x8001, 0x7BFF, 0x3C00]),
    (ElementType.FP32, [0x0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x1, 0x80000001]),
])  # fmt: skip
def test_every_pattern_reaches_every_other(blocks, element_type, patterns):
    every = np.array(patterns, element_type.storage)
    base, new = np.repeat(every, len(every)), np.tile(every, len(every))
    for payload in (
        codec.encode(base, new, element_type=element_type, blocks=blocks),
        codec.encode_full(new, element_type=element_type, blocks=blocks),
    ):
        found = base.copy()
        codec.apply(payload, found, blocks=blocks)
        assert found.tobytes() == new.tobytes()


def test_all_sixteen_bit_steps():
    """Every bit pattern once, moved by every possible distance from a few places."""
    for start in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        base, new = np.full(1 << 16, start, np.uint16), np.arange(1 << 16, dtype=np.uint16)
        found = base.copy()
        codec.apply(codec.encode(base, new), found)
        assert np.array_equal(found, new)


@pytest.mark.parametrize("story, noise, mode, ratio_full_min", [
    ("nothing changed", 0.0, Mode.UNCHANGED, 8000),
    ("a gentle step", 3e-7, Mode.SPARSE, 130),
    ("a larger step", 1.2e-6, Mode.SPARSE, 50),
    ("most changed", 1e-4, Mode.SPARSE, 4),
    ("another model", 1.0, Mode.SPLIT, 1.45),
])  # fmt: skip
def test_the_smallest_mode_is_taken(story, noise, mode, ratio_full_min):
    base, new = update(1 << 17, noise)
    payload = codec.encode(base, new)
    told = codec.describe(payload)
    assert told.blocks_by_mode == {mode: 1}
    assert told.full_bytes == new.nbytes and told.payload_bytes == len(payload)
    assert new.nbytes / len(payload) >= ratio_full_min


def test_noise_costs_the_header_and_no_more():
    draw = np.random.default_rng(0)
    base, new = (draw.integers(0, 1 << 16, 5000).astype(np.uint16) for _ in range(2))
    payload = codec.encode(base, new, block_elements=1000)
    assert codec.describe(payload).blocks_by_mode == {Mode.FULL: 5}
    assert len(payload) == new.nbytes + HEADER.size + 5 * ENTRY_BYTES


def test_half_of_a_small_block_is_a_bitmap():
    base = np.zeros(256, np.uint16)
    new = base + np.random.default_rng(0).choice([0, 1, 0, 9, 0, 300], 256).astype(np.uint16)
    payload = codec.encode(base, new)
    assert codec.describe(payload).blocks_by_mode == {Mode.BITMAP: 1}
    codec.apply(payload, base)
    assert np.array_equal(base, new)


@BOTH
@pytest.mark.parametrize(
    "start, stop", [(0, 0), (0, 1), (0, 3000), (999, 1001), (1000, 2000), (1234, 1235), (2500, 3000)]
)
@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1.0])
def test_a_row_range_is_decoded_alone(blocks, noise, start, stop):
    base, new = update(3000, noise)
    for payload in (codec.encode(base, new, block_elements=1000), codec.encode_full(new, block_elements=1000)):
        rows = base[start:stop].copy()
        codec.apply(payload, rows, start=start, stop=stop, blocks=blocks)
        assert np.array_equal(rows, new[start:stop])


def test_a_row_range_does_not_look_at_other_blocks():
    base, new = update(3000, 1e-5)
    payload = bytearray(codec.encode(base, new, block_elements=1000))
    payload[-200:] = bytes(200)
    rows = base[:1000].copy()
    codec.apply(payload, rows, stop=1000)
    assert np.array_equal(rows, new[:1000])


def test_threads_change_nothing():
    base, new = update(100_000, 1e-6)
    alone = codec.encode(base, new, block_elements=1 << 12)
    assert codec.encode(base, new, block_elements=1 << 12, threads=3) == alone
    codec.apply(alone, base, threads=3)
    assert np.array_equal(base, new)


def test_there_and_back_again():
    base, new = update(50_000, 1e-6)
    there, back, held = codec.encode(base, new), codec.encode(new, base), base.copy()
    for payload, expected in [(there, new), (back, base), (there, new), (back, base)]:
        codec.apply(payload, held)
        assert np.array_equal(held, expected)


def test_real_floats_and_shapes_are_taken_as_they_are():
    base = weights(600).reshape(20, 30)
    new = base + weights(600, 1).reshape(20, 30) * np.float32(1e-3)
    for kind in (np.float32, np.float16):
        old, now = base.astype(kind), new.astype(kind)
        payload = codec.encode(old, now)
        codec.apply(payload, old)
        assert old.tobytes() == now.tobytes()
        assert codec.describe(payload).element_type.name == {2: "FP16", 4: "FP32"}[old.itemsize]


def test_nothing_at_all_is_a_payload_too():
    empty = np.empty(0, np.uint16)
    payload = codec.encode(empty, empty)
    codec.apply(payload, empty)
    told = codec.describe(payload)
    assert (told.elements, told.kind, told.blocks_by_mode, len(payload)) == (0, Kind.DELTA, {}, HEADER.size)


def test_contexts_are_smaller_and_need_whole_blocks():
    base, new = update(1 << 17, 1.2e-6)
    plain = codec.encode(base, new, block_elements=1 << 16)
    payload = codec.encode(base, new, block_elements=1 << 16, contexts=True)
    assert codec.describe(payload).blocks_by_mode == {Mode.CONTEXT: 2}
    assert len(payload) < 0.85 * len(plain)
    with pytest.raises(CodecError, match="cut block 1"):
        codec.apply(payload, base[:70_000].copy(), stop=70_000)
    rows = base[1 << 16 :].copy()
    codec.apply(payload, rows, start=1 << 16)
    assert np.array_equal(rows, new[1 << 16 :])
    codec.apply(payload, base)
    assert np.array_equal(base, new)


def test_an_element_that_changes_class_is_still_found():
    """Classes are those of the base: the elements that change here all leave theirs, in place."""
    draw = np.random.default_rng(0)
    classes = draw.choice(3, 20_000, p=[0.1, 0.3, 0.6])
    patterns = np.array([0x3000, 0x3800, 0x4000], np.uint16)
    is_moved = draw.random(20_000) < np.array([0.3, 0.1, 0.05])[classes]
    base, new = patterns[classes], patterns[(classes + is_moved) % 3]
    for blocks in (None, ReferenceBlocks):
        held = base.copy()
        payload = codec.encode(base, new, contexts=True, blocks=blocks)
        codec.apply(payload, held, blocks=blocks)
        assert np.array_equal(held, new)
        assert codec.describe(payload).blocks_by_mode == {Mode.CONTEXT: 1}


def test_anchors_are_a_third_smaller_and_need_no_base():
    new = to_bf16(weights(100_000))
    payload = codec.encode_full(new)
    found = np.full_like(new, 0xFFFF)
    codec.apply(payload, found)
    assert np.array_equal(found, new)
    assert len(payload) < 0.7 * new.nbytes and codec.describe(payload).kind == Kind.FULL


@pytest.mark.parametrize("story, call, words", [
    ("shapes", lambda a: codec.encode(a, a[:5]), "shape"),
    ("same size, other shape", lambda a: codec.encode(a, a.reshape(2, 5)), "shape"),
    ("types", lambda a: codec.encode(a, a.astype(np.uint32)), "uint16"),
    ("integers", lambda a: codec.encode(a.astype(np.int64), a.astype(np.int64)), "int64"),
    ("stride", lambda a: codec.encode(a[::2], a[::2]), "one piece"),
    ("no block", lambda a: codec.encode(a, a, block_elements=0), "blocks of 0"),
    ("huge block", lambda a: codec.encode(a, a, block_elements=1 << 25), "blocks of"),
    ("destination too small", lambda a: codec.apply(codec.encode(a, a), a[:5]), "destination of 5"),
    ("destination of another type", lambda a: codec.apply(codec.encode(a, a), a.astype(np.uint32)), "uint32"),
    ("destination in pieces", lambda a: codec.apply(codec.encode(a, a), np.zeros(20, np.uint16)[::2]), "one piece"),
    ("destination is constant", lambda a: codec.apply(codec.encode(a, a), np.frombuffer(bytes(20), "<u2")), "written"),
    ("range", lambda a: codec.apply(codec.encode(a, a), a, start=-1, stop=9), "-1 to 9"),
    ("range", lambda a: codec.apply(codec.encode(a, a), a, start=2, stop=12), "2 to 12"),
    ("empty", lambda a: codec.apply(b"", a), "header"),
    ("foreign", lambda a: codec.apply(b"PK" * 100, a), "mark"),
])  # fmt: skip
def test_bad_input_is_told(story, call, words):
    with pytest.raises(CodecError, match=words) as caught:
        call(np.arange(10, dtype=np.uint16))
    assert isinstance(caught.value, RoseError)


@pytest.mark.parametrize("place, value, words", [
    (4, 2, "version 2"),
    (5, 7, "kind 7"),
    (6, 9, "type 9"),
    (7, 1, "version"),
    (8, 11, "destination|blocks end|too short"),
    (15, 0x80, "too short"),
    (18, 0, "blocks of 0"),
    (23, 0x90, "unknown mode"),
])  # fmt: skip
def test_a_changed_header_is_refused(place, value, words):
    base = np.arange(300, dtype=np.uint16)
    payload = bytearray(codec.encode(base, base + np.uint16(1)))
    payload[place] = value
    with pytest.raises(CodecError, match=words):
        codec.apply(payload, base)


def test_a_full_payload_may_not_need_a_base():
    base = np.arange(300, dtype=np.uint16)
    payload = bytearray(codec.encode(base, base + np.uint16(1)))
    payload[5] = Kind.FULL
    with pytest.raises(CodecError, match="needs a base"):
        codec.describe(payload)


def test_the_bytes_are_those_of_version_1():
    """What is on relays and disks stays readable: these bytes were written by the first version."""
    base = np.arange(0, 6400, 64, dtype=np.uint16)
    new = base.copy()
    new[[3, 40, 41, 99]] += np.array([1, 2, 65535, 1000], np.uint16)
    payload = codec.encode(base, new)
    assert payload.hex() == GOLDEN
    codec.apply(payload, base)
    assert np.array_equal(base, new)


GOLDEN = "524f5357010001006400000000000000000010000d0000100400000002d84580afc9afa003"
