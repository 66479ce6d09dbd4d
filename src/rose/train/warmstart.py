"""A first checkpoint that knows the rules of a game but not how to win it, made by imitation in under a minute.

From random weights no reward is ever seen. So the model first imitates an expert that often moves at random: it learns
the form of an answer and wins about one game in ten. The loss uses the expert's best move where it moved at random,
which takes the dice out of the gradient. With a *plan*, the expert first says what lies around it, which makes turns
of 32 tokens and more, of varying length as real agents' are. The same recipe and seed give the same checkpoint on the
same machine; it is kept in the user's cache folder under the digest of everything it was made from.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional

from rose.core.trajectory import NO_VERSION, Trajectory
from rose.envs import frozenlake, play
from rose.envs.environment_registry import find_environment, make_environment
from rose.envs.frozenlake import ACTIONS, EDGE, GOAL, HOLE, ICE, FrozenLake
from rose.envs.play import ChatFrame
from rose.errors import ConfigError, Unavailable
from rose.models.model_folder import load_model_folder
from rose.models.presets import write_preset
from rose.models.tokenizer import Tokenizer
from rose.train import policy_model, recipes
from rose.train.batch import Sample, micro_batches
from rose.train.checkpoint import export_model
from rose.train.policy_model import CausalModel, use_threads
from rose.train.recipes import IMITATION_SEEDS, Recipe, find_recipe
from rose.train.step import ADAM_BETAS

NAMES = {ICE: "ice", HOLE: "hole", GOAL: "goal", EDGE: "edge"}
REMARK_SHARE = 0.35  # of remarks that another one follows: lengths fall off like real answers', with a long tail
TOKENS_MAX = 8192  # of a micro-batch, padding included


@dataclass(frozen=True, slots=True)
class ExpertGame:
    """A game of the expert, with two entries per token of its own."""

    trajectory: Trajectory
    best_ids: tuple[int, ...]  # its best token there
    is_choice: tuple[bool, ...]  # whether it may have chosen another one at random


def warm_start(environment: str = "frozenlake", seed: int = 0, cache: Path | None = None) -> Path:
    """Return the folder of an environment's warm-started model, made now if it is not in the cache."""
    recipe, folder = _cached(environment, seed, cache)
    return folder if folder.exists() else make_warm_start(recipe, folder)


def is_warm_start_cached(environment: str = "frozenlake", seed: int = 0, cache: Path | None = None) -> bool:
    return _cached(environment, seed, cache)[1].exists()


def _cached(environment: str, seed: int, cache: Path | None) -> tuple[Recipe, Path]:
    """Return the recipe of a warm start, and where it is or would be kept."""
    recipe = replace(find_recipe(environment), seed=seed)
    caches = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rose"
    return recipe, caches / f"warm-start-{environment}-{_digest(recipe)}"


def make_warm_start(recipe: Recipe, out: Path) -> Path:
    """Make the checkpoint; on one thread, 20 to 50 seconds."""
    use_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        begin = write_preset(recipe.preset, Path(temporary) / "model", recipe.seed)
        model = CausalModel.load(begin)
        folder = load_model_folder(begin)
        frame = ChatFrame(folder.tokenizer, folder.spec.eos_token_ids)
        imitate(model, expert_games(recipe, frame), recipe, action_ids(folder.tokenizer))
        try:
            return export_model(model, begin, out)
        except Unavailable:
            if out.exists():  # another process was quicker; both made the same
                return out
            raise


def action_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the token of each move. Raises ConfigError if one has several."""
    found = [tokenizer.encode(action, add_special_tokens=False) for action in ACTIONS]
    if any(len(ids) != 1 for ids in found):
        raise ConfigError(f"{tokenizer.file}: a warm start needs a tokenizer that has a token for every move")
    return [ids[0] for ids in found]


def _digest(recipe: Recipe) -> str:
    """Return the digest of the recipe and of the sources that follow it."""
    digest = hashlib.sha256(f"{recipe} {torch.__version__}".encode())
    for source in (__file__, recipes.__file__, policy_model.__file__, frozenlake.__file__, play.__file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]


def expert_games(recipe: Recipe, frame: ChatFrame) -> list[ExpertGame]:
    """Return games of an expert that often moves at random."""
    dice = random.Random(recipe.seed)
    return [_expert_game(recipe, frame, IMITATION_SEEDS + index, dice) for index in range(recipe.games)]


def _expert_game(recipe: Recipe, frame: ChatFrame, seed: int, dice: random.Random) -> ExpertGame:
    is_planned = find_environment(recipe.environment).is_planned
    changes = {"turns_max": recipe.turns_max} if recipe.turns_max else {}
    lake = make_environment(recipe.environment, **changes)
    assert isinstance(lake, FrozenLake)
    token_ids = frame.first(lake.reset(seed))
    loss_mask: list[bool] = []
    best_ids: list[int] = []
    is_choice: list[bool] = []
    while True:
        loss_mask += [False] * (len(token_ids) - len(loss_mask))
        best = lake.best_action()
        action = dice.choice(ACTIONS) if dice.random() < recipe.noise else best
        before = plan_text(lake) if is_planned else "<answer>"
        after = (
            f"{action}{remarks_text(action, dice)}. <answer>{action}</answer>" if is_planned else f"{action}</answer>"
        )
        words, choice = _encoded(frame, before, after)
        token_ids += words
        loss_mask += [True] * len(words)
        best_ids += [*words[:choice], *_encoded(frame, "", best)[0][:1], *words[choice + 1 :]]
        is_choice += [index == choice for index in range(len(words))]
        outcome = lake.step(before + after)
        if outcome.is_done:
            break
        token_ids += frame.following(outcome.observation, was_ended=True)
    trajectory = Trajectory(
        trajectory_id=str(seed),
        group_id="",
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
        logprobs=(0.0,) * len(token_ids),
        versions=(NO_VERSION,) * len(token_ids),
        reward=outcome.reward,
    )
    return ExpertGame(trajectory, tuple(best_ids), tuple(is_choice))


def _encoded(frame: ChatFrame, before: str, after: str) -> tuple[list[int], int]:
    """Return the ids of an answer with its end, and the place of the first token of `after`, which is the choice."""
    first = frame.tokenizer.encode(before, add_special_tokens=False)
    return [*first, *frame.tokenizer.encode(after, add_special_tokens=False), frame.end_id], len(first)


def plan_text(lake: FrozenLake) -> str:
    """Return what lies around, up to the move it leads to; with the answer at least 32 tokens."""
    around = ", ".join(f"{direction} {NAMES[cell]}" for direction, cell in lake.surroundings().items())
    return f"{around}. I go "


def remarks_text(action: str, dice: random.Random) -> str:
    """Return no, one or more remarks about where the expert does not go."""
    remarks = ""
    while dice.random() < REMARK_SHARE:
        remarks += f", not {dice.choice([name for name in ACTIONS if name != action])}"
    return remarks


def imitate(model: CausalModel, games: Sequence[ExpertGame], recipe: Recipe, action_ids: Sequence[int]) -> float:
    """Train the model on the expert's tokens, and return the last loss, in nats per token."""
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


def _accumulate(model: CausalModel, games: Sequence[ExpertGame], noise: float, action_ids: Sequence[int]) -> float:
    """Compute the gradient of the mean loss per token, and return the loss."""
    # Halves of a batch, sorted by length, are padded less than the whole.
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


def _shuffled_batches(games: Sequence[ExpertGame], recipe: Recipe) -> Iterator[list[ExpertGame]]:
    """Yield the batches of every epoch, of mixed lengths: short games are mostly lost, and would mislead alone."""
    for epoch in range(recipe.epochs):
        order = np.random.default_rng((recipe.seed, epoch)).permutation(len(games))
        for start in range(0, len(order) - recipe.rows + 1, recipe.rows):
            yield [games[index] for index in order[start : start + recipe.rows]]
