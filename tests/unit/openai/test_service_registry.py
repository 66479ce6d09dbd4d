"""Registry entries of devices: private, without tokens that were given, and swept when their service is gone."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rose.device.device_registry import DeviceEntry, devices_folder, registered_device, running_devices
from rose.openai import service_registry as registry
from rose.openai.service_registry import entries, registered

CARD = DeviceEntry(1, "m", "r", "http://127.0.0.1:1", "http://127.0.0.1:2", "the-owners-token", "the-rollout-token")
HOLDER = """
import sys, time
from pathlib import Path
from rose.openai.service_registry import registered
with registered(Path(sys.argv[1]), b"entry"):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ROSE_OWNER_TOKEN", raising=False)
    monkeypatch.delenv("ROSE_ROLLOUT_TOKEN", raising=False)
    return tmp_path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_its_user_can_read_an_entry() -> None:
    before = os.umask(0)
    try:
        with registered_device(CARD):
            [path] = devices_folder().glob("*.json")
            assert mode_of(path) == 0o600
            assert mode_of(devices_folder()) == 0o700
    finally:
        os.umask(before)


def test_an_entry_of_a_killed_service_is_removed(tmp_path: Path) -> None:
    place = tmp_path / "kind"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(place)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
    with registered(place, b"another"):
        assert sorted(entries(place)) == [b"another", b"entry"]
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
        assert entries(place) == [b"another"]
        assert len(list(place.iterdir())) == 1


def test_an_entry_whose_process_id_lives_again_is_removed(tmp_path: Path) -> None:
    place = tmp_path / "kind"
    place.mkdir()
    (place / f"{os.getppid()}-0.json").write_bytes(b"left over")
    assert entries(place) == [] and not list(place.iterdir())


def test_an_entry_that_is_swept_before_it_is_locked_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = registry.write_private

    def swept_once(path: Path, content: bytes) -> None:
        write(path, content)
        written.append(path)
        if len(written) == 1:
            assert entries(path.parent) == []

    monkeypatch.setattr(registry, "write_private", swept_once)
    with registered(tmp_path / "kind", b"entry"):
        assert entries(tmp_path / "kind") == [b"entry"]
    assert len(written) == 2


def test_a_cache_that_cannot_be_written_is_no_reason_not_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with registered_device(CARD):
        assert running_devices() == []
