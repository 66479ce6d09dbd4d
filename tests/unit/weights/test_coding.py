"""The codec of the chain behind its seam."""

from __future__ import annotations

import numpy as np
import pytest

from rose.errors import RequestRefused
from rose.weights.coding import BITS, SparseCodec, check_same

CODEC = SparseCodec()


def numbers(dtype: str, seed: int, count: int = 5000) -> np.ndarray:
    kind = BITS[dtype]
    return np.random.default_rng(seed).integers(0, np.iinfo(kind).max, count, dtype=kind, endpoint=True)


@pytest.mark.parametrize("dtype", BITS)
def test_a_delta_turns_the_base_into_the_new_numbers(dtype):
    base = numbers(dtype, 1)
    new = base.copy()
    new[::50] = numbers(dtype, 2)[::50]
    payload = CODEC.encode(base, new, dtype)
    destination = base.copy()
    CODEC.apply(payload, destination)
    assert np.array_equal(destination, new) and len(payload) < base.nbytes / 4


@pytest.mark.parametrize("dtype", BITS)
def test_a_full_payload_needs_no_base(dtype):
    new, destination = numbers(dtype, 3), numbers(dtype, 4)
    CODEC.apply(CODEC.encode_full(new, dtype), destination)
    assert np.array_equal(destination, new)


def test_weights_of_another_codec_are_refused_with_both_names():
    check_same(CODEC, CODEC.name)
    with pytest.raises(RequestRefused, match=r"`dense-9`.*`sparse-1`"):
        check_same(CODEC, "dense-9")
