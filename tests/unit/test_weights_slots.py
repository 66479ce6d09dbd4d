"""Folders of received weights: those of living processes stay, wherever the process lives; those of dead ones go."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose.launch.local import _Stage
from rose.weights import slots
from rose.weights.slots import FOLDER_VARIABLE, PREFIX, private_folder, remove_folder, sweep

HOLDER = """
import sys, time
from pathlib import Path
from rose.weights.slots import private_folder
folder = private_folder(Path(sys.argv[1]))
(folder / "model.safetensors").write_bytes(b"weights")
print(folder, flush=True)
time.sleep(600)
"""


def start_holder(parent: Path, *before: str) -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder of its own, and that folder."""
    command = [*before, sys.executable, "-c", HOLDER, str(parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def left_folder(parent: Path) -> Path:
    """A folder as a killed process leaves it."""
    folder = parent / f"{PREFIX}.{os.geteuid()}.left"
    folder.mkdir(mode=0o700)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_private_folder_is_closed_to_others_and_removed_with_its_lock(tmp_path: Path) -> None:
    folder = private_folder(tmp_path)
    assert folder.is_dir() and folder.stat().st_mode & 0o077 == 0 and private_folder(tmp_path) != folder
    assert sweep(tmp_path) == [], "the folders of this process are in use"
    remove_folder(folder)
    assert not folder.exists() and folder not in slots._locks


def test_weights_of_a_living_process_stay_and_those_of_a_killed_one_go(tmp_path: Path) -> None:
    process, folder = start_holder(tmp_path)
    try:
        private_folder(tmp_path)
        assert (folder / "model.safetensors").exists(), "its process lives"
    finally:
        kill(process)
    private_folder(tmp_path)
    assert not folder.exists()


def test_weights_of_a_living_process_in_another_pid_namespace_stay(tmp_path: Path) -> None:
    """Its process id is free here, as it is in another container that shares /dev/shm."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("this user may not make PID namespaces")
    process, folder = start_holder(tmp_path, unshare, "--pid", "--fork", "--kill-child")
    try:
        assert sweep(tmp_path) == [] and (folder / "model.safetensors").exists()
    finally:
        kill(process)


def test_a_link_to_a_folder_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{PREFIX}.{os.geteuid()}.link").symlink_to(tmp_path / "elsewhere")
    assert sweep(tmp_path) == [] and (tmp_path / "elsewhere").is_dir()


def test_a_folder_of_another_user_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = left_folder(tmp_path)
    other = os.geteuid() + 1
    named_as_ours = theirs.rename(tmp_path / f"{PREFIX}.{other}.left")
    assert sweep(tmp_path) == [] and named_as_ours.exists(), "another user's by its name"
    monkeypatch.setattr(slots.os, "geteuid", lambda: other)
    assert sweep(tmp_path) == [] and named_as_ours.exists(), "another user's by its owner"


async def _nothing() -> None:
    pass


def test_a_run_removes_the_weights_that_its_killed_devices_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    folder = left_folder(tmp_path)
    part = SimpleNamespace(close=_nothing)
    stage = SimpleNamespace(_screen=SimpleNamespace(live=SimpleNamespace()), processes=part, _learner=part)
    asyncio.run(_Stage.close(stage))  # type: ignore[arg-type]
    assert not folder.exists()
