"""Losses, advantages and gradients against TRL's, for one batch of trajectories in turns.

TRL lives in an environment of its own (`make venv-trl`, or the interpreter that ROSE_TRL_PYTHON names). Both sides
begin with the same files: three models of one shape (what the job began with, the weights a batch was drawn under, the
ones they have become) and the same tokens. Nothing of theirs is typed again here: see trl_losses.py.

TRL has no like of a sequence that is left out by the geometric mean of its ratios; that is switched off.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rose.core.trajectory import Trajectory
from rose.models.presets import write_preset
from rose.train.batch import micro_batches
from rose.train.losses import LossSums
from rose.train.policy_model import CausalModel, use_threads
from rose.train.step import Trainer
from rose.train.train_settings import LossSettings, TrainSettings

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("ROSE_TRL_PYTHON", ROOT / ".venv-trl" / "bin" / "python"))
TIMEOUT_S = 600
GROUP_SIZE = 4
REWARDS = [1.0, 0.0, 0.4, -0.1, 0.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5]
"""Of three groups; in the last all went alike."""
PROMPT_TOKENS = [3, 5, 4]
TURNS = [[2], [3, 2], [1, 1, 4], [5], [2, 2], [6, 1], [3], [1, 2, 1, 3], [2], [4, 3], [1], [2, 5]]
"""Tokens that the model wrote in each turn of a trajectory; three of the environment's stand between two turns."""
ENVIRONMENT_TOKENS = 3
CHARACTERS = 90  # of the vocabulary; of special tokens the one that pads has no gradient in transformers
STEP_AWAY = {"reference": 0.03, "old": 0.0, "new": 0.02}
"""How far the weights of a model are from those that the batch was drawn under."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.skipif(not PYTHON.exists(), reason="TRL is not here: make venv-trl, or name it by ROSE_TRL_PYTHON"),
]


@dataclass(frozen=True, slots=True)
class Case:
    """The same loss in two languages. `is_corrected`: for what the engine said, which TRL does for vLLM's."""

    theirs: dict[str, Any]
    ours: LossSettings
    temperature: float = 1.0
    is_corrected: bool = False


def corrected(case: Case, limit: float) -> Case:
    theirs = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": limit}
    return replace(case, is_corrected=True, theirs=case.theirs | theirs, ours=replace(case.ours, importance_max=limit))


def near_the_reference(case: Case, beta: float, *, is_unbiased: bool = True) -> Case:
    theirs = {"beta": beta, "use_bias_correction_kl": is_unbiased}
    ours = replace(case.ours, kl_beta=beta, kl_is_unbiased=is_unbiased)
    return replace(case, theirs=case.theirs | theirs, ours=ours)


def at_temperature(case: Case, temperature: float) -> Case:
    return replace(case, theirs=case.theirs | {"temperature": temperature}, temperature=temperature)


KEEP_ALL = LossSettings(sequence_importance_max=0.0, stops_drifted=False)
GRPO = Case({"loss_type": "grpo", "epsilon": 0.2}, replace(KEEP_ALL, name="grpo", clip_low=0.2))
DAPO = Case(
    {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    replace(KEEP_ALL, name="dapo", clip_low=0.2, clip_high=0.28),
)
GSPO = Case(
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.05},
    replace(KEEP_ALL, name="gspo", sequence_clip_low=0.02, sequence_clip_high=0.05),
)
CISPO = Case({"loss_type": "cispo", "epsilon_high": 1.2}, replace(KEEP_ALL, name="cispo", weight_max=1.2))
LOSSES = {"grpo": GRPO, "dapo": DAPO, "gspo": GSPO, "cispo": CISPO}
CASES = {
    **LOSSES,
    **{f"{name}-kl": near_the_reference(case, 0.1) for name, case in LOSSES.items()},
    **{f"{name}-corrected": corrected(case, 1.1) for name, case in LOSSES.items()},
    "dapo-plain-kl": near_the_reference(DAPO, 0.1, is_unbiased=False),
    "dapo-hot": at_temperature(DAPO, 1.7),
    "grpo-all": at_temperature(near_the_reference(corrected(GRPO, 1.3), 0.02), 0.7),
}


@dataclass(frozen=True, slots=True)
class Batch:
    models: dict[str, Path]
    groups: list[list[Trajectory]]

    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    use_threads(1)
    folder = tmp_path_factory.mktemp("models")
    models = {name: write_preset("frozenlake-1m", folder / name) for name in STEP_AWAY}
    for seed, (name, model) in enumerate(models.items()):
        step_away(model, STEP_AWAY[name], seed)
    return Batch(models, draw_groups(CausalModel.load(models["old"])))


def step_away(model: Path, distance: float, seed: int) -> None:
    dice = np.random.default_rng(seed)
    weights = {
        name: weight + np.float32(distance) * dice.standard_normal(weight.shape, dtype=np.float32)
        for name, weight in CausalModel.load(model).arrays().items()
    }
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def draw_groups(model: CausalModel) -> list[list[Trajectory]]:
    """Drawn by dice alone; what the engine says of their tokens is near what the model does, and not the same."""
    dice = np.random.default_rng(7)
    found = [draw(number, turns, dice) for number, turns in enumerate(TURNS)]
    told = [told_by_engine(trajectory, model, dice) for trajectory in found]
    return [told[place : place + GROUP_SIZE] for place in range(0, len(told), GROUP_SIZE)]


def draw(number: int, turns: list[int], dice: np.random.Generator) -> Trajectory:
    mask = [False] * PROMPT_TOKENS[number // GROUP_SIZE]
    for place, tokens in enumerate(turns):
        mask += [False] * (ENVIRONMENT_TOKENS if place else 0) + [True] * tokens
    count = len(mask)
    token_ids = tuple(map(int, dice.integers(CHARACTERS, size=count)))
    return Trajectory(str(number), "", token_ids, tuple(mask), (0.0,) * count, ("",) * count, REWARDS[number])


def told_by_engine(trajectory: Trajectory, model: CausalModel, dice: np.random.Generator) -> Trajectory:
    with torch.no_grad():
        found = model.logprobs(torch.tensor([trajectory.token_ids]), torch.tensor([trajectory.loss_mask]))[0]
    told = iter((found.numpy() + 0.2 * dice.standard_normal(len(found))).tolist())
    logprobs = tuple(next(told) if is_own else 0.0 for is_own in trajectory.loss_mask)
    return replace(trajectory, logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class Theirs:
    loss: float
    advantages: list[float]
    gradients: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def theirs(batch: Batch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Theirs]:
    """Asked once for all cases: most of the time goes into importing TRL."""
    folder = tmp_path_factory.mktemp("trl")
    (folder / "request.json").write_text(json.dumps(request(batch)))
    command = [
        str(PYTHON),
        "-P",
        str(Path(__file__).with_name("trl_losses.py")),
        str(folder / "request.json"),
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = json.loads((folder / "losses.json").read_text())
    return {name: Theirs(**values, gradients=dict(np.load(folder / f"{name}.npz"))) for name, values in told.items()}


def request(batch: Batch) -> dict[str, Any]:
    """The prompt is what stands before the first token of the model's own; all that follows is TRL's completion."""
    rows = batch.trajectories()
    begins = [row.loss_mask.index(True) for row in rows]
    return {
        "models": {name: str(folder) for name, folder in batch.models.items()},
        "group_size": GROUP_SIZE,
        "rewards": REWARDS,
        "columns": ["prompt_ids", "completion_ids", "logprobs", "env_mask", "reward"],
        "prompt_ids": [row.token_ids[:begin] for row, begin in zip(rows, begins)],
        "completion_ids": [row.token_ids[begin:] for row, begin in zip(rows, begins)],
        "logprobs": [row.logprobs[begin:] for row, begin in zip(rows, begins)],
        "env_mask": [[int(is_own) for is_own in row.loss_mask[begin:]] for row, begin in zip(rows, begins)],
        "reward": REWARDS,
        "cases": {name: {"config": case.theirs, "is_corrected": case.is_corrected} for name, case in CASES.items()},
    }


@dataclass(frozen=True, slots=True)
class Ours:
    sums: LossSums
    advantages: list[float]
    gradients: dict[str, np.ndarray]


def ours(batch: Batch, case: Case) -> Ours:
    """By the trainer's own steps, in micro-batches of three rows."""
    settings = TrainSettings(loss=case.ours, temperature=case.temperature, rows_max=3)
    old, reference = (CausalModel.load(batch.models[name]) for name in ("old", "reference"))
    groups = batch.groups if case.is_corrected else [[agreed(row, old, case) for row in g] for g in batch.groups]
    trainer = Trainer(CausalModel.load(batch.models["new"]), settings, reference)
    samples, refused = trainer._samples(groups)
    assert refused == 0 and len(samples) == len(REWARDS)
    batches = micro_batches(samples, settings.rows_max, settings.tokens_max)
    kept = trainer._logprobs_of(reference, batches) if case.ours.kl_beta else None
    sums = trainer._accumulate(batches, trainer._logprobs_of(old, batches), kept)
    gradients = {name: weight.grad.numpy() for name, weight in trainer.model.weights.items()}
    return Ours(sums, [sample.advantage for sample in samples], gradients)


def agreed(trajectory: Trajectory, model: CausalModel, case: Case) -> Trajectory:
    """As if the engine had said what the trainer says: nothing to correct for."""
    ids, scored = torch.tensor([trajectory.token_ids]), torch.tensor([trajectory.loss_mask])
    with torch.no_grad():
        found = iter(model.logprobs(ids, scored, case.temperature)[0].tolist())
    return replace(trajectory, logprobs=tuple(next(found) if own else 0.0 for own in trajectory.loss_mask))


@pytest.mark.parametrize("name", CASES)
def test_the_same_batch_has_the_loss_and_the_gradient_that_trl_finds(batch, theirs, name):
    found, expected = ours(batch, CASES[name]), theirs[name]
    assert found.sums.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.gradients.keys() == expected.gradients.keys()
    for weight, gradient in expected.gradients.items():
        away = np.linalg.norm(found.gradients[weight] - gradient)
        assert away <= 1e-5 * np.linalg.norm(gradient), weight


def test_advantages_within_groups_are_those_of_trl(batch, theirs):
    found = ours(batch, DAPO).advantages
    assert found == pytest.approx(theirs["dapo"].advantages, abs=1e-6)
    assert found[:GROUP_SIZE] != [0.0] * GROUP_SIZE and found[-GROUP_SIZE:] == [0.0] * GROUP_SIZE


@pytest.mark.parametrize("name", LOSSES)
def test_the_batch_has_what_the_losses_differ_in(batch, name):
    """Tokens beyond the clipping range and tokens within, and ratios that are truncated: else nothing was compared."""
    found, tokens = ours(batch, CASES[f"{name}-corrected"]).sums, sum(map(sum, TURNS))
    assert found.trained_tokens == tokens
    assert 0 < found.clipped < tokens and 0 < found.truncated < tokens


def test_settings_that_are_asked_of_both_make_a_difference(theirs):
    assert len({round(found.loss, 6) for found in theirs.values()}) == len(CASES)
