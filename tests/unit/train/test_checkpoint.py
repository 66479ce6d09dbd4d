"""Checkpoints: whole or not there, read back as they were meant, and a job goes on from one as if never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.unit.train.test_step import GROUP

from rose.config.server_settings import EngineSettings
from rose.engines.embedded.engine import EmbeddedEngine
from rose.errors import ModelError, Unavailable
from rose.models.presets import write_preset
from rose.train import checkpoint
from rose.train.checkpoint import export_model, load_checkpoint, save_checkpoint
from rose.train.policy_model import CausalModel, use_threads
from rose.train.step import Trainer
from rose.train.train_settings import TrainSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    use_threads(1)
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m")


def trained(folder: Path, steps: int) -> Trainer:
    trainer = Trainer(CausalModel.load(folder))
    for _ in range(steps):
        trainer.learn([GROUP])
    return trainer


def test_a_job_goes_on_as_if_never_stopped(folder, tmp_path):
    first = trained(folder, 3)
    save_checkpoint(first, folder, tmp_path / "step-3", {"next_group": 24})
    second = Trainer(CausalModel.load(folder))
    assert load_checkpoint(second, tmp_path / "step-3") == {"next_group": 24}
    assert second.step == 3 and list(second.spikes.norms) == list(first.spikes.norms)
    for trainer in (first, second):
        trainer.learn([GROUP])
    for name, weight in first.model.weights.items():
        assert torch.equal(weight, second.model.weights[name])


def test_a_starved_job_goes_back_as_far_as_if_never_stopped(folder, tmp_path):
    """To the weights before its last healthy batch, which lie before the checkpoint."""
    settings = TrainSettings(starved_steps_max=2)
    first = Trainer(CausalModel.load(folder), settings)
    for groups in ([GROUP], [GROUP], []):
        first.learn(groups)
    save_checkpoint(first, folder, tmp_path / "step-3")
    second = Trainer(CausalModel.load(folder), settings)
    load_checkpoint(second, tmp_path / "step-3")
    assert [trainer.learn([]).verdict for trainer in (first, second)] == ["rolled_back", "rolled_back"]
    for trainer in (first, second):
        trainer.learn([GROUP])
    for name, weight in first.model.weights.items():
        assert torch.equal(weight, second.model.weights[name])


def test_engines_load_a_checkpoint(folder, tmp_path):
    trainer = trained(folder, 1)
    out = save_checkpoint(trainer, folder, tmp_path / "step-1")
    EmbeddedEngine.load(out, EngineSettings(kv_memory_mb=64))
    served = CausalModel.load(out)
    for name, weight in trainer.model.weights.items():
        assert torch.equal(served.weights[name], weight.detach().to(torch.bfloat16).float())


def test_before_the_first_update_there_is_nothing_to_forget(folder, tmp_path):
    save_checkpoint(Trainer(CausalModel.load(folder)), folder, tmp_path / "step-0")
    again = trained(folder, 2)
    assert load_checkpoint(again, tmp_path / "step-0") == {}
    assert again.step == 0 and again.moments() == {}


def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path):
    out = save_checkpoint(trained(folder, 1), folder, tmp_path / "step-1")
    other = Trainer(CausalModel.load(write_preset("qwen3-3m", tmp_path / "other")))
    with pytest.raises(ModelError, match=r"shape|does not have"):
        load_checkpoint(other, out)


def test_what_reads_back_differently_never_gets_its_name(folder, tmp_path, monkeypatch):
    def spoiling(path, arrays, dtype="bf16", metadata=None):
        spoiled = {name: array + 1.0 if name == "model.norm.weight" else array for name, array in arrays.items()}
        checkpoint_write(path, spoiled, dtype, metadata)

    checkpoint_write = checkpoint.write_tensors
    monkeypatch.setattr(checkpoint, "write_tensors", spoiling)
    with pytest.raises(Unavailable, match=r"model.norm.weight reads back .* as something else"):
        export_model(CausalModel.load(folder), folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "spoiled, word",
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "reads back from .* as something else"),
        (lambda data: data[:-4], "cannot be read back"),
    ],
)
def test_a_state_that_reads_back_differently_never_gets_its_name(folder, tmp_path, monkeypatch, spoiled, word):
    """Nothing but a resume would notice: engines do not read it, and its digest is taken of what is in the file."""

    def spoiling(path, arrays, dtype="bf16", metadata=None):
        checkpoint_write(path, arrays, dtype, metadata)
        if path.name == "state.safetensors":
            path.write_bytes(spoiled(path.read_bytes()))

    checkpoint_write = checkpoint.write_tensors
    monkeypatch.setattr(checkpoint, "write_tensors", spoiling)
    with pytest.raises(Unavailable, match=word):
        save_checkpoint(trained(folder, 1), folder, tmp_path / "step-1")
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import resource, signal, sys
from rose.errors import Unavailable
from rose.train.checkpoint import save_checkpoint
from rose.train.policy_model import CausalModel
from rose.train.step import Trainer
trainer = Trainer(CausalModel.load(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    save_checkpoint(trainer, sys.argv[1], sys.argv[2])
except Unavailable as error:
    print(error)
"""


def test_a_full_disk_leaves_nothing_behind(folder, tmp_path):
    """A limit on file sizes stands for a full disk: the write fails half-way."""
    out = tmp_path / "checkpoints" / "step-1"
    found = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(folder), str(out)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "cannot be written: File too large" in found.stdout and "free some space" in found.stdout
    assert list(out.parent.iterdir()) == []


def test_a_name_that_is_taken_is_not_written_over(folder, tmp_path):
    out = save_checkpoint(trained(folder, 1), folder, tmp_path / "step-1")
    before = json.loads((out / "trainer" / "state.json").read_text())
    with pytest.raises(Unavailable, match="cannot be written"):
        save_checkpoint(trained(folder, 2), folder, out)
    assert json.loads((out / "trainer" / "state.json").read_text()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
