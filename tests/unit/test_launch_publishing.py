"""A trainer that is killed while it publishes: workers keep what they had, and whoever goes on is not in its way."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose.launch.folder import RunFolder
from rose.launch.publishing import Publishing
from rose.launch.settings import load_run_settings
from rose.weights.reading import ChainReader
from rose.weights.relay.filesystem import FilesystemRelay

KILLED = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace

import torch

from rose.launch.publishing import Publishing
from rose.launch.settings import WeightsSettings
from rose.weights.relay.filesystem import FilesystemRelay

path, at_put = Path(sys.argv[1]), int(sys.argv[2])
put_new, puts = FilesystemRelay.put_new, 0

def half(chunks):
    for chunk in chunks:
        yield memoryview(chunk).cast("B")[: memoryview(chunk).nbytes // 2]
        os.kill(os.getpid(), signal.SIGKILL)

def dying(self, key, chunks):
    global puts
    puts += is_armed
    return put_new(self, key, half(chunks) if puts == at_put else chunks)

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
