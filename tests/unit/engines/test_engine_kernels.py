"""The product of rows and weight panels against numpy in float64, at every tile and every tail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from rose.engines.embedded import engine_kernels as k
from rose.engines.embedded.vector import call_at


@njit
def product(address: int, bf16: int, a: Any, w: Any, size: int, panels: int, start: Any, stride: int, c: Any) -> None:
    call_at(address, bf16, a.ctypes.data, a.strides[0], a.shape[0], w.ctypes.data, size, panels, start.ctypes.data,
            stride, c.ctypes.data, c.strides[0], 0)  # fmt: skip


def bf16_valued(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def panels_of(weight: np.ndarray[Any, Any], bf16: bool) -> np.ndarray[Any, Any]:
    """(out, in) to panels of sixteen columns, as rose.engines.embedded.engine_weights does."""
    if bf16:
        weight = np.ascontiguousarray((weight.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint32)
    return np.ascontiguousarray(weight.reshape(-1, 16, weight.shape[1]).transpose(0, 2, 1))


@pytest.mark.parametrize("rows", [*range(1, 20), 64, 129, 300])
@pytest.mark.parametrize("size, columns", [(16, 16), (64, 112), (272, 80)])
def test_product_is_right_and_every_row_is_the_same_bits_alone(rows: int, size: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    a = rng.standard_normal((rows, size), dtype=np.float32)
    weight = bf16_valued(rng.standard_normal((columns, size)))
    bias = rng.standard_normal(columns, dtype=np.float32)
    results = []
    for bf16 in (True, False):
        c = np.zeros((rows, columns), np.float32)
        product(k.PRODUCT, int(bf16), a, panels_of(weight, bf16), size, columns // 16, bias, 0, c)
        results.append(c)
    exact = a.astype(np.float64) @ weight.T.astype(np.float64) + bias
    assert np.abs(results[0] - exact).max() < 1e-4
    assert np.array_equal(*results), "bf16 pairs and float32 must give the same bits"
    for row in {0, rows // 2, rows - 1}:
        alone = np.zeros((1, columns), np.float32)
        product(k.PRODUCT, 1, a[row : row + 1].copy(), panels_of(weight, True), size, columns // 16, bias, 0, alone)
        assert np.array_equal(alone[0], results[0][row])


def test_product_adds_in_place_when_it_starts_from_its_result() -> None:
    rng = np.random.default_rng(0)
    a, weight = rng.standard_normal((9, 32), dtype=np.float32), bf16_valued(rng.standard_normal((48, 32)))
    c = rng.standard_normal((9, 48), dtype=np.float32)
    exact = c + a @ weight.T
    product(k.PRODUCT, 1, a, panels_of(weight, True), 32, 3, c, c.strides[0], c)
    assert np.abs(c - exact).max() < 1e-4
