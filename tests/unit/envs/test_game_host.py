"""The games' own process, with modules in place of TextWorld and Fast Downward: its protocol, commands and names."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MUG, DESK, SHELF = "mug_bar__minus_01_dot_2", "desk_1", "shelf_1"


@dataclass
class EntityInfo:
    id: str
    type: str
    name: str = ""
    definite: str = ""
    indefinite: str = ""


class GameLogic:
    """A grammar whose texts are the names of its rules."""

    def __init__(self, domain: str, grammar: str) -> None:
        self.domain = domain
        self.grammar = SimpleNamespace(derive=lambda rule, context: f"{grammar}: {rule}\n")


@dataclass
class PddlState:
    """Two actions; moving the mug wins the game."""

    library: Any
    problem: str
    rules: GameLogic
    applied: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.problem == "broken":
            raise ValueError("no such problem")
        variables = {name: SimpleNamespace(name=name, type="thing") for name in (MUG, DESK, SHELF)}
        self.facts = [SimpleNamespace(arguments=list(variables.values()))]
        go, move = [("r", variables[SHELF])], [("o", variables[MUG]), ("r", variables[DESK])]
        self.actions = [self._action("gotolocation", "", go), self._action("put", "move {o} to {r}", move)]

    @staticmethod
    def _action(name: str, template: str, mapping: list[tuple[str, Any]]) -> Any:
        pairs = SimpleNamespace(items=lambda: [(SimpleNamespace(name=place), one) for place, one in mapping])
        return SimpleNamespace(name=name, command_template=template, mapping=pairs, feedback_rule=f"#{name}#")

    def all_applicable_actions(self) -> list[Any]:
        return [action for action in self.actions if action not in self.applied]

    def apply(self, action: Any) -> None:
        self.applied.append(action)

    def check_goal(self) -> bool:
        return any(action.name == "put" for action in self.applied)

    def replan(self, infos: Any) -> list[str]:
        return [f"move {infos[MUG].name} to {infos[DESK].name}"]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    logic = SimpleNamespace(GameLogic=GameLogic, PddlState=PddlState)
    stubs = {
        "fast_downward": {},
        "textworld.envs.pddl": {"logic": logic},
        "textworld.generator.game": {"EntityInfo": EntityInfo},
    }
    for name, content in stubs.items():
        made = ModuleType(name)
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, made)
    name = "rose.envs.alfworld.game_host"
    yield importlib.import_module(name)
    del sys.modules[name]


class Client:
    """One game, served in a thread over a socket."""

    def __init__(self, host: Any) -> None:
        here, there = socket.socketpair()
        self.stream = here.makefile("rwb")
        here.close()
        self.thread = threading.Thread(target=host.serve, args=(there, GameLogic("ours", "text"), None), daemon=True)
        self.thread.start()

    def receive(self) -> Any:
        line = self.stream.readline()
        return json.loads(line) if line else None

    def ask(self, **request: Any) -> Any:
        self.stream.write(json.dumps(request).encode() + b"\n")
        self.stream.flush()
        return self.receive()


def test_a_game_is_begun_played_and_won(host: Any) -> None:
    client = Client(host)
    assert client.receive() == {"pid": os.getpid()}
    first = client.ask(problem="a problem", task="put a mug in desk")
    commands = ["go to shelf 1", "move mug 1 to desk 1"]
    assert first == {"text": "text: #intro#", "commands": commands, "is_won": False, "is_valid": True}
    assert client.ask(plan=True) == {"plan": ["move mug 1 to desk 1"]}
    invalid = client.ask(command="fly")
    assert (invalid["text"], invalid["is_valid"], invalid["commands"]) == (host.NOTHING, False, commands)
    won = client.ask(command="move mug 1 to desk 1")
    assert (won["text"], won["commands"], won["is_won"]) == ("text: #put#", ["go to shelf 1"], True)
    client.stream.close()
    client.thread.join(20)
    assert not client.thread.is_alive(), "a game ends with its connection"


def test_an_error_is_answered_as_text_and_ends_the_game(host: Any) -> None:
    client = Client(host)
    client.receive()
    assert client.ask(problem="broken") == {"error": "ValueError: no such problem"}
    assert client.receive() is None


def test_a_file_of_the_data_set_brings_its_own_rules(host: Any, tmp_path: Path) -> None:
    path = tmp_path / "game.tw-pddl"
    path.write_text(json.dumps({"pddl_domain": "its own", "grammar": "its text", "pddl_problem": "a problem"}))
    client = Client(host)
    client.receive()
    assert client.ask(file=str(path))["text"] == "its text: #intro#"


def test_things_of_one_kind_are_numbered_in_alfworlds_order(host: Any) -> None:
    identifiers = ["mug_bar_a", "mug_bar_b", "sink_bar_a_bar_basin", "sinkbasin_bar_b", "desk_1"]
    assert host.names_of(identifiers) == {
        "desk_1": "desk 1",
        "mug_bar_a": "mug 2",
        "mug_bar_b": "mug 1",
        "sink_bar_a_bar_basin": "sinkbasin 2",
        "sinkbasin_bar_b": "sinkbasin 1",
    }
