"""Changes coded by the magnitude of their base."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from tests.unit.codec_reference import reference_blocks
from tests.unit.weights.test_deltas import update

from rose.weights import codec
from rose.weights.codec import CodecError, Mode


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
    for coder in (nullcontext, reference_blocks):
        held = base.copy()
        with coder():
            payload = codec.encode(base, new, contexts=True)
            codec.apply(payload, held)
        assert np.array_equal(held, new)
        assert codec.describe(payload).blocks_by_mode == {Mode.CONTEXT: 1}
