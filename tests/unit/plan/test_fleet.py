"""The fleet of a plan: what fits, and the words for what does not."""

from __future__ import annotations

import pytest
from tests.unit.plan_world import small_fleet

from rose.engines.profiles import load_profile, write_profile
from rose.errors import ConfigError
from rose.plan.fleet import FleetInputs, fleet_of, inputs_of


def test_the_defaults_are_the_set_up_of_the_paper() -> None:
    fleet = fleet_of(FleetInputs())
    assert (fleet.degree, fleet.replicas, fleet.dedicated, fleet.train_devices) == (4, 16, 4, 32)
    shipped = load_profile("h800-qwen2.5-32b")
    assert fleet.serving.per_new_token_s == shipped.per_new_token_s
    assert 0 < fleet.memory_bytes < shipped.kv_memory_bytes


def test_the_smallest_degree_that_holds_both_models_is_chosen() -> None:
    assert fleet_of(FleetInputs(devices="8xl40s", serving="qwen2.5-7b", rollout="qwen3-8b")).degree == 2
    assert small_fleet().degree == 1


def test_devices_beyond_whole_groups_are_told() -> None:
    fleet = fleet_of(FleetInputs(devices="7xh800", serving="qwen2.5-32b:tp4", dedicated=6))
    assert fleet.devices == 4 and fleet.dedicated == 1 and len(fleet.notes) == 2


def test_a_single_device_is_a_fleet() -> None:
    assert fleet_of(FleetInputs(devices="h20", serving="qwen2.5-7b", rollout="qwen3-8b")).replicas == 1


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"devices": "64 h800"}, "names no devices"),
        ({"devices": "0xh800"}, "0 devices cannot"),
        ({"devices": "64xb900"}, "there is no device `b900`"),
        ({"devices": "2xh800", "serving": "qwen2.5-32b:tp4"}, "less than one group of 4"),
        ({"serving": "qwen2.5-33b"}, "did you mean qwen2.5-32b"),
        ({"serving": "qwen2.5-32b:4"}, "no tensor-parallel degree"),
        ({"serving": "qwen2.5-72b:tp1"}, r"65\.2 GiB to use; Qwen2\.5-72B takes 135\.4 GiB"),
        ({"serving": "qwen2.5-32b:tp4", "rollout": "qwen3-32b:tp2"}, "serving has tp4 and rollouts tp2"),
        ({"tpot_ms": 5.0}, r"--tpot-ms 5: a decode step takes 9\.2 ms"),
        ({"ttft_ms": 2.0}, "serving alone cannot meet --ttft-ms 2"),
    ],
)
def test_what_cannot_work_is_refused_with_the_figure(inputs: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fleet_of(FleetInputs(**inputs))


@pytest.mark.parametrize(
    "values", [{"dedicated": -1}, {"ttft_ms": 0.0}, {"tpot_ms": float("nan")}, {"devices": "x" * 99}]
)
def test_inputs_are_bounded(values: dict) -> None:
    with pytest.raises(ConfigError, match="this is no fleet"):
        inputs_of(**values)


def test_a_measured_profile_takes_the_place_of_the_roofline(tmp_path) -> None:
    write_profile(load_profile("h800-qwen2.5-7b"), tmp_path / "mine.json")
    fleet = fleet_of(
        FleetInputs(devices="2xh800", serving="qwen2.5-7b:tp1", rollout="qwen3-8b"), tmp_path / "mine.json"
    )
    assert fleet.serving.name == "h800-qwen2.5-7b"
