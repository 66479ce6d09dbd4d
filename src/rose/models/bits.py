"""bf16 in numpy, which has no such type: the upper half of a float32, held as uint16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HALF_ULP = np.uint32(0x7FFF)
QUIET = np.uint16(0x0040)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to the nearest bf16, ties to even; not-a-number stays not-a-number."""
    whole = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    upper = (whole >> np.uint32(16)).astype(np.uint16)
    rounded = ((whole + (HALF_ULP + (whole >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), upper | QUIET, rounded)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The exact float32 of each bf16."""
    whole = bits.astype(np.uint32)
    whole <<= np.uint32(16)
    return whole.view(np.float32)


def is_bf16_valued(values: NDArray[np.float32]) -> bool:
    """Whether every number is exactly a bf16."""
    return not np.any(np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF))
