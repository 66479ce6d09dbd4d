"""The shares of the ranks add up to what one rank computes: loss, figures and gradient, whatever the loss.

The ranks are played one after the other in this process, each with the whole weights; what they exchange is summed.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.ranked_trainer import drawn_groups

from rose.models.presets import write_preset
from rose.train.losses import LOSSES, LossSums
from rose.train.policy_model import CausalModel, use_threads
from rose.train.sharded_step import ShardedTrainer
from rose.train.step import Trainer
from rose.train.train_settings import LossSettings, TrainSettings


class OneOfSeveral:
    """A rank whose exchanges return its own values, and nothing from the others."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def all_values(self, values: list[float]) -> list[list[float]]:
        return [values]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    use_threads(1)
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m")


def computed(trainer: Trainer, groups: Any) -> tuple[LossSums, torch.Tensor]:
    samples, _ = trainer._samples(groups)
    batches = trainer._micro_batches([sample for sample in samples if sample.advantage])
    sums = trainer._accumulate(batches, None, None)
    gradients = [weight.grad.flatten() for weight in trainer.model.parameters() if weight.grad is not None]
    return sums, torch.cat(gradients)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("ranks", [2, 3, 40])
def test_the_shares_of_the_ranks_add_up(folder, name, ranks):
    settings = TrainSettings(rows_max=3, loss=LossSettings(name=name))
    groups = drawn_groups(1)
    whole, gradient = computed(Trainer(CausalModel.load(folder), settings), groups)
    total, parts = LossSums(), torch.zeros_like(gradient)
    for rank in range(ranks):
        some: Any = OneOfSeveral(rank, ranks)
        sums, part = computed(ShardedTrainer(CausalModel.load(folder), settings, some), groups)
        total.add(sums)
        parts += part
    for field in fields(LossSums):
        if field.name != "computed_tokens":  # padding depends on what is computed together
            assert getattr(total, field.name) == pytest.approx(getattr(whole, field.name), rel=1e-5, abs=1e-6)
    assert (parts - gradient).norm() <= 1e-5 * gradient.norm()


def test_all_ranks_compute_as_many_micro_batches(folder):
    settings = TrainSettings(rows_max=2)
    model, groups = CausalModel.load(folder), drawn_groups(2)
    counts = set()
    for rank in range(5):
        some: Any = OneOfSeveral(rank, 5)
        trainer = ShardedTrainer(model, settings, some)
        counts.add(len(trainer._micro_batches(trainer._samples(groups)[0])))
    assert len(counts) == 1
