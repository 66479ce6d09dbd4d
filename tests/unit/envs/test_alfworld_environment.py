"""ALFWorld: the words around its games, and the games themselves where they are installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
from pathlib import Path

import pytest
from tests.needs import needs
from tests.unit.envs.test_official import write_game

from rose.api.requests import TurnAnswer, TurnSampling, VersionSpan
from rose.envs.alfworld import official
from rose.envs.alfworld.alfworld_environment import Alfworld, AlfworldSettings, command_of, shortened
from rose.envs.alfworld.expert import plan_of
from rose.envs.alfworld.game_connection import GameConnection
from rose.envs.alfworld.households import KINDS, draw_household, problem
from rose.envs.environment import EnvironmentFailed, Outcome, TimedEnvironment
from rose.envs.environment_registry import find_environment
from rose.envs.play import ChatFrame, Episode, play
from rose.errors import ConfigError
from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset

ALL = tuple(KINDS)
needs_games = needs("alfworld")


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("model") / "m"))


@pytest.mark.parametrize(
    "action, command",
    [
        ("go to fridge 1", "go to fridge 1"),
        ("  Go to  Fridge 1.\n", "go to fridge 1"),
        ("I need the mug.\n> take mug 1 from desk 2", "take mug 1 from desk 2"),
        ("It may be here. <answer>open drawer 3</answer>", "open drawer 3"),
        ("<answer>look</answer> or not", "<answer>look</answer> or not"),
        ("", ""),
        ("\n\n", ""),
    ],
)
def test_the_command_is_read_from_what_an_agent_writes(action, command):
    assert command_of(action) == command


@pytest.mark.parametrize(
    "text, short",
    [
        (
            "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you "
            "see a bed 1, and a desk 1.\n\nYour task is to: put a cd in safe.",
            "Task: put a cd in safe. You see: bed 1, desk 1.",
        ),
        ("You arrive at bed 1. On the bed 1, you see a cd 2, and a box 1.", "On the bed 1: cd 2, box 1."),
        ("You arrive at desk 1. On the desk 1, you see nothing.", "On the desk 1: nothing."),
        ("You arrive at safe 1. The safe 1 is closed.", "The safe 1 is closed."),
        ("You open the safe 1. The safe 1 is open. In it, you see a cd 1.", "The safe 1 is open. In it: cd 1."),
        ("You pick up the cd 1 from the desk 1.", "You pick up the cd 1 from the desk 1."),
        ("Nothing happens.", "Nothing happens."),
    ],
)  # fmt: skip
def test_the_short_view_has_the_same_facts_in_fewer_words(text, short):
    assert shortened(text) == short


@pytest.mark.parametrize(
    "settings",
    [
        {"tasks": "cook"},
        {"tasks": ""},
        {"view": "map"},
        {"split": "test"},
        {"places": 2},
        {"things": 1},
        {"turns_max": 0},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        AlfworldSettings(**settings)


def solve(game: Alfworld, seed: int) -> Outcome:
    game.reset(seed)
    outcomes = [game.step(command) for command in game.plan]
    assert not any(outcome.is_done for outcome in outcomes[:-1]), game.plan
    return outcomes[-1]


@needs_games
@pytest.mark.parametrize("kind", KINDS)
def test_the_known_plan_solves_every_kind(kind):
    game = Alfworld(AlfworldSettings(tasks=kind))
    for seed in range(3):
        solved = solve(game, seed)
        assert solved.is_done and solved.is_success and solved.reward == 1.0, (kind, seed)
    game.close()


@needs_games
@pytest.mark.parametrize("kind", KINDS)
def test_the_expert_solves_a_game_after_random_commands(kind):
    game = Alfworld(AlfworldSettings(tasks=kind, turns_max=60))
    for seed in range(3):
        assert wander_and_solve(game, seed).is_success, seed
    assert game.best_action() == "look"
    game.close()


def wander_and_solve(game: Alfworld, seed: int) -> Outcome:
    """Twelve possible commands by the dice, and then as the expert says."""
    game.reset(seed)
    dice, outcome = random.Random(seed), Outcome("")
    for _ in range(12):
        outcome = outcome if outcome.is_done else game.step(dice.choice(game.commands))
    while not outcome.is_done:
        outcome = game.step(game.best_action())
    return outcome


@needs_games
def test_interleaved_games_do_not_disturb_each_other():
    games = [Alfworld() for _ in range(3)]
    for number, game in enumerate(games):
        game.reset(number)
    longest = max(len(game.plan) for game in games)
    won = set()
    for turn in range(longest):
        for number, game in enumerate(games):
            if turn < len(game.plan) and game.step(game.plan[turn]).is_success:
                won.add(number)
    assert won == {0, 1, 2}
    assert games[0].reset(2) == games[1].reset(2), "the same seed, the same words"
    for game in games:
        game.close()


@needs_games
def test_turns_are_bounded_and_an_impossible_command_has_a_penalty():
    game = Alfworld(AlfworldSettings(turns_max=2, view="full"))
    first = game.reset(5)
    assert "Your task is to: " in first and "You can: " in first and "go to" in game.commands[0]
    assert game.step("fly") == Outcome(f"Nothing happens.\nYou can: {', '.join(game.commands)}.", -0.05, is_valid=False)
    ended = game.step(f"I think so.\n{game.commands[0]}")
    assert ended.is_done and not ended.is_success and ended.is_valid and ended.reward == 0.0
    game.close()


@needs_games
def test_a_file_of_the_data_set_is_played(tmp_path):
    official._games.cache_clear()
    found = importlib.util.find_spec("alfworld")
    assert found is not None and found.origin is not None
    data = Path(found.origin).parent / "data"
    path = write_game(tmp_path, "pick_and_place_simple-Mug-None-Desk-301", seed=3)
    household = draw_household(3, ALL)
    grammar = (data / "alfred.twl2").read_text().replace("UNKNOWN GOAL", household.task)
    problem_text = problem(household).replace("mug_1", "Mug_bar__minus_01_dot_50")
    game_data = {"pddl_domain": (data / "alfred.pddl").read_text(), "grammar": grammar}
    path.write_text(json.dumps(game_data | {"pddl_problem": problem_text, "solvable": True}))
    game = Alfworld(AlfworldSettings(data=str(tmp_path)))
    assert household.task in game.reset(0)
    outcomes = [game.step(command) for command in plan_of(household)]
    assert outcomes[-1].is_success
    game.close()


@needs_games
def test_a_killed_game_loses_its_episode_and_the_next_one_plays():
    async def story() -> str:
        timed = TimedEnvironment(lambda: game)
        await timed.reset(1)
        assert game._game is not None and game._game._pid is not None
        os.kill(game._game._pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match="a game's process"):
            await timed.step("look")
        return await TimedEnvironment(Alfworld).reset(1)

    game = Alfworld()
    assert asyncio.run(story()).startswith("Task: ")


@needs_games
@pytest.mark.parametrize("seed", range(3))
def test_an_expert_episode_fits_the_context_of_a_model_that_reads_bytes(byte_model, seed):
    frame = ChatFrame(byte_model.tokenizer, byte_model.spec.eos_token_ids)
    plan = list(plan_of(draw_household(seed, ALL)))

    async def says_the_plan(token_ids, sampling) -> TurnAnswer:
        ids = (*frame.tokenizer.encode(plan.pop(0), add_special_tokens=False), frame.end_id)
        assert len(ids) <= sampling.max_tokens
        return TurnAnswer(ids, (-1.0,) * len(ids), (VersionSpan("0", 0, len(ids)),), "stop")

    sampling = TurnSampling(max_tokens=find_environment("alfworld").answer_tokens_max)
    found = asyncio.run(play(Episode("e", "", seed, sampling), TimedEnvironment(Alfworld), frame, says_the_plan))
    assert found.is_success and found.reward == 1.0 and found.invalid_turns == 0 and not plan
    assert len(found.token_ids) / found.turns * AlfworldSettings().turns_max < 4096


@needs_games
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_solve_households_of_many_seeds():
    game = Alfworld()
    for seed in range(200):
        assert solve(game, seed).is_success, seed
    large = Alfworld(AlfworldSettings(places=14, things=20, turns_max=60))
    for seed in range(40):
        assert wander_and_solve(large, seed).is_success, seed
    game.close()
    large.close()


@needs_games
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_planner_agrees_that_the_plans_are_short():
    """Fast Downward, asked for the whole way, finds none that is shorter by more than a step."""
    for seed in range(60):
        household = draw_household(seed, ALL)
        game = GameConnection({"problem": problem(household), "task": household.task})
        planned = game.ask({"plan": True})["plan"]
        game.close()
        assert planned and len(plan_of(household)) <= len(planned) + 1, (household.task, planned)
