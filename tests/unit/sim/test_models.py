"""Latency models of simulated devices."""

from __future__ import annotations

import pytest

from rose.engines.profiles import load_profile
from rose.sim.models import SHAPES, calibrated_model, model_of, slowed, step_shape


def test_step_shape_counts_all_sequences() -> None:
    features = step_shape(4, 10, batch=3)
    assert (features.new_tokens, features.kv_read_tokens, features.sequences) == (12, 42, 3)
    assert features.new_by_context == 3 * (4 * 10 + 10)


def test_a_calibrated_model_predicts_its_cost() -> None:
    profile = load_profile("cpu")
    model = calibrated_model(profile.step_s)
    for features in SHAPES:
        assert profile.step_s(features) <= model.upper(features) < 3 * profile.step_s(features)


def test_a_slowed_profile_takes_its_factor_longer() -> None:
    features = step_shape(1, 100, batch=2)
    assert slowed("cpu", 40.0).step_s(features) == pytest.approx(40 * load_profile("cpu").step_s(features))


def test_models_of_one_profile_learn_apart() -> None:
    features, one, other = step_shape(1, 100, batch=2), model_of("cpu"), model_of("cpu")
    before = other.upper(features)
    for _ in range(200):
        one.observe(features, 100 * before)
    one.refit()
    assert one.upper(features) > 2 * before and other.upper(features) == before
