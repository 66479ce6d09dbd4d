"""Models that are modules compute what `CausalModel` computes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.unit.train.test_step import GROUP

from rose.errors import ConfigError
from rose.models.presets import write_preset
from rose.train import train_settings
from rose.train.module_model import ModuleModel, own_rows
from rose.train.policy_model import CausalModel, use_threads
from rose.train.step import Trainer
from rose.train.train_settings import TrainSettings

PRESETS = ("frozenlake-1m", "qwen3-3m")
CHANGES = [
    pytest.param({"model": "own", "gradient_checkpointing": True}, id="own-checkpointed"),
    pytest.param({"model": "hf"}, id="hf"),
    pytest.param({"model": "hf", "gradient_checkpointing": True}, id="hf-checkpointed"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    use_threads(1)
    place = tmp_path_factory.mktemp("models")
    return {preset: write_preset(preset, place / preset) for preset in PRESETS}


def sequences(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = random.Random(0)
    token_ids = torch.tensor([[dice.randrange(vocabulary) for _ in range(40)] for _ in range(3)])
    scored = torch.tensor([[at > 0 and dice.random() < 0.4 for at in range(40)] for _ in range(3)])
    return token_ids, scored


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("changes", CHANGES)
def test_logprobs_and_gradients_are_those_of_our_own_model(folders, preset, changes):
    ours, other = CausalModel.load(folders[preset]), ModuleModel(folders[preset], TrainSettings(**changes))
    assert list(other.weights) and other.weights.keys() == ours.weights.keys() and other.is_finite()
    token_ids, scored = sequences(ours.spec.vocabulary)
    found = []
    for model in (ours, other):
        logprobs, entropy = model.logprobs(token_ids, scored)
        logprobs.sum().backward()
        found.append((logprobs.detach(), entropy))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4 and (found[0][1] - found[1][1]).abs().max() < 1e-4
    for name, weight in ours.weights.items():
        gradient = other.weights[name].grad
        assert weight.grad is not None and gradient is not None
        assert (gradient - weight.grad).abs().max() <= 1e-4 * max(1.0, float(weight.grad.abs().max())), name


def test_bf16_computes_near_fp32_and_keeps_weights_in_fp32(folders):
    folder = folders["frozenlake-1m"]
    plain, rough = CausalModel.load(folder), ModuleModel(folder, TrainSettings(precision="bf16"))
    token_ids, scored = sequences(plain.spec.vocabulary)
    with torch.no_grad():
        gap = (plain.logprobs(token_ids, scored)[0] - rough.logprobs(token_ids, scored)[0]).abs()
    assert 0 < gap.max() < 0.1 and all(weight.dtype == torch.float32 for weight in rough.weights.values())


@pytest.mark.parametrize("model", ["own", "hf"])
def test_a_trainer_learns_the_same_from_a_module(folders, model):
    folder = folders["frozenlake-1m"]
    settings = TrainSettings(warm_up_steps=0, gradient_checkpointing=True, model=model)
    plain, other = Trainer(CausalModel.load(folder)), Trainer(ModuleModel(folder, settings), settings)
    plain.settings = settings
    one, two = plain.learn([GROUP]), other.learn([GROUP])
    assert (one.verdict, one.trained_tokens) == (two.verdict, two.trained_tokens) == ("updated", 7)
    assert two.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)


def test_a_frozen_copy_is_another_model_with_the_same_weights(folders):
    model = ModuleModel(folders["frozenlake-1m"], TrainSettings(gradient_checkpointing=True))
    with torch.no_grad():
        model.weights["model.norm.weight"].mul_(2)
    copy = model.frozen_copy()
    assert all(torch.equal(copy.weights[name], weight) for name, weight in model.weights.items())
    assert not any(weight.requires_grad for weight in copy.parameters())
    assert all(copy.weights[name] is not weight for name, weight in model.weights.items())


def test_rows_are_dealt_out_as_torch_chunks_them():
    for rows in (1, 3, 7, 12, 37):
        for ranks in (1, 2, 4, 5):
            chunks = torch.arange(rows).chunk(ranks)
            for rank in range(ranks):
                first, last = own_rows(rows, rank, ranks)
                assert list(range(first, last)) == (chunks[rank].tolist() if rank < len(chunks) else [])


def test_a_missing_gpu_and_missing_transformers_are_said_in_words(folders, monkeypatch):
    folder = folders["frozenlake-1m"]
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU here"):
            ModuleModel(folder, TrainSettings(device="cuda"))
    monkeypatch.setattr(train_settings, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="transformers is not installed"):
        train_settings.check_train(TrainSettings(model="hf"))
    train_settings.check_train(TrainSettings())
