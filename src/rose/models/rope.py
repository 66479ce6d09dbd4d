"""Rotary position embeddings (RoPE): reading a config's variant, and computing its frequencies.

The frequencies are fixed at start-up, so variants that depend on the running length of a sequence are refused. All
arithmetic is float32 in the order transformers uses: positions of some thousand tokens multiply every rounding error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from rose.errors import ModelError
from rose.models.files import Keys

RopeKind = Literal["default", "linear", "llama3", "yarn"]
KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
SUPPORTED = f"supported are {', '.join(KINDS)}"
LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of positions. Fields after `factor` matter to llama3 and yarn only."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_context_tokens: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_scaling: float = 1.0
    truncate: bool = True


def read_rope(config: Keys, max_context_tokens: int) -> Rope:
    """Return the RoPE of a config.json, old form (`rope_theta`, `rope_scaling`) or new (`rope_parameters`)."""
    scaling = config.inner("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    for keys in (config, scaling):
        if keys.number("partial_rotary_factor", 1.0) != 1.0:
            wrong = "is not 1: models that rotate part of a head are not supported"
            raise keys.complaint("partial_rotary_factor", wrong)
    kind = _read_kind(scaling)
    theta = scaling.number("rope_theta", config.number("rope_theta", 10_000.0), above=1.0)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope("linear", theta, scaling.number("factor"))
    fallback = scaling.whole("original_max_position_embeddings", max_context_tokens)
    original = config.whole("original_max_position_embeddings", fallback)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.complaint("high_freq_factor", f"must be above low_freq_factor ({low:g}), not {high:g}")
        return Rope("llama3", theta, scaling.number("factor"), original, low, high)
    return _read_yarn(scaling, theta, original, max_context_tokens)


def _read_kind(scaling: Keys) -> RopeKind:
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise ModelError(
            f"{scaling.file}: {scaling.prefix[:-1]} is given per layer type; one for all layers is supported"
        )
    key = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.text(key, "default")
    if kind in LENGTH_DEPENDENT:
        raise scaling.complaint(key, f"is {kind!r}, which depends on the running length; {SUPPORTED}")
    if kind not in KINDS:
        raise scaling.complaint(key, f"is {kind!r}, which is not known; {SUPPORTED}")
    return cast(RopeKind, kind)


def _read_yarn(scaling: Keys, theta: float, original: int, max_context_tokens: int) -> Rope:
    factor = scaling.number("factor", max_context_tokens / original)
    if "attention_factor" in scaling:
        attention = scaling.number("attention_factor")
    elif scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):
        over, under = scaling.number("mscale"), scaling.number("mscale_all_dim")
        attention = _yarn_scale(factor, over) / _yarn_scale(factor, under)
    else:
        attention = _yarn_scale(factor, 1.0)
    return Rope(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_scaling=attention,
        truncate=scaling.flag("truncate", True),
    )


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_frequencies(rope: Rope, head_size: int) -> tuple[NDArray[np.float32], float]:
    """Return the radians per position of each half-head dimension, and the factor on cosine and sine."""
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    periods = np.power(np.float32(rope.theta), exponents)
    plain = np.float32(1) / periods
    if rope.kind == "linear":
        plain = plain / np.float32(rope.factor)
    elif rope.kind == "llama3":
        plain = _llama3(rope, plain)
    elif rope.kind == "yarn":
        plain = _yarn(rope, head_size, plain, np.float32(1) / (np.float32(rope.factor) * periods))
    return plain.astype(np.float32, copy=False), rope.attention_scaling


def _llama3(rope: Rope, plain: NDArray[np.float32]) -> NDArray[np.float32]:
    """Keep short waves, stretch long ones, blend the waves between."""
    low, high = np.float32(rope.low_frequency_factor), np.float32(rope.high_frequency_factor)
    original, factor = np.float32(rope.original_context_tokens), np.float32(rope.factor)
    waves = np.float32(2 * math.pi) / plain
    long_waves = waves > original / low
    short_waves = waves < original / high
    stretched = np.where(long_waves, plain / factor, plain)
    blend = (original / waves - low) / (high - low)
    blended = (np.float32(1) - blend) * stretched / factor + blend * stretched
    return np.where(long_waves | short_waves, stretched, blended)


def _yarn(
    rope: Rope, head_size: int, plain: NDArray[np.float32], stretched: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Keep dimensions that turn often, stretch dimensions that turn rarely, with a ramp between."""
    # The dimensions that make beta_fast and beta_slow turns over the original context.
    low, high = (
        head_size * math.log(rope.original_context_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    high = high + 0.001 if low == high else high
    dimensions = np.arange(head_size // 2, dtype=np.float32)
    ramp = np.clip((dimensions - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    keep = np.float32(1) - ramp
    return stretched * (np.float32(1) - keep) + plain * keep
