"""Latency models of simulated devices, calibrated as a real device calibrates itself at its start.

A device times steps of many shapes and fits its model. Here any formula from a step's shape to seconds takes the place
of the timing. Calibration of a shipped profile is cached, and every caller gets a copy, because models go on learning.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from rose.core.facts import StepFeatures
from rose.core.latency import LatencyModel
from rose.engines.profiles import StepProfile, load_profile

Cost = Callable[[StepFeatures], float]

SERVING_SLOWER, ROLLOUT_SLOWER = 40.0, 100.0  # fewer and longer steps show the same interleavings in less time
_COSTS = (
    "fixed_s", "per_new_token_s", "per_kv_read_token_s", "per_new_by_context_s", "per_sequence_s", "weights_read_s",
    "per_new_token_exchange_s",
)  # fmt: skip


def step_shape(new_tokens: int, context_tokens: int, batch: int) -> StepFeatures:
    """Return the features of a step in which `batch` sequences compute `new_tokens` each."""
    by_context = new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2
    return StepFeatures(new_tokens * batch, (new_tokens + context_tokens) * batch, by_context * batch, batch)


DECODES = [step_shape(1, context, batch) for batch in (1, 2, 4, 8, 16, 32, 64) for context in (16, 128, 1024)]
CHUNKS = [step_shape(chunk, context, 1) for chunk in (16, 64, 256, 512) for context in (0, 128, 1024)]
PROMPTS = [step_shape(512 // batch, 0, batch) for batch in (4, 16)]
SHAPES = (*DECODES, *CHUNKS, *PROMPTS)


def calibrated_model(
    cost: Cost, noise: float = 0.0, seed: int = 0, shapes: Sequence[StepFeatures] = SHAPES
) -> LatencyModel:
    """Return a model fitted to five noisy timings of every shape."""
    chance, model = random.Random(seed), LatencyModel()
    model.fit([(features, cost(features) * chance.lognormvariate(0, noise)) for _ in range(5) for features in shapes])
    assert model.is_calibrated
    return model


@cache
def slowed(name: str, factor: float) -> StepProfile:
    """Return a shipped profile with every cost multiplied by `factor`."""
    profile = load_profile(name)
    return replace(profile, **{cost: factor * getattr(profile, cost) for cost in _COSTS})


def model_of(name: str, factor: float = 1.0, noise: float = 0.0) -> LatencyModel:
    """Return a model of its own that is calibrated to the slowed profile."""
    return copy.deepcopy(_calibrated(name, factor, noise))


@cache
def _calibrated(name: str, factor: float, noise: float) -> LatencyModel:
    return calibrated_model(slowed(name, factor).step_s, noise)
