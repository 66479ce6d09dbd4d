"""Random weights that are the same bits everywhere.

Every tensor draws from a Philox stream of its own, keyed by its name. Raw bits become near-normal numbers by
integer sums and one product, so neither numpy's version nor the machine's mathematics can change a bit.

There are two scales. `plain` is what the families were trained from; a tied model of that scale repeats its last
token for ever, which exercises nothing. `lively` weighs context over the last token, so that an untrained
model gives varied tokens with clear winners; it is for models that are served and measured, not trained.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rose.models.spec import ModelSpec
from rose.models.tensors import Shape, expected_tensors

Scale = Literal["plain", "lively"]

PLAIN_STD = 0.02
LIVELY_GAIN = 2.0
"""At 1, greedy text falls into a loop within ten tokens; at 2 it stays varied and float32 still agrees to 1e-4."""

FOUR_UNIFORMS_MEAN = 2 * 65535
FOUR_UNIFORMS_STD = math.sqrt((65536**2 - 1) / 3)


def random_weights(spec: ModelSpec, scale: Scale, salt: str) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a model; norms are one. The salt names the stream: other salt, other numbers."""
    return {
        name: _random_tensor(f"{salt}/{name}", shape, _std(spec, scale, name, shape))
        for name, shape in expected_tensors(spec).items()
    }


def _std(spec: ModelSpec, scale: Scale, name: str, shape: Shape) -> float:
    """0 for a norm. What adds to the residual stream is scaled down by the number of additions."""
    if "norm" in name:
        return 0.0
    depth = math.sqrt(2 * spec.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
    if scale == "plain":
        return PLAIN_STD / depth
    gain = 1.0 if "embed" in name or "bias" in name else LIVELY_GAIN
    return gain / math.sqrt(shape[-1]) / depth


def _random_tensor(key: str, shape: Shape, std: float) -> NDArray[np.float32]:
    if std == 0.0:
        return np.ones(shape, dtype=np.float32)
    digest = hashlib.sha256(key.encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(math.prod(shape))
    sums = np.full(raw.shape, -FOUR_UNIFORMS_MEAN, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        sums += (raw >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.int64)
    return (sums * (std / FOUR_UNIFORMS_STD)).astype(np.float32).reshape(shape)
