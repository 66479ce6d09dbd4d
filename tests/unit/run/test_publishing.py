"""A trainer that is killed while it publishes: workers keep what they had, and whoever goes on is not in its way."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose.run.publishing import Publishing
from rose.run.run_folder import RunFolder
from rose.run.run_settings import RunSettings, load_run_settings
from rose.weights.keys import read_key
from rose.weights.manifest import Fenced
from rose.weights.reading import ChainReader
from rose.weights.relay.filesystem import FilesystemRelay

KILLED = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace

import torch

from rose.run.publishing import Publishing
from rose.run.run_settings import WeightsSettings
from rose.weights.relay.filesystem import FilesystemRelay

path, at_put = Path(sys.argv[1]), int(sys.argv[2])
put_new, puts = FilesystemRelay.put_new, 0

def half(buffers):
    for buffer in buffers:
        yield memoryview(buffer).cast("B")[: memoryview(buffer).nbytes // 2]
        os.kill(os.getpid(), signal.SIGKILL)

def dying(self, key, buffers):
    global puts
    puts += is_armed
    return put_new(self, key, half(buffers) if puts == at_put else buffers)

FilesystemRelay.put_new = dying
is_armed = False
weights = {"a": torch.zeros(4096)}
publishing = Publishing(WeightsSettings(), SimpleNamespace(name="it", path=path, weights=path / "weights"))
publishing.open()
publishing.begin(weights)
weights["a"] += 1
publishing.publish(1)
print("version 1 is out", flush=True)
is_armed = True
weights["a"] += 1
publishing.publish(2)
"""


@pytest.mark.parametrize("at_put", [1, 2], ids=["in its first bucket", "in its manifest"])
def test_killed_while_publishing(tmp_path: Path, at_put: int) -> None:
    settings = replace(load_run_settings(), runs=str(tmp_path), name="it")
    folder = RunFolder(settings)
    resumed = Publishing(settings.weights, folder)  # makes the secret that both use
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder.path), str(at_put)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "version 1 is out\n"), done.stderr
    secret = (folder.path / "weights.secret").read_text().strip().encode()
    reader = ChainReader(FilesystemRelay(str(folder.weights)), run="it", secret=secret)
    before = reader.refresh()
    assert before is not None and before.version == 1, "half a version is none"
    weights = {"a": torch.ones(4096)}  # as the checkpoint of version 1 has them
    resumed.open()
    again = resumed.begin(weights, 1, before.epoch)
    assert reader.refresh() == again.version and again.version.epoch > before.epoch
    weights["a"] += 1
    assert resumed.publish(2).kind == "delta"
    newest = reader.refresh()
    assert newest is not None and (newest.version, newest.epoch) == (2, again.version.epoch)
    resumed.close()
    folder.close()


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    return replace(load_run_settings(), runs=str(tmp_path), name="it")


@pytest.fixture
def folder(settings: RunSettings) -> Iterator[RunFolder]:
    made = RunFolder(settings)
    yield made
    made.close()


def test_the_secret_of_the_weights_stays_the_same(folder, settings, monkeypatch):
    for variable in ("ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"):
        monkeypatch.delenv(variable, raising=False)
    first, again = (Publishing(settings.weights, folder).variables for _ in range(2))
    kept = (folder.path / "weights.secret").read_bytes().strip()
    assert first == again and first["ROSE_RELAY_SECRET"] == read_key(kept).text() and len(kept) == 64


def test_workers_see_only_what_is_published_after_a_resume(folder, settings):
    """The trainer before was killed in version 2; the checkpoint is that of version 1."""
    weights = {"a": torch.zeros(64)}
    killed, resumed = (Publishing(settings.weights, folder) for _ in range(2))
    killed.open()
    before = killed.begin(weights)
    for version in (1, 2):
        weights["a"] += 1
        killed.publish(version)
    weights["a"] -= 1
    resumed.open()
    again = resumed.begin(weights, 1, before.version.epoch)
    assert again.version.version == 1 and again.version.epoch > before.version.epoch and again.kind == "anchor"
    secret = (folder.path / "weights.secret").read_text().strip().encode()
    reader = ChainReader(FilesystemRelay(str(folder.weights)), run="it", secret=secret)
    assert reader.refresh() == again.version and reader.versions() == [again.version]
    with pytest.raises(Fenced, match="another trainer has taken over"):
        killed.publish(3)
    weights["a"] += 1
    assert resumed.publish(2).kind == "delta"
    for publishing in (killed, resumed):
        publishing.close()
