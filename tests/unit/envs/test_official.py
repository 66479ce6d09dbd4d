"""The games of ALFWorld's own data set, as a folder of its form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rose.envs.alfworld import official
from rose.envs.alfworld.households import KINDS, draw_household, problem
from rose.envs.environment import HELD_OUT_SEEDS
from rose.errors import ConfigError

ALL = tuple(KINDS)
MUG = "pick_and_place_simple-Mug-None-Desk"


def write_game(root: Path, task: str, *, split: str = "train", is_solvable: bool = True, seed: int = 0) -> Path:
    path = root / "json_2.1.1" / split / task / "trial_T2019" / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"solvable": is_solvable, "pddl_problem": problem(draw_household(seed, ALL))}))
    return path


def test_official_games_are_chosen_by_the_seed(tmp_path):
    official._games.cache_clear()
    mug = write_game(tmp_path, "pick_and_place_simple-Mug-None-Desk-301")
    hot = write_game(tmp_path, "pick_heat_then_place_in_recep-Egg-None-SinkBasin-2")
    write_game(tmp_path, "pick_and_place_simple-AppleSliced-None-Desk-301")
    write_game(tmp_path, "pick_two_obj_and_place-CD-None-Safe-1", is_solvable=False)
    write_game(tmp_path, "pick_and_place_simple-Pen-None-Desk-310", split="valid_unseen")
    found = [official.official_game(str(tmp_path), "train", ALL, seed) for seed in range(40)]
    assert set(found) == {mug, hot}
    assert found == [official.official_game(str(tmp_path), "train", ALL, seed) for seed in range(40)]
    assert official.official_game(str(tmp_path), "train", ("heat",), 0) == hot
    with pytest.raises(ConfigError, match="no game of train"):
        official.official_game(str(tmp_path), "train", ("two",), 0)
    with pytest.raises(ConfigError, match="has no ALFWorld games of valid_seen"):
        official.check_data(str(tmp_path), "valid_seen", ALL)


def games_of(root: Path, split: str, first_seed: int) -> set[Path]:
    return {official.official_game(str(root), split, ALL, first_seed + number) for number in range(400)}


@pytest.mark.parametrize("split", ["train", "valid_seen"])
def test_held_out_games_are_of_rooms_that_training_never_sees(tmp_path, split):
    trained = {write_game(tmp_path, f"{MUG}-{room}", split=split) for room in range(5)}
    unseen = {write_game(tmp_path, f"{MUG}-{room}", split="valid_unseen") for room in (8, 9)}
    assert games_of(tmp_path, split, 0) == trained
    assert games_of(tmp_path, split, HELD_OUT_SEEDS) == unseen


@pytest.mark.parametrize("split", ["train", "valid_unseen"])
def test_one_split_for_both_keeps_a_tenth_of_its_tasks_for_evaluation(tmp_path, split):
    games = {write_game(tmp_path, f"{MUG}-{room}", split=split) for room in range(20)}
    trained, held_out = games_of(tmp_path, split, 0), games_of(tmp_path, split, HELD_OUT_SEEDS)
    assert trained | held_out == games and not trained & held_out and len(held_out) == 2


def test_a_single_task_cannot_be_evaluated_on(tmp_path):
    write_game(tmp_path, f"{MUG}-301")
    official.check_data(str(tmp_path), "train", ALL)
    with pytest.raises(ConfigError, match="none is left to evaluate on"):
        official.official_game(str(tmp_path), "train", ALL, HELD_OUT_SEEDS)


def test_a_missing_data_set_is_refused_with_the_command_to_get_it(monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(ConfigError, match="ALFWORLD_DATA is not set"):
        official.check_data("ALFWORLD_DATA", "train", ALL)
