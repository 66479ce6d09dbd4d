"""Prompts and environments as TRL's trainers want them played."""

from __future__ import annotations

import functools

import pytest
from tests.unit.adapters.trl_world import DATASET, settings

from rose.adapters.group_players import EnvironmentPlayer, PromptPlayer, _name_of, prompt_ids, sampling_seed
from rose.adapters.trl_rollouts import sampling_of
from rose.api.requests import TurnSampling
from rose.errors import ConfigError

SAMPLING = TurnSampling()


class Verifier:
    def __call__(self, **columns): ...


def test_a_conversation_is_rendered_and_a_text_is_not(pool):
    tokenizer = pool.folder.tokenizer
    assert prompt_ids(tokenizer, "goal") == tokenizer.encode("goal")
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "goal"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\ngoal<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_member_of_every_group_has_a_seed_of_its_own():
    seeds = {sampling_seed(seed, group, member) for seed in (0, 42) for group in range(20) for member in range(20)}
    assert len(seeds) == 800 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert sampling_seed(1 << 15, 1 << 32, 1 << 16) == sampling_seed(0, 0, 0)  # they wrap, and stay in bounds


def test_the_dataset_is_repeated_for_ever(pool):
    tasks = PromptPlayer(pool.folder, DATASET, [print], SAMPLING).tasks()
    assert [next(tasks)["answer"] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_dataset_without_rows_and_a_missing_reward_are_errors(pool):
    with pytest.raises(ConfigError, match="no rows"):
        next(PromptPlayer(pool.folder, [], [print], SAMPLING).tasks())
    with pytest.raises(ConfigError, match="nothing to score"):
        PromptPlayer(pool.folder, DATASET, [], SAMPLING)


def test_an_environment_that_does_not_exist_is_an_error_of_the_start(pool):
    with pytest.raises(ConfigError, match="no environment 'frozen'"):
        EnvironmentPlayer(pool.folder, "frozen", {}, SAMPLING)


def test_trainers_with_other_seeds_play_other_tasks(pool):
    players = [EnvironmentPlayer(pool.folder, "frozenlake", {}, TurnSampling(seed=seed)) for seed in (0, 1)]
    first, second = ([task for _, task in zip(range(50), player.tasks())] for player in players)
    assert not set(first) & set(second)


def test_functions_are_named_as_trl_names_them():
    assert _name_of(functools.partial(test_functions_are_named_as_trl_names_them)).startswith("test_functions")
    assert _name_of(Verifier()) == "Verifier"


@pytest.mark.parametrize("name, value", [("top_p", 0.9), ("top_k", 20), ("min_p", 0.1), ("repetition_penalty", 1.1)])
def test_a_part_of_the_distribution_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        sampling_of(settings(**{name: value}))
    assert sampling_of(settings(temperature=0.7)) == TurnSampling(0.7, 8, seed=42)
