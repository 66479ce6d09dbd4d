"""ALFWorld: households that can be solved, the words around them, and the games themselves where they are installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.needs import needs

from rose.envs.alfworld import connection, official
from rose.envs.alfworld.connection import GameConnection, Host
from rose.envs.alfworld.environment import Alfworld, AlfworldSettings, command_of, shortened
from rose.envs.alfworld.expert import Expert, plan_of
from rose.envs.alfworld.households import KINDS, TOOLS, Household, draw_household, problem
from rose.envs.alfworld.rooms import ROOMS
from rose.envs.base import HELD_OUT_SEEDS, EnvironmentFailed, Guarded, Outcome
from rose.envs.play import Answer, ChatFrame, Episode, TurnSampling, VersionSpan, play
from rose.envs.registry import ENVIRONMENTS, find_environment, make_environment
from rose.errors import ConfigError
from rose.models.folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset

ALL = tuple(KINDS)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("model") / "m"))


needs_games = needs("alfworld")

# Households, without any package


def test_the_same_seed_is_the_same_household_and_others_are_others():
    assert all(draw_household(seed, ALL) == draw_household(seed, ALL) for seed in range(50))
    assert len({problem(draw_household(seed, ALL)) for seed in range(500)}) == 500
    assert Counter(draw_household(seed, ALL).kind for seed in range(600)).keys() == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_where_the_task_wants_it_and_everything_lies_where_it_may(kind):
    for seed in range(200):
        found = draw_household(seed, (kind,), places=4 + seed % 10, things=2 + seed % 12)
        wanted = [thing for thing in found.things if thing.kind == found.target]
        assert len(wanted) == (2 if kind == "two" else 1)
        assert all(found.places[thing.at] != found.goal for thing in wanted)
        assert len({thing.name for thing in found.things}) == len(found.things)
        assert kind not in TOOLS or TOOLS[kind] in found.places.values()
        assert any(
            all(thing.kind == "desklamp" or thing.kind in room[found.places[thing.at]].holds for thing in found.things)
            for room in ROOMS.values()
            if set(found.places.values()) <= set(room)
        )


def test_a_household_in_words():
    found = draw_household(3, ALL)
    assert (found.kind, found.task) == ("cool", "put a cool mug in countertop")
    assert plan_of(found) == (
        "go to coffeemachine 1",
        "take mug 1 from coffeemachine 1",
        "go to fridge 1",
        "cool mug 1 with fridge 1",
        "go to countertop 1",
        "move mug 1 to countertop 1",
    )
    text = problem(found)
    assert text.count("(") == text.count(")") and "(inReceptacle mug_1 coffeemachine_1)" in text
    assert "(isCool ?o)" in text and "(openable fridge_1)" in text


def test_plans_open_doors_before_reaching_in():
    for seed in range(300):
        check_doors(draw_household(seed, ALL))


def check_doors(found: Household) -> None:
    opened: set[str] = set()
    for command in plan_of(found):
        words = command.split()
        if words[0] == "open":
            opened.add(command.removeprefix("open "))
        place = " ".join(words[-2:])
        if words[0] in ("take", "move") and place in found.openable:
            assert place in opened, (found.task, command)


def test_an_expert_puts_down_what_is_not_wanted_and_begins_again_when_undone():
    found = draw_household(3, ALL)  # a mug in the coffeemachine, to be cooled, for the countertop
    expert = Expert(found)
    for command in ("go to drawer 1", "open drawer 1", "take fork 1 from drawer 1", "go to shelf 1"):
        expert.saw(command)
    assert expert.next() == "go to drawer 1"
    expert.saw("go to drawer 1")
    expert.saw("close drawer 1")
    assert expert.next() == "open drawer 1"
    for command in ("open drawer 1", "move fork 1 to drawer 1", *plan_of(found)):
        expert.saw(command)
    assert expert.next() is None
    for command in ("take mug 1 from countertop 1", "heat mug 1 with microwave 1"):
        expert.saw(command)
    assert expert.next() == "go to fridge 1", "it is hot again"


# Words


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
def test_the_command_in_what_an_agent_writes(action, command):
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
def test_fewer_words_for_the_same_facts(text, short):
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


def test_it_is_in_the_registry_with_its_options():
    assert {"alfworld", "alfworld-full", "alfworld-official"} <= set(ENVIRONMENTS)
    assert find_environment("alfworld").settings.kinds == ALL
    with pytest.raises(ConfigError, match="did you mean places"):
        make_environment("alfworld", place=3)


def test_what_is_not_installed_is_said_with_the_command(monkeypatch):
    monkeypatch.setattr(connection, "PACKAGES", ("no_such_alfworld",))
    with pytest.raises(ConfigError) as refused:
        make_environment("alfworld")
    assert "rose-rl[alfworld]" in str(refused.value) and "no_such_alfworld" in str(refused.value)


# The official data set, as a folder of its form


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


MUG = "pick_and_place_simple-Mug-None-Desk"


def games_of(root: Path, split: str, first_seed: int) -> set[Path]:
    return {official.official_game(str(root), split, ALL, first_seed + number) for number in range(400)}


@pytest.mark.parametrize("split", ["train", "valid_seen"])
def test_held_out_games_are_those_of_rooms_that_no_training_has_seen(tmp_path, split):
    trained = {write_game(tmp_path, f"{MUG}-{room}", split=split) for room in range(5)}
    unseen = {write_game(tmp_path, f"{MUG}-{room}", split="valid_unseen") for room in (8, 9)}
    assert games_of(tmp_path, split, 0) == trained
    assert games_of(tmp_path, split, HELD_OUT_SEEDS) == unseen


@pytest.mark.parametrize("split", ["train", "valid_unseen"])
def test_a_split_that_has_to_do_for_both_keeps_a_tenth_of_its_tasks_apart(tmp_path, split):
    games = {write_game(tmp_path, f"{MUG}-{room}", split=split) for room in range(20)}
    trained, held_out = games_of(tmp_path, split, 0), games_of(tmp_path, split, HELD_OUT_SEEDS)
    assert trained | held_out == games and not trained & held_out and len(held_out) == 2


def test_a_single_task_cannot_be_evaluated_on(tmp_path):
    write_game(tmp_path, f"{MUG}-301")
    official.check_data(str(tmp_path), "train", ALL)
    with pytest.raises(ConfigError, match="none is left to evaluate on"):
        official.official_game(str(tmp_path), "train", ALL, HELD_OUT_SEEDS)


def test_without_the_data_set_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(ConfigError, match="ALFWORLD_DATA is not set"):
        official.check_data("ALFWORLD_DATA", "train", ALL)


# The games themselves


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
def test_an_expert_finds_the_way_back_from_wrong_turns(kind):
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
def test_games_in_between_do_not_disturb_each_other():
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
def test_turns_are_bounded_and_what_is_not_possible_costs_a_little():
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
def test_a_game_that_is_killed_costs_its_episode_and_the_next_one_plays():
    async def story() -> str:
        guarded = Guarded(lambda: game)
        await guarded.reset(1)
        assert game._game is not None and game._game._pid is not None
        os.kill(game._game._pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match="a game's process"):
            await guarded.step("look")
        return await Guarded(Alfworld).reset(1)

    game = Alfworld()
    assert asyncio.run(story()).startswith("Task: ")


@needs_games
def test_a_game_that_hangs_is_killed_and_its_thread_comes_back():
    game = GameConnection({"problem": problem(draw_household(1, ALL)), "task": "t"}, answer_s_max=0.2)
    pid = game._pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        game.ask({"command": "look"})
    with pytest.raises(EnvironmentFailed):
        game.ask({"command": "look"})


def is_gone(pid: int) -> bool:
    """Ended, whoever has taken notice of it; waits a while for that."""
    for _ in range(3000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


STUBS = {
    "fast_downward.py": "def load_lib(): ...",
    "alfworld/data/alfred.pddl": "",
    "alfworld/data/alfred.twl2": "",
    "textworld/generator/game.py": "class EntityInfo: ...",
    "textworld/envs/pddl/logic.py": """
import time
class GameLogic:
    def __init__(self, domain, grammar): ...
class PddlState:
    def __init__(self, *parts):
        time.sleep(600)
""",
}


@pytest.fixture
def hanging_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host without the packages, whose games hang while they begin."""
    for name, text in STUBS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in [path for path in tmp_path.rglob("*") if path.is_dir()]:
        (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(connection, "PACKAGES", ())
    host = Host()
    monkeypatch.setattr(connection, "_host", host)
    yield host
    host.end()


def test_a_game_that_hangs_while_it_begins_is_killed(hanging_games):
    killed: list[int | None] = []

    class Watched(GameConnection):
        def kill(self) -> None:
            killed.append(self._pid)
            super().kill()

    with pytest.raises(TimeoutError):
        Watched({"problem": "", "task": ""}, begin_s_max=0.2)
    [pid] = killed
    assert pid is not None and is_gone(pid)


def test_a_game_that_hangs_ends_with_its_host(hanging_games):
    with hanging_games.connect() as game, game.makefile("rb") as stream:
        pid = json.loads(stream.readline())["pid"]
        os.kill(pid, signal.SIGSTOP)
        hanging_games.end()
        assert is_gone(pid)


@needs_games
def test_a_host_that_died_is_started_again_and_nonsense_is_answered_in_words(monkeypatch):
    host = Host()
    monkeypatch.setattr(connection, "_host", host)
    with pytest.raises(EnvironmentFailed, match="a game failed"):
        GameConnection({"problem": "(define (problem broken", "task": "t"})
    assert host._process is not None
    first = host._process
    first.kill()
    first.wait()
    seen = GameConnection({"problem": problem(draw_household(1, ALL)), "task": "t"}).first
    assert "You are in the middle of a room" in seen["text"] and host.pid != first.pid
    host.end()
    assert host.pid is None


@needs_games
@pytest.mark.parametrize("seed", range(3))
def test_an_expert_episode_token_by_token_fits_a_small_model_that_reads_bytes(byte_model, seed):
    frame = ChatFrame(byte_model.tokenizer, byte_model.spec.eos_token_ids)
    plan = list(plan_of(draw_household(seed, ALL)))

    async def says_the_plan(token_ids, sampling) -> Answer:
        ids = (*frame.tokenizer.encode(plan.pop(0), add_special_tokens=False), frame.end_id)
        assert len(ids) <= sampling.max_tokens
        return Answer(ids, (-1.0,) * len(ids), (VersionSpan("0", 0, len(ids)),), "stop")

    sampling = TurnSampling(max_tokens=find_environment("alfworld").answer_tokens_max)
    found = asyncio.run(play(Episode("e", "", seed, sampling), Guarded(Alfworld), frame, says_the_plan))
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
