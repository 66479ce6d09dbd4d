"""The vector kernels against numpy in float64, at every tile and every tail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from rose.engines.embedded import kernels as k
from rose.engines.embedded.runner import share_out
from rose.engines.embedded.vector import call_at, exp_and_sum, rms_norm, silu_multiply


@njit
def product(address: int, bf16: int, a: Any, w: Any, size: int, panels: int, start: Any, stride: int, c: Any) -> None:
    call_at(address, bf16, a.ctypes.data, a.strides[0], a.shape[0], w.ctypes.data, size, panels, start.ctypes.data,
            stride, c.ctypes.data, c.strides[0], 0)  # fmt: skip


@njit
def softmax_weights(x: Any, out: Any, scale: float) -> float:
    return exp_and_sum(x.ctypes.data, out.ctypes.data, x.shape[0], np.float32(scale))


@njit
def silu(gate: Any, up: Any, out: Any) -> None:
    silu_multiply(gate.ctypes.data, up.ctypes.data, out.ctypes.data, gate.shape[0])


@njit
def norm(x: Any, gain: Any, out: Any, scale: Any) -> None:
    rms_norm(x.ctypes.data, gain.ctypes.data, out.ctypes.data, x.shape[0], scale.ctypes.data)


def bf16_valued(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def panels_of(weight: np.ndarray[Any, Any], bf16: bool) -> np.ndarray[Any, Any]:
    """(out, in) to panels of sixteen columns, as rose.engines.embedded.weights does."""
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


def test_exponentials_are_close_and_masked_ones_are_exactly_zero() -> None:
    x = np.linspace(-86, 0, 4096, dtype=np.float32)
    out = np.zeros_like(x)
    total = softmax_weights(x, out, 1.0)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(out / exact - 1).max() < 3e-7
    assert total == pytest.approx(exact.sum(), rel=1e-6)
    x[5:] = -3.0e38
    softmax_weights(x, out, 0.125)
    assert (out[5:] == 0).all() and (out[:5] > 0).all()


def test_zeros_behind_a_row_do_not_change_its_sum() -> None:
    x = np.random.default_rng(0).standard_normal(64, dtype=np.float32)
    longer = np.full(640, -3.0e38, np.float32)
    longer[:64] = x
    assert softmax_weights(x, np.zeros_like(x), 0.3) == softmax_weights(longer, np.zeros_like(longer), 0.3)


def test_silu_and_norm() -> None:
    rng = np.random.default_rng(0)
    gate, up = rng.standard_normal((2, 160)).astype(np.float32) * 8
    out = np.zeros_like(gate)
    silu(gate, up, out)
    assert np.abs(out - gate / (1 + np.exp(-gate.astype(np.float64))) * up).max() < 1e-4
    x, gain = rng.standard_normal((2, 160)).astype(np.float32)
    norm(x, gain, out, np.array([1 / 160, 1e-6], np.float32))
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-6) * gain
    assert np.abs(out - exact).max() < 1e-5


@pytest.mark.parametrize("rows", [[1], [1] * 16, [500], [1, 500], [3, 3, 3], [200, 1, 1, 200], [7, 1000, 2]])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_shares_cover_every_row_once_in_order(rows: list[int], threads: int) -> None:
    first = np.cumsum([0, *rows[:-1]])
    segments = np.array([[a, n, 10 * i, i] for i, (a, n) in enumerate(zip(first, rows, strict=True))], np.int64)
    shares = share_out(segments, threads)
    covered = [
        (int(row), int(position) + int(row) - int(start), int(slot))
        for part in shares.parts
        for start, count, position, slot in part.segments
        for row in range(int(start), int(start) + int(count))
    ]
    wanted = [
        (int(row), 10 * i + int(row) - int(a), i)
        for i, (a, n) in enumerate(zip(first, rows, strict=True))
        for row in range(int(a), int(a) + n)
    ]
    assert covered == wanted
    slots = [{int(s[3]) for s in part.segments} for part in shares.parts]
    assert shares.whole == (sum(map(len, slots)) == len(set().union(*slots)))
    assert sum(part.rows for part in shares.parts) == sum(rows)
