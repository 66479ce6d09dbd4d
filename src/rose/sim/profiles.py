"""The shipped step profiles, slowed down: fewer and longer steps show the same meetings in less time."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

from rose.core.latency import LatencyModel
from rose.engines.profiles import StepProfile, load_profile
from rose.sim.models import learnt

SERVING_SLOWER, ROLLOUT_SLOWER = 40.0, 100.0
_COSTS = (
    "fixed_s",
    "per_new_token_s",
    "per_kv_read_token_s",
    "per_new_by_context_s",
    "per_sequence_s",
    "weights_read_s",
    "per_new_token_exchange_s",
)


@cache
def slowed(name: str, factor: float) -> StepProfile:
    profile = load_profile(name)
    return replace(profile, **{cost: factor * getattr(profile, cost) for cost in _COSTS})


def model_of(name: str, factor: float, noise: float) -> LatencyModel:
    """A latency model that has learnt this profile; everybody gets their own."""
    return copy.deepcopy(_learnt(name, factor, noise))


@cache
def _learnt(name: str, factor: float, noise: float) -> LatencyModel:
    return learnt(slowed(name, factor).step_s, noise)
