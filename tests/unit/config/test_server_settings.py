"""Settings of devices and of the gateway."""

from __future__ import annotations

import pytest

from rose.config import yaml_text as text
from rose.config.loading import known_keys, load_settings
from rose.config.server_settings import DeviceSettings, LendSettings, cores_of
from rose.core.slo import Budgets
from rose.errors import ConfigError


def test_every_setting_of_a_device_has_a_sentence_and_a_valid_default():
    from rose.config.schema import METADATA_KEY
    from rose.config.server_settings import EngineSettings, FrontSettings, RolloutFrontSettings

    for settings in (EngineSettings(), FrontSettings(), LendSettings(), RolloutFrontSettings(), DeviceSettings()):
        for name, described in type(settings).__dataclass_fields__.items():
            assert METADATA_KEY in described.metadata or name in ("engine", "front", "lend", "rollout")
    defaults = [text.as_override(key, _value(DeviceSettings(), key)) for key in known_keys(DeviceSettings)]
    assert load_settings(DeviceSettings, None, defaults) == DeviceSettings()


def _value(settings, dotted):
    for name in dotted.split("."):
        settings = getattr(settings, name)
    return settings


@pytest.mark.parametrize(
    "given, mode",
    [
        ({}, "idle"),
        ({"ttft_ms": 500.0}, "idle"),
        ({"ttft_ms": 500.0, "tpot_ms": 150.0}, "decode"),
        ({"mode": "idle", "ttft_ms": 500.0, "tpot_ms": 150.0}, "idle"),
        ({"mode": "decode", "ttft_ms": 500.0, "tpot_ms": 150.0}, "decode"),
        ({"mode": "paper"}, "paper"),
    ],
)
def test_a_device_lends_beside_serving_only_within_declared_budgets(given, mode):
    assert LendSettings(**given).chosen_mode == mode
    for lacking in ({}, {"ttft_ms": 500.0}, {"tpot_ms": 150.0}):
        with pytest.raises(ConfigError, match="--ttft-ms and --tpot-ms"):
            _ = LendSettings(mode="decode", **lacking).chosen_mode


def test_budgets_of_lending_are_those_declared():
    budgets = LendSettings(ttft_ms=250.0, tpot_ms=50.0, slack_share=0.5, answer_s=9.0, tpot="every_gap").budgets
    assert budgets == Budgets(0.25, 0.05, 0.5, 9.0, "every_gap")


@pytest.mark.parametrize(
    "device, cores", [("cpu:0", (0,)), ("cpu:0-1", (0, 1)), ("cpu:3,0-1", (3, 0, 1)), ("cpu:12-12", (12,))]
)
def test_cores_of_a_device(device, cores):
    assert cores_of(device) == cores


@pytest.mark.parametrize("device", ["", "cpu", "cpu:", "cpu:a", "cpu:1-0", "gpu:0", "cpu:0,", "cpu:-1", "cpu:0,0-1"])
def test_what_is_not_a_device(device):
    with pytest.raises(ConfigError, match="device"):
        cores_of(device)
