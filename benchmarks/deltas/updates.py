"""Weight updates to measure codecs with: bf16 weights before and after one step of their fp32 masters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.models.tensors import to_bf16

CHUNK = 10_000_000
WEIGHT_SCALE = np.float32(0.02)

Bits = NDArray[np.uint16]


def synthetic(parameters: int, noise: float, seed: int) -> tuple[Bits, Bits]:
    """Normal weights of scale 0.02, each moved by a normal step of scale `noise`: independent, as no real step is."""
    base, new = np.empty(parameters, np.uint16), np.empty(parameters, np.uint16)
    draw = np.random.default_rng(seed)
    for first in range(0, parameters, CHUNK):
        size = min(CHUNK, parameters - first)
        masters = draw.standard_normal(size, dtype=np.float32) * WEIGHT_SCALE
        base[first : first + size] = to_bf16(masters)
        masters += draw.standard_normal(size, dtype=np.float32) * np.float32(noise)
        new[first : first + size] = to_bf16(masters)
    return base, new


def entropy_bits(counts: NDArray[Any]) -> float:
    """Of one draw, from how often each outcome was seen."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def bound_iid_bytes(base: Bits, new: Bits) -> float:
    """What positions and steps cost if they tell nothing about each other: (n h(p) + k H(step)) / 8.

    Steps are signed ULPs, taken as differences of bit patterns or in the order of floats, whichever is cheaper.
    """
    changed = np.flatnonzero(base != new)
    before, after = base[changed].astype(np.int64), new[changed].astype(np.int64)
    if not len(changed):
        return 0.0
    steps = [(after - before) % 65536, (_ordered(after) - _ordered(before)) % 65536]
    step_bits = min(entropy_bits(np.bincount(step)) for step in steps)
    position_bits = entropy_bits(np.array([len(changed), len(base) - len(changed)]))
    return (len(base) * position_bits + len(changed) * step_bits) / 8


def _ordered(bits: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(bits >= 0x8000, 0x8000 - bits, bits)
