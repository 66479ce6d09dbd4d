"""Registry entries of devices: as long as their service, and without tokens from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.device.device_registry import DeviceEntry, devices_folder, registered_device, running_devices
from rose.openai.service_registry import registered

ENTRY = DeviceEntry(1, "m", "r", "http://127.0.0.1:1", "http://127.0.0.1:2", "the-owners-token", "the-rollout-token")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ROSE_OWNER_TOKEN", raising=False)
    monkeypatch.delenv("ROSE_ROLLOUT_TOKEN", raising=False)
    return tmp_path


def test_an_entry_is_there_as_long_as_its_service() -> None:
    with registered_device(ENTRY):
        assert running_devices() == [ENTRY]
    assert running_devices() == [] and not list(devices_folder().iterdir())


@pytest.mark.parametrize("variable, kept", [("ROSE_OWNER_TOKEN", "rollout"), ("ROSE_ROLLOUT_TOKEN", "owner")])
def test_a_token_from_the_environment_is_not_written(variable: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "given-by-somebody")
    with registered_device(ENTRY):
        [found] = running_devices()
    assert {"owner": found.owner_token, "rollout": found.rollout_token} == {
        "owner": "the-owners-token" if kept == "owner" else "",
        "rollout": "the-rollout-token" if kept == "rollout" else "",
    }


def test_an_unreadable_entry_is_skipped() -> None:
    with registered(devices_folder(), b'{"process_id": 1'), registered(devices_folder(), b'{"process_id": "\xff"}'):
        assert running_devices() == []
