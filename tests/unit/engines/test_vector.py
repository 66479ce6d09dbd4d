"""The vector loops of norm, activation and softmax against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from rose.engines.embedded.vector import exp_and_sum, rms_norm, silu_multiply


@njit
def softmax_weights(x: Any, out: Any, scale: float) -> float:
    return exp_and_sum(x.ctypes.data, out.ctypes.data, x.shape[0], np.float32(scale))


@njit
def silu(gate: Any, up: Any, out: Any) -> None:
    silu_multiply(gate.ctypes.data, up.ctypes.data, out.ctypes.data, gate.shape[0])


@njit
def norm(x: Any, gain: Any, out: Any, scale: Any) -> None:
    rms_norm(x.ctypes.data, gain.ctypes.data, out.ctypes.data, x.shape[0], scale.ctypes.data)


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
