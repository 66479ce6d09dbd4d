"""Warm starts: what is imitated, that it is learnt, and that it is made once."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from rose.envs import frozenlake
from rose.envs.frozenlake import ANSWER, FrozenLake
from rose.envs.play import ChatFrame
from rose.errors import ConfigError
from rose.models.model_folder import load_model_folder
from rose.models.presets import write_preset
from rose.train import recipes, warmstart
from rose.train.policy_model import CausalModel, use_threads
from rose.train.recipes import RECIPES, Recipe
from rose.train.warmstart import (
    ExpertGame,
    action_ids,
    expert_games,
    imitate,
    plan_text,
    remarks_text,
    warm_start,
)

SHORT = Recipe(games=24, epochs=1, rows=4, turns_max=3, warm_up_updates=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    use_threads(1)
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def frame(folder: Path) -> ChatFrame:
    opened = load_model_folder(folder)
    return ChatFrame(opened.tokenizer, opened.spec.eos_token_ids)


def test_an_expert_without_noise_wins_every_game(frame):
    games = expert_games(replace(SHORT, noise=0.0, turns_max=0), frame)
    assert len(games) == 24 and all(game.trajectory.reward == 1.0 for game in games)
    noisy = expert_games(replace(SHORT, noise=0.7, turns_max=0), frame)
    assert 0 < sum(game.trajectory.reward for game in noisy) < 24


def own_ids(game: ExpertGame) -> list[int]:
    trajectory = game.trajectory
    return [token for token, is_own in zip(trajectory.token_ids, trajectory.loss_mask) if is_own]


@pytest.mark.parametrize("environment", ["frozenlake", "frozenlake-plan"])
def test_the_best_move_is_recorded_where_another_was_made(frame, environment):
    moves = action_ids(frame.tokenizer)
    differing = 0
    for game in expert_games(replace(RECIPES[environment], games=20), frame):
        own = own_ids(game)
        assert len(own) == len(game.best_ids) == len(game.is_choice)
        assert sum(game.is_choice) == own.count(frame.end_id), "one choice per turn"
        for token, best, is_choice in zip(own, game.best_ids, game.is_choice):
            assert (token in moves and best in moves) if is_choice else token == best
            differing += token != best
    assert differing > 0


def test_expert_games_are_the_same_for_the_same_seed(frame):
    assert expert_games(SHORT, frame) == expert_games(SHORT, frame)
    assert expert_games(SHORT, frame) != expert_games(replace(SHORT, seed=1), frame)


def test_a_plan_says_what_lies_around():
    lake, dice = FrozenLake(), random.Random(0)
    lake.reset(3)
    assert plan_text(lake) == "Left edge, Down ice, Right ice, Up edge. I go "
    remarks = [remarks_text("Right", dice) for _ in range(50)]
    assert len({len(text) for text in remarks}) > 2, "of varying length"
    assert "" in remarks and all("Right" not in text for text in remarks)


def test_every_planned_turn_has_at_least_32_tokens_of_the_models_own(frame):
    for game in expert_games(replace(RECIPES["frozenlake-plan"], games=40, turns_max=0), frame):
        turns = "".join("x" if own else " " for own in game.trajectory.loss_mask).split()
        assert min(map(len, turns)) >= 32
        assert ANSWER.search(frame.tokenizer.decode(own_ids(game)[:-1], skip_special_tokens=False))


def test_imitation_lowers_the_loss(folder, frame):
    games, moves = expert_games(SHORT, frame), action_ids(frame.tokenizer)
    model = CausalModel.load(folder)
    first = imitate(model, games[:4], SHORT, moves)
    assert imitate(model, games * 3, SHORT, moves) < first / 2


def test_moves_must_be_single_tokens(tmp_path):
    spelled = load_model_folder(write_preset("qwen3-3m", tmp_path / "m")).tokenizer
    with pytest.raises(ConfigError, match="a token for every move"):
        action_ids(spelled)


def test_a_warm_start_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "frozenlake", SHORT)
    made = warm_start(cache=tmp_path)
    assert made.parent == tmp_path and CausalModel.load(made).is_finite()
    before = (made / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(warmstart, "make_warm_start", lambda *_: pytest.fail("it was there already"))
    assert warm_start(cache=tmp_path) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("module", [frozenlake, recipes])
def test_sources_that_differ_make_another_warm_start(tmp_path, monkeypatch, module):
    before = warmstart._digest(SHORT)
    edited = tmp_path / "edited.py"
    edited.write_text(Path(module.__file__).read_text() + "\n")
    monkeypatch.setattr(module, "__file__", str(edited))
    assert warmstart._digest(SHORT) != before


def test_another_seed_is_another_warm_start_and_the_same_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "frozenlake", replace(SHORT, games=8))
    first, other = warm_start(cache=tmp_path / "a"), warm_start(seed=1, cache=tmp_path / "a")
    again = warm_start(cache=tmp_path / "b")
    data = [(folder / "model.safetensors").read_bytes() for folder in (first, other, again)]
    assert data[0] != data[1] and data[0] == data[2]
