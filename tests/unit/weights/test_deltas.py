"""Whole arrays: any bits come back, any range can be decoded, and bad input is refused with a reason."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from tests.unit.codec_reference import reference_blocks

from rose.errors import RoseError
from rose.models.tensors import to_bf16
from rose.weights import codec
from rose.weights.codec import CodecError, ElementType, Kind

BOTH = pytest.mark.parametrize("coder", [nullcontext, reference_blocks], ids=["kernels", "reference"])


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
def test_every_pattern_reaches_every_other(coder, element_type, patterns):
    every = np.array(patterns, element_type.storage)
    base, new = np.repeat(every, len(every)), np.tile(every, len(every))
    with coder():
        for payload in (
            codec.encode(base, new, element_type=element_type),
            codec.encode_full(new, element_type=element_type),
        ):
            found = base.copy()
            codec.apply(payload, found)
            assert found.tobytes() == new.tobytes()


def test_all_sixteen_bit_steps():
    """Every bit pattern once, moved by every possible distance from a few places."""
    for start in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        base, new = np.full(1 << 16, start, np.uint16), np.arange(1 << 16, dtype=np.uint16)
        found = base.copy()
        codec.apply(codec.encode(base, new), found)
        assert np.array_equal(found, new)


@BOTH
@pytest.mark.parametrize(
    "start, stop", [(0, 0), (0, 1), (0, 3000), (999, 1001), (1000, 2000), (1234, 1235), (2500, 3000)]
)
@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1.0])
def test_a_row_range_is_decoded_alone(coder, noise, start, stop):
    base, new = update(3000, noise)
    for payload in (codec.encode(base, new, block_elements=1000), codec.encode_full(new, block_elements=1000)):
        rows = base[start:stop].copy()
        with coder():
            codec.apply(payload, rows, start=start, stop=stop)
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
