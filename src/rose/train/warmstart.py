"""A first checkpoint that knows the rules of the game but not how to win it, made by imitation in under a minute.

From random weights no reward is ever seen. So the model first imitates an expert who knows the shortest way and
often moves at random instead: it learns the form of an answer and a hint of the way, and wins about one game in
ten. The rest is left to reinforcement learning. Less imitation than this leaves the form unlearned, and then
nothing is learnt later.

The expert also tells what it would have done where it moved at random. Learning from that instead of from the move
itself takes the dice out of the gradient: fewer games are enough, and no seed is unlucky.

With a *plan*, the expert says before every answer what lies around it and where it goes, and sometimes adds where it
does not. That makes turns of forty tokens and more out of turns of four, of varying length, as real agents' turns
are, and lets a small model say what it sees before it acts.

The same recipe and seed give the same checkpoint on the same machine. It is kept in the user's cache folder, under
the digest of everything it was made from.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from rose.core.trajectory import NO_VERSION, Trajectory
from rose.envs import frozenlake, play
from rose.envs.frozenlake import ACTIONS, EDGE, GOAL, HOLE, ICE, FrozenLake
from rose.envs.play import ChatFrame
from rose.envs.registry import find_environment, make_environment
from rose.errors import ConfigError, Unavailable
from rose.models.folder import load_model_folder
from rose.models.presets import write_preset
from rose.models.tokenizer import Tokenizer
from rose.train import imitation, recipes
from rose.train import model as trained_model
from rose.train.checkpoint import export_model
from rose.train.imitation import Game, imitate
from rose.train.model import CausalModel, use_threads
from rose.train.recipes import IMITATION_SEEDS, Recipe, find_recipe

NAMES = {ICE: "ice", HOLE: "hole", GOAL: "goal", EDGE: "edge"}
REMARK_SHARE = 0.35
"""After each remark another one follows this often: lengths fall off like those of real answers, with a long tail."""


def warm_start(environment: str = "frozenlake", seed: int = 0, cache: Path | None = None) -> Path:
    """The folder of the warm-started model for an environment, made now if it is not in the cache."""
    recipe = replace(find_recipe(environment), seed=seed)
    folder = (cache or cache_folder()) / f"warm-start-{environment}-{_digest(recipe)}"
    return folder if folder.exists() else make_warm_start(recipe, folder)


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
    """The moves, each of which must be one token."""
    found = [tokenizer.encode(action, add_special_tokens=False) for action in ACTIONS]
    if any(len(ids) != 1 for ids in found):
        raise ConfigError(f"{tokenizer.file}: a warm start needs a tokenizer that has a token for every move")
    return [ids[0] for ids in found]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rose"


def _digest(recipe: Recipe) -> str:
    """Of the recipe, and of the sources that carry it out."""
    digest = hashlib.sha256(f"{recipe} {torch.__version__}".encode())
    own = (__file__, imitation.__file__, recipes.__file__, trained_model.__file__)
    for source in (*own, frozenlake.__file__, play.__file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]


def expert_games(recipe: Recipe, frame: ChatFrame) -> list[Game]:
    """Games of an expert who often moves at random."""
    dice = random.Random(recipe.seed)
    return [_expert_game(recipe, frame, IMITATION_SEEDS + index, dice) for index in range(recipe.games)]


def _expert_game(recipe: Recipe, frame: ChatFrame, seed: int, dice: random.Random) -> Game:
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
    return Game(trajectory, tuple(best_ids), tuple(is_choice))


def _encoded(frame: ChatFrame, before: str, after: str) -> tuple[list[int], int]:
    """The ids of an answer with its end, and the place of the first token of `after`, which is the choice."""
    first = frame.tokenizer.encode(before, add_special_tokens=False)
    return [*first, *frame.tokenizer.encode(after, add_special_tokens=False), frame.end_id], len(first)


def plan_text(lake: FrozenLake) -> str:
    """What lies around, up to the move it leads to; with the answer at least 32 tokens."""
    around = ", ".join(f"{direction} {NAMES[cell]}" for direction, cell in lake.surroundings().items())
    return f"{around}. I go "


def remarks_text(action: str, dice: random.Random) -> str:
    """Perhaps a remark or more."""
    remarks = ""
    while dice.random() < REMARK_SHARE:
        remarks += f", not {dice.choice([name for name in ACTIONS if name != action])}"
    return remarks
