"""Latency models that have learnt a made-up device: any formula from a step's shape to seconds."""

from __future__ import annotations

import random
from collections.abc import Callable

from rose.core.facts import StepFeatures
from rose.core.latency import LatencyModel

Cost = Callable[[StepFeatures], float]

DECODES = [(1, context, batch) for batch in (1, 2, 4, 8, 16, 32, 64) for context in (16, 128, 1024)]
CHUNKS = [(chunk, context, 1) for chunk in (16, 64, 256, 512) for context in (0, 128, 1024)]
PROMPTS = [(512 // batch, 0, batch) for batch in (4, 16)]


def shape(new_tokens: int, context_tokens: int, batch: int) -> StepFeatures:
    by_context = new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2
    return StepFeatures(new_tokens * batch, (new_tokens + context_tokens) * batch, by_context * batch, batch)


def learnt(cost: Cost, noise: float = 0.0, seed: int = 0) -> LatencyModel:
    """As a device does at its start: time steps of many shapes, and fit."""
    chance, model = random.Random(seed), LatencyModel()
    steps = [shape(*sizes) for sizes in 5 * (DECODES + CHUNKS + PROMPTS)]
    model.fit([(features, cost(features) * chance.lognormvariate(0, noise)) for features in steps])
    assert model.is_calibrated
    return model
