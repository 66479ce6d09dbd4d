"""The encoder picks the smallest mode."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.weights.test_deltas import update

from rose.weights import codec
from rose.weights.codec import Mode
from rose.weights.codec.format import ENTRY_BYTES, HEADER


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
