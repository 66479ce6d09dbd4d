"""FrozenLake in text: its views, its rules and its expert."""

from __future__ import annotations

import pytest
from tests.unit.scripted_environment import answer_text

from rose.envs.environment import Outcome
from rose.envs.frozenlake import ACTIONS, FrozenLake, LakeSettings
from rose.errors import ConfigError


def test_the_egocentric_view_is_one_line():
    lake = FrozenLake()
    assert lake.reset(3) == "0,0 L#D_R_U#"  # the map of seed 3 is SFHF FFFF FFFF FFFG
    assert lake.step(answer_text("Right")) == Outcome("0,1 L_D_ROU#")
    fallen = lake.step(answer_text("Right"))
    assert fallen.is_done and not fallen.is_success and fallen.reward == 0.0


def test_the_grid_view_is_the_whole_map():
    lake = FrozenLake(LakeSettings(view="grid"))
    assert lake.reset(3) == "P_O_\n____\n____\n___G"
    assert lake.step(answer_text("Down")).observation == "__O_\nP___\n____\n___G"


@pytest.mark.parametrize("size", [4, 8])
def test_the_expert_always_reaches_the_goal(size):
    for seed in range(25):
        lake = FrozenLake(LakeSettings(size=size, turns_max=30))
        lake.reset(seed)
        outcome = Outcome("")
        while not outcome.is_done:
            outcome = lake.step(answer_text(lake.best_action()))
        assert outcome.is_success and outcome.reward == 1.0


def test_the_same_seed_is_the_same_game_even_when_slippery():
    def game(seed: int) -> list[Outcome]:
        lake = FrozenLake(LakeSettings(is_slippery=True, turns_max=12))
        lake.reset(seed)
        outcomes = [lake.step(answer_text("Right"))]
        while not outcomes[-1].is_done:
            outcomes.append(lake.step(answer_text(ACTIONS[len(outcomes) % 4])))
        return outcomes

    assert all(game(seed) == game(seed) for seed in range(20))
    assert len({tuple(outcome.observation for outcome in game(seed)) for seed in range(20)}) > 10


@pytest.mark.parametrize(
    "text, is_valid",
    [
        ("<answer>Down</answer>", True),
        ("I see ice. <answer> Down </answer> \n", True),
        ("Up ice. <answer>Up</answer> no: <answer>Down</answer>", True),
        ("<answer>down</answer>", False),
        ("<answer>Down</answer> I hope", False),
        ("<answer>Down", False),
        ("Down", False),
        ("", False),
    ],
)
def test_only_a_closing_answer_tag_is_a_valid_action(text, is_valid):
    lake = FrozenLake()
    lake.reset(3)
    outcome = lake.step(text)
    assert outcome.is_valid is is_valid
    assert (outcome.observation, outcome.reward) == (("1,0 L#D_R_U_", 0.0) if is_valid else ("0,0 L#D_R_U#", -0.1))


def test_a_game_ends_after_its_turns():
    lake = FrozenLake(LakeSettings(turns_max=3))
    lake.reset(3)
    assert [lake.step("").is_done for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("settings", [{"size": 5}, {"view": "map"}, {"turns_max": 0}, {"frozen_share": 0.0}])
def test_bad_lake_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        LakeSettings(**settings)
