"""Games in processes of their own: they are killed when they hang, and end with their host."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.needs import needs

from rose.envs.alfworld import game_connection
from rose.envs.alfworld.game_connection import GameConnection, GameHost
from rose.envs.alfworld.households import KINDS, draw_household, problem
from rose.envs.environment import EnvironmentFailed
from rose.envs.environment_registry import make_environment
from rose.errors import ConfigError

ALL = tuple(KINDS)
needs_games = needs("alfworld")

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


def test_missing_packages_are_refused_with_the_command_to_install_them(monkeypatch):
    monkeypatch.setattr(game_connection, "PACKAGES", ("no_such_alfworld",))
    with pytest.raises(ConfigError) as refused:
        make_environment("alfworld")
    assert "rose-rl[alfworld]" in str(refused.value) and "no_such_alfworld" in str(refused.value)


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


@pytest.fixture
def hanging_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GameHost]:
    """A host without the packages, whose games hang while they begin."""
    for name, text in STUBS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in [path for path in tmp_path.rglob("*") if path.is_dir()]:
        (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(game_connection, "PACKAGES", ())
    host = GameHost()
    monkeypatch.setattr(game_connection, "_host", host)
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
def test_a_game_that_hangs_after_it_began_is_killed():
    game = GameConnection({"problem": problem(draw_household(1, ALL)), "task": "t"}, answer_s_max=0.2)
    pid = game._pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        game.ask({"command": "look"})
    with pytest.raises(EnvironmentFailed):
        game.ask({"command": "look"})


@needs_games
def test_a_dead_host_is_restarted_and_a_bad_problem_is_an_error_text(monkeypatch):
    host = GameHost()
    monkeypatch.setattr(game_connection, "_host", host)
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
