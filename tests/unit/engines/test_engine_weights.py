"""Packed weights: aligned, in bf16 exactly when that loses nothing, and finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rose.engines.embedded import engine_kernels as k
from rose.engines.embedded.engine_weights import ALIGNMENT_BYTES, PackedWeights, aligned_floats, pack, pad16
from rose.errors import ModelError
from rose.models.model_spec import ModelSpec
from rose.models.presets import PRESETS, preset_spec, random_weights
from rose.models.tensors import MemoryTensors, from_bf16, to_bf16

SPEC = replace(preset_spec(PRESETS["frozenlake-1m"]), layers=1, hidden=40, ffn=20, heads=2, head_size=12)
GATE = "model.layers.0.mlp.gate_proj.weight"
Arrays = dict[str, np.ndarray[Any, Any]]


def bf16_valued(spec: ModelSpec = SPEC) -> Arrays:
    return {name: from_bf16(to_bf16(array)) for name, array in random_weights(spec, "plain", "test").items()}


def packed(arrays: Arrays, spec: ModelSpec = SPEC) -> PackedWeights:
    return pack(spec, MemoryTensors(arrays), "7")


def test_weights_that_are_exactly_bf16_take_half_the_memory() -> None:
    halves, arrays = packed(bf16_valued()), bf16_valued()
    arrays[GATE] = arrays[GATE].astype(np.float32) + np.float32(1e-6)
    wholes = packed(arrays)
    assert halves.shape[k.BF16] and not wholes.shape[k.BF16]
    assert halves.embedding_bf16.nbytes * 2 == wholes.embedding_f32.nbytes
    assert halves.nbytes < 0.6 * wholes.nbytes and halves.version == "7"


def test_every_part_starts_on_a_cache_line() -> None:
    weights = packed(bf16_valued())
    assert weights.floats.ctypes.data % ALIGNMENT_BYTES == 0
    for offset in [*weights.table.reshape(-1).tolist(), *weights.tail.tolist()]:
        assert offset % ALIGNMENT_BYTES == 0 and 0 <= offset < weights.floats.nbytes


def test_sizes_are_padded_and_the_padding_is_zero() -> None:
    weights = packed(bf16_valued())
    shape = weights.shape
    assert (shape[k.HIDDEN], shape[k.FFN], shape[k.HEAD], shape[k.HEAD_REAL]) == (48, 32, 16, 12)
    assert weights.embedding_bf16.shape == (SPEC.vocabulary, 48) and not weights.embedding_bf16[:, 40:].any()
    norm = weights.floats[weights.tail[k.FINAL_NORM] // 4 :][:48]
    assert norm.tolist() == [1.0] * 40 + [0.0] * 8


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", [GATE, "model.norm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("is_bf16", [True, False])
def test_numbers_that_are_not_finite_are_refused(name: str, value: float, is_bf16: bool) -> None:
    arrays = bf16_valued()
    if not is_bf16:
        arrays[GATE] = arrays[GATE] + np.float32(1e-6)
    arrays[name] = arrays[name].copy()
    arrays[name].flat[-1] = value
    with pytest.raises(ModelError, match=f"{name} in memory holds numbers that are not finite"):
        packed(arrays)


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ModelError, match=r"config\.json implies"):
        packed(bf16_valued(), replace(SPEC, hidden=56))


def test_released_weights_hold_nothing_but_keep_their_shape() -> None:
    weights = packed(bf16_valued())
    emptied = weights.emptied()
    assert emptied.nbytes == 0 and emptied.version == "7" and np.array_equal(emptied.shape, weights.shape)
    assert weights.nbytes > 0


@pytest.mark.parametrize("count", [1, 17, 4096])
def test_aligned_floats_are_zeros_on_a_cache_line(count: int) -> None:
    floats = aligned_floats(count)
    assert floats.shape == (count,) and not floats.any() and floats.ctypes.data % ALIGNMENT_BYTES == 0
    assert [pad16(size) for size in (1, 16, 17)] == [16, 16, 32]
