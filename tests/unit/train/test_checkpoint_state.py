"""The manifest of a checkpoint notices every file that is not as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.train.test_step import GROUP

from rose.errors import ModelError
from rose.models.presets import write_preset
from rose.train.checkpoint import load_checkpoint, save_checkpoint
from rose.train.checkpoint_state import read_state
from rose.train.policy_model import CausalModel, use_threads
from rose.train.step import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    use_threads(1)
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m")


def trained(folder: Path, steps: int) -> Trainer:
    trainer = Trainer(CausalModel.load(folder))
    for _ in range(steps):
        trainer.learn([GROUP])
    return trainer


@pytest.mark.parametrize("file", ["model.safetensors", "trainer/state.json"])
def test_every_file_of_a_checkpoint_is_verified(folder, tmp_path, file):
    out = save_checkpoint(trained(folder, 1), folder, tmp_path / "step-1")
    read_state(out)
    data = (out / file).read_bytes()
    (out / file).write_bytes(data[:-9] + b"7" + data[-8:])
    with pytest.raises(ModelError):
        read_state(out)


def test_a_changed_state_is_refused(folder, tmp_path):
    out = save_checkpoint(trained(folder, 1), folder, tmp_path / "step-1")
    file = out / "trainer" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"not the file its state.json was written with"):
        load_checkpoint(Trainer(CausalModel.load(folder)), out)
    file.unlink()
    with pytest.raises(ModelError):
        load_checkpoint(Trainer(CausalModel.load(folder)), out)
