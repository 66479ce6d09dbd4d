"""Folders of received weights: those of living processes stay, wherever the process lives; those of dead ones go."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.weights.test_reading import running

from rose.run.local import LocalRun
from rose.weights import weight_buffers
from rose.weights.shards import Tensor
from rose.weights.weight_buffers import (
    FOLDER_VARIABLE,
    PREFIX,
    Prefault,
    arrays_in_folder,
    arrays_in_memory,
    private_folder,
    remove_folder,
    steps,
    sweep,
    touch,
)

HOLDER = """
import sys, time
from pathlib import Path
from rose.weights.weight_buffers import private_folder
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
    assert not folder.exists() and folder not in weight_buffers._locks


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
    monkeypatch.setattr(weight_buffers.os, "geteuid", lambda: other)
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
    asyncio.run(LocalRun.close(stage))  # type: ignore[arg-type]
    assert not folder.exists()


def test_touching_stops_when_it_is_left_and_not_later(monkeypatch):
    def until_stopped(address: int, size_bytes: int) -> bool:
        begun.set()
        ended.append(entered._is_stopping.wait(timeout=30))
        return True

    begun, ended = threading.Event(), []
    monkeypatch.setattr(weight_buffers, "PREFAULT_BYTES_MIN", 0)
    monkeypatch.setattr(weight_buffers, "touch", until_stopped)
    entered = Prefault([np.zeros(16 << 20, np.uint16)])
    with entered:
        assert begun.wait(timeout=30)
    assert ended == [True] and not running()


def test_pages_are_taken_from_the_last_to_the_first_and_all_of_them():
    arrays = [np.zeros(size, np.uint8) for size in (10 << 20, 100, 5000, 9 << 20)]
    found = list(steps(arrays))
    assert all(start % 4096 == size % 4096 == 0 and 0 < size <= weight_buffers.STEP_BYTES for start, size in found)
    for array in arrays:
        begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
        mine = [(start, start + size) for start, size in found if begin <= start < end]
        assert mine == sorted(mine, reverse=True) and all(stop <= end for _, stop in mine)
        assert array.nbytes - sum(stop - start for start, stop in mine) < 2 * 4096
    last = arrays[-1].ctypes.data
    assert last <= found[0][0] < last + arrays[-1].nbytes


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_touched_pages_are_there_and_nothing_is_changed(tmp_path, place):
    local = [Tensor("weights", (8 << 20,))]
    array = (arrays_in_memory(local) if place == "memory" else arrays_in_folder(local, tmp_path))["weights"]
    array[:100] = 7
    if not all(touch(*step) for step in steps([array])):
        pytest.skip("this system cannot take pages before they are written: Linux 5.14 can")
    assert array[:100].tolist() == [7] * 100 and not array[100:].any()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array[::1024] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 16


def test_touching_while_somebody_writes_changes_nothing(monkeypatch):
    monkeypatch.setattr(weight_buffers, "PREFAULT_BYTES_MIN", 0)
    array = np.zeros(16 << 20, np.uint16)
    with Prefault([array]):
        for start in range(0, len(array), 1 << 16):
            array[start : start + (1 << 16)] = start >> 16
    assert np.array_equal(array, np.repeat(np.arange(256, dtype=np.uint16), 1 << 16))


def test_a_system_that_cannot_is_no_error(monkeypatch):
    monkeypatch.setattr(weight_buffers, "PREFAULT_BYTES_MIN", 0)
    monkeypatch.setattr(weight_buffers, "_madvise", None)
    with Prefault([np.zeros(8 << 20, np.uint16)]) as entered:
        assert entered is not None
    assert touch(0, 4096) is False
