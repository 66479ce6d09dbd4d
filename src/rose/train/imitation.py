"""Learning what an expert says: games of an expert in tokens, and the loss of saying something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as functional

from rose.core.trajectory import Trajectory
from rose.train.batch import Sample, micro_batches
from rose.train.model import CausalModel
from rose.train.recipes import Recipe
from rose.train.step import ADAM_BETAS

TOKENS_MAX = 8192  # of a micro-batch, padding included


@dataclass(frozen=True, slots=True)
class Game:
    """A game of the expert. Of each of its own tokens: what it thought best there, and whether that was a choice.

    Where it chose, it may have done something else, at random.
    """

    trajectory: Trajectory
    best_ids: tuple[int, ...]
    is_choice: tuple[bool, ...]


def imitate(model: CausalModel, games: Sequence[Game], recipe: Recipe, action_ids: Sequence[int]) -> float:
    """Learn the expert's words; returns the last loss, in nats per token."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    loss_value = float("nan")
    for update, batch in enumerate(_shuffled_batches(games, recipe), start=1):
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, update / recipe.warm_up_updates)
        optimiser.zero_grad()
        loss_value = _accumulate(model, batch, recipe.noise, action_ids)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm_max)
        optimiser.step()
    return loss_value


def _accumulate(model: CausalModel, games: Sequence[Game], noise: float, action_ids: Sequence[int]) -> float:
    """The gradient of the mean loss per token; halves of a batch, sorted by length, are padded less than the whole."""
    ordered = sorted(games, key=lambda game: len(game.trajectory.token_ids))
    tokens = sum(len(game.best_ids) for game in games)
    half = -(-len(games) // 2)
    total = 0.0
    for part in (ordered[:half], ordered[half:]):
        [batch] = micro_batches([Sample(game.trajectory, 0.0, 0.0) for game in part], len(part), TOKENS_MAX)
        expected = functional.log_softmax(model.logits(batch.token_ids, batch.scored), dim=-1)
        best_ids = torch.tensor([token for game in part for token in game.best_ids])
        is_choice = torch.tensor([choice for game in part for choice in game.is_choice])
        best = expected.gather(1, best_ids[:, None]).squeeze(1)
        at_random = expected[:, list(action_ids)].mean(1)
        loss = -torch.where(is_choice, (1 - noise) * best + noise * at_random, best).sum() / tokens
        loss.backward()
        total += float(loss.detach())
    return total


def _shuffled_batches(games: Sequence[Game], recipe: Recipe) -> Iterator[list[Game]]:
    """Batches of every epoch. They mix lengths: short games are mostly lost ones, and a batch of those misleads."""
    for epoch in range(recipe.epochs):
        order = np.random.default_rng((recipe.seed, epoch)).permutation(len(games))
        for start in range(0, len(order) - recipe.rows + 1, recipe.rows):
            yield [games[index] for index in order[start : start + recipe.rows]]
