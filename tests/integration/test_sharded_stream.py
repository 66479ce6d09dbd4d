"""A model that FSDP2 shards over two processes is published whole by one of them, and no rank waits for another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.integration import devices

from rose.models.presets import write_preset
from rose.models.tensors import open_tensors, write_tensors
from rose.weights.manifest import folder_hash

RANKS = 2


@pytest.mark.timeout(360)
def test_what_rank_0_publishes_is_the_whole_model_and_an_error_blocks_no_rank(tmp_path: Path) -> None:
    model = write_preset("frozenlake-1m", tmp_path / "frozenlake-1m", seed=0)
    environment = devices.environment() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "USE_LIBUV": "0"}
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.sharded_stream",
                str(rank),
                str(RANKS),
                str(model),
                str(tmp_path),
            ],
            cwd=devices.ROOT,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0] * RANKS, "\n".join(errors for _, errors in said)[-4000:]
    norm = open_tensors(model).float32("model.norm.weight")
    expected = [
        hash_with(model, tmp_path / str(number), weight) for number, weight in enumerate((norm * 0.5, norm * 0 + 1))
    ]
    assert said[0][0].split()[-3:] == [expected[0], "refused", expected[1]]


def hash_with(model: Path, folder: Path, norm: np.ndarray) -> str:
    """Return the hash of the model with another last norm."""
    shutil.copytree(model, folder)
    tensors = open_tensors(model)
    arrays = {name: tensors.float32(name) for name in tensors.names()} | {"model.norm.weight": norm}
    write_tensors(folder / "model.safetensors", arrays)
    return folder_hash(folder)
