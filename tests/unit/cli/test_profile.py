"""`rose profile`: it reads the steps of a device and writes both profiles, or says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.unit.cli.test_lend import FakeDevice
from tests.unit.engines.test_recorded_steps import recorded

from rose.cli.main import main
from rose.engines.profiles import load_profile
from rose.engines.recorded_steps import RecordedSteps


@pytest.fixture(autouse=True)
def owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROSE_OWNER_TOKEN", "the-owners-token")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def body(steps: int = 600) -> object:
    return json.loads(msgspec.json.encode(RecordedSteps(recorded(steps=steps), recorded(steps=steps))))


def test_both_profiles_are_written_and_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = FakeDevice(body=body())
    paths = [tmp_path / name for name in ("serving.json", "rollout.json")]
    words = ["profile", "--url", device.url, "--record", str(paths[0]), "--rollout-record", str(paths[1])]
    assert main(words) == 0
    assert device.requests == [("GET", "/rose/steps", "Bearer the-owners-token", None)]
    for path in paths:
        profile = load_profile(path)
        assert profile.spread and "600 live steps" in profile.source["measured"] and "cores" in profile.what
    printed = capsys.readouterr()
    assert f"--profile {paths[0]} --rollout-profile {paths[1]}" in printed.out


@pytest.mark.parametrize(
    "words, why",
    [
        (["--record", "no/folder/a.json"], "cannot be written"),
        (["--record", "a.yaml"], "cannot be written"),
        (["--record", "a.json", "--seconds", "-1"], "seconds cannot be waited"),
        (["--record", "a.json", "--seconds", "nan"], "seconds cannot be waited"),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("steps, why", [(10, "too few for a profile")])
def test_a_device_without_traffic_has_no_profile(
    steps: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = FakeDevice(body=body(steps))
    assert main(["profile", "--url", device.url, "--record", str(tmp_path / "a.json")]) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "a.json").exists()


def test_what_is_no_record_of_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = FakeDevice(body={"steps": 1})
    assert main(["profile", "--url", device.url, "--record", str(tmp_path / "a.json")]) == 2
    assert "records other steps" in capsys.readouterr().err
