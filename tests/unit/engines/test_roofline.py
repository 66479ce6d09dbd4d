"""Profiles of accelerators by arithmetic."""

from __future__ import annotations

import pytest

from rose.engines.roofline import ACCELERATORS, MODELS, roofline
from rose.sim.models import step_shape


@pytest.mark.parametrize(
    "name, billions", [("qwen2.5-14b", 14.77), ("qwen2.5-72b", 72.7), ("qwen3-14b", 14.77), ("llama-3.1-8b", 8.03),
                       ("llama-3.1-70b", 70.55), ("qwen2.5-7b", 7.62), ("qwen3-32b", 32.76)],
)  # fmt: skip
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("device", ACCELERATORS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_on_every_device_has_plausible_costs(device: str, model: str) -> None:
    profile = roofline(ACCELERATORS[device], MODELS[model], 8)
    decode_s, prompt_s = (profile.step_s(step_shape(tokens, 0, 1)) for tokens in (1, 512))
    assert 0.001 < decode_s < prompt_s < 1.0
    assert "not measured" in profile.what and profile.kv_blocks > 0


def test_a_device_with_less_compute_takes_longer_for_a_prompt_and_not_for_a_token() -> None:
    h20, h800 = (roofline(ACCELERATORS[name], MODELS["qwen3-8b"], 1) for name in ("h20", "h800"))
    assert h20.step_s(step_shape(2048, 0, 1)) > 3 * h800.step_s(step_shape(2048, 0, 1))
    assert h20.step_s(step_shape(1, 2000, 1)) < h800.step_s(step_shape(1, 2000, 1))
