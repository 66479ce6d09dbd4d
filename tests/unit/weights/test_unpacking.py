"""Whatever happens to the bytes of a payload, decoding ends and touches nothing but the destination."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.weights.test_deltas import update

from rose.weights import codec
from rose.weights.codec import CodecError

GUARD = 4096
NOISES = {"sparse": 1e-6, "dense": 1e-4, "packed": 1.0}


def try_to_apply(payload: bytes, base: np.ndarray) -> np.ndarray | None:
    """The elements, or None if the payload was refused; the guards around them are looked at in both cases."""
    memory = np.full(len(base) + 2 * GUARD, 0xABCD, base.dtype)
    inside = memory[GUARD : GUARD + len(base)]
    inside[:] = base
    try:
        codec.apply(payload, inside)
    except CodecError:
        inside = None
    assert np.all(memory[:GUARD] == 0xABCD) and np.all(memory[-GUARD:] == 0xABCD)
    return inside


@pytest.mark.parametrize("contexts", [False, True], ids=["plain", "contexts"])
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
def test_every_flipped_bit(noise, contexts):
    base, new = update(240, noise)
    payload = codec.encode(base, new, block_elements=90, contexts=contexts)
    unharmed = 0
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        found = try_to_apply(bytes(damaged), base)
        unharmed += found is not None and np.array_equal(found, new)
    assert unharmed <= 8 * 4, "more than the padding of three blocks and the element type was ignored"


@pytest.mark.parametrize("contexts", [False, True], ids=["plain", "contexts"])
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
def test_every_truncation_is_refused(noise, contexts):
    base, new = update(400, noise)
    payload = codec.encode(base, new, block_elements=150, contexts=contexts)
    kept = [size for size in range(len(payload)) if try_to_apply(payload[:size], base) is not None]
    assert kept == []
    assert try_to_apply(payload + b"\0", base) is None
