"""The compiled coder and the reference give the same verdict and the same elements on any body."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.codec_reference import ReferenceBlocks, split_body

from rose.weights.codec import ElementType, Mode
from rose.weights.codec.codec_kernels import KernelBlocks
from rose.weights.codec.format import CLASSES, CONTEXT_HEAD_BYTES


def random_body(draw: np.random.Generator, mode: Mode, elements: int) -> bytes:
    """Random bytes behind a head that is mostly plausible, so that the decoder does not stop at once."""
    body = draw.integers(0, 256, int(draw.integers(0, 60))).astype(np.uint8)
    if draw.random() < 0.3:
        body = body[:0]
    if mode == Mode.SPARSE and len(body) >= 5:
        body[:4] = np.frombuffer(int(draw.integers(0, min(elements, 9) + 1)).to_bytes(4, "little"), np.uint8)
        body[4] = draw.choice([0, 1, 3, 64, 128, 192])
    if mode == Mode.CONTEXT and len(body) >= CONTEXT_HEAD_BYTES:
        left = len(body) - CONTEXT_HEAD_BYTES
        sizes = [left // 2, 0, left - left // 2] if draw.random() < 0.8 else [left, left, 3]
        body[0], body[CLASSES:CONTEXT_HEAD_BYTES] = CLASSES, np.array(sizes, "<u4").view(np.uint8)
        if draw.random() < 0.5:
            body[1:CLASSES] &= 31
        for at in (CONTEXT_HEAD_BYTES, CONTEXT_HEAD_BYTES + left // 2):
            body[at : at + 5] = np.array([1, 0, 0, 0, 0], np.uint8)[: len(body) - at]
    if mode == Mode.BITMAP and len(body):
        body[0] = draw.choice([0, 1, 2])
        body[1 : 1 + (elements + 7) // 8] &= 0x11
    return body.tobytes()


def random_split(draw: np.random.Generator, elements: int) -> bytes:
    """What an encoder wrote, with a byte or two changed, some left out, or none."""
    exponents = draw.integers(0, int(draw.choice([1, 3, 256])), elements)
    body = bytearray(split_body((exponents << 7 | draw.integers(0, 128, elements)).tolist()))
    for _ in range(int(draw.integers(0, 3))):
        body[int(draw.integers(0, len(body)))] = int(draw.integers(0, 256))
    return bytes(body[: len(body) if draw.random() < 0.8 else int(draw.integers(0, len(body)))])


@pytest.mark.parametrize("element_type", ElementType)
@pytest.mark.parametrize("mode", Mode)
def test_random_bodies_get_the_same_verdict_from_both(mode, element_type):
    draw = np.random.default_rng([mode, element_type])
    fast, slow = KernelBlocks(element_type, 0), ReferenceBlocks(element_type)
    verdicts = set()
    for _ in range(150):
        elements = int(draw.integers(1, 200))
        first = int(draw.integers(0, elements))
        last = int(draw.choice([elements, draw.integers(first, elements) + 1]))
        if mode == Mode.CONTEXT:
            first, last = 0, elements
        body = random_split(draw, elements) if mode == Mode.SPLIT else random_body(draw, mode, elements)
        base = draw.integers(0, 1 << element_type.bits, last - first).astype(element_type.storage)
        left, right = base.copy(), base.copy()
        verdict = fast.apply(mode, body, left, elements, first)
        assert verdict == slow.apply(mode, body, right, elements, first)
        assert not verdict or np.array_equal(left, right)
        verdicts.add(verdict)
    never_fits = mode in (Mode.FULL, Mode.CONTEXT) or (mode == Mode.SPLIT and element_type != ElementType.BF16)
    assert True in verdicts or never_fits, "no random body was ever accepted: the test does not reach far"
