"""The games' own process: reads ALFWorld's rules once, then forks for every game.

    python -m rose.envs.alfworld.game_host LISTENING_FD FOLDER

A game is foreign code: it computes for tenths of a second, keeps its state in the global variables of a C++ library,
redirects standard output and may hang or crash. So every connection to the listening socket is a game in a forked
process, which ends with its connection, and at the latest with this process. A client that waits too long kills it.

Messages are lines of JSON. The game first sends its `{pid}`. `{problem, task}` or `{file}` begins it and `{command}`
goes on; both are answered by the observation, `{plan: true}` by the expert's commands. `{error}` ends the game. The
process ends with its standard input, which its parent holds, and removes the folder of its socket.

TextWorld's PDDL environment would derive every possible command through the text grammar at every step, which takes
tens of milliseconds, and translate each problem four times. So its rules and texts are used directly here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import selectors
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterable
from io import BufferedRWPair
from pathlib import Path
from typing import Any

import fast_downward
from textworld.envs.pddl import logic as pddl_logic
from textworld.generator.game import EntityInfo

NICE = 10  # as rollouts and training: what serves users goes first
LINE_BYTES_MAX = 16 << 20
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
TASK_MARK = "UNKNOWN GOAL"  # where ALFWorld's grammar has a place for the task
NOTHING = "Nothing happens."


def main(listening_fd: int, folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps ended games
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when the end has come
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    rules, library = packaged_rules(), fast_downward.load_lib()
    listener, own_pid = socket.socket(fileno=listening_fd), os.getpid()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                shutil.rmtree(folder, ignore_errors=True)
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                end_with(own_pid)
                listener.close()
                serve(connection, rules, library)
                os._exit(0)
            connection.close()


def packaged_rules() -> Any:
    """Return the rules of the installed `alfworld`; importing the package would make a folder in the user's home."""
    package = importlib.util.find_spec("alfworld")
    assert package is not None and package.origin is not None
    folder = Path(package.origin).parent / "data"
    return pddl_logic.GameLogic((folder / "alfred.pddl").read_text(), (folder / "alfred.twl2").read_text())


def end_with(parent_pid: int) -> None:
    """Let the kernel end a game whose parent has ended: one that hangs would not notice."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the line above
        os._exit(1)


def serve(connection: socket.socket, rules: Any, library: Any) -> None:
    """Serve one game, until its connection ends."""
    with connection, connection.makefile("rwb") as stream:
        game: Game | None = None
        if not send(stream, {"pid": os.getpid()}):
            return
        while line := stream.readline(LINE_BYTES_MAX):
            try:
                request = json.loads(line)
                if game is None:
                    game = begin_game(request, rules, library)
                    answer = game.begin()
                elif request.get("plan"):
                    answer = {"plan": game.plan()}
                else:
                    answer = game.do(request["command"])
            except (Exception, SystemExit) as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            if not send(stream, answer) or "error" in answer:
                return


def send(stream: BufferedRWPair, answer: dict[str, Any]) -> bool:
    """Send a line, and return whether the client is still connected."""
    try:
        stream.write(json.dumps(answer).encode() + b"\n")
        stream.flush()
    except OSError:
        return False
    return True


def begin_game(request: dict[str, Any], rules: Any, library: Any) -> Game:
    """Return the game of a file of the data set, which has its own rules, or of a problem."""
    if "file" not in request:
        return Game(library, rules, request["problem"], request.get("task", ""))
    with open(request["file"], encoding="utf-8") as file:
        data = json.load(file)
    rules = pddl_logic.GameLogic(data["pddl_domain"], data["grammar"])
    return Game(library, rules, data["pddl_problem"], request.get("task", ""))


class Game:
    """One game in this process's copy of the library: a second one would end the first."""

    def __init__(self, library: Any, rules: Any, problem: str, task: str) -> None:
        self._rules, self._task = rules, task
        self._state = pddl_logic.PddlState(library, problem, rules)
        self._infos = {v.name: EntityInfo(v.name, v.type) for fact in self._state.facts for v in fact.arguments}
        for identifier, name in names_of(self._infos).items():
            info = self._infos[identifier]
            info.name, info.definite, info.indefinite = name, "the", "a"
        self._actions: dict[str, Any] = {}

    def begin(self) -> dict[str, Any]:
        """Return the first observation."""
        return self._observation(self._text("#intro#", {}).replace(TASK_MARK, self._task))

    def do(self, command: str) -> dict[str, Any]:
        """Carry out a command and return the observation; one that is not possible changes nothing."""
        action = self._actions.get(command)
        if action is None:
            return self._observation(NOTHING, is_valid=False)
        self._state.apply(action)
        return self._observation(self._text(action.feedback_rule, action.mapping))

    def plan(self) -> list[str]:
        """Return an expert's commands from here, by the planner; empty when nothing is left to do."""
        return list(self._state.replan(self._infos))

    def _observation(self, text: str, *, is_valid: bool = True) -> dict[str, Any]:
        self._actions = {}
        for action in reversed(self._state.all_applicable_actions()):
            template = "go to {r}" if action.name == "gotolocation" else action.command_template
            names = {place.name: self._infos[variable.name].name for place, variable in action.mapping.items()}
            self._actions[str(template.format(**names))] = action
        commands = sorted(command for command in self._actions if command != "help")
        is_won = bool(self._state.check_goal())
        return {"text": text.strip(), "commands": commands, "is_won": is_won, "is_valid": is_valid}

    def _text(self, rule: str, mapping: dict[Any, Any]) -> str:
        context = {
            "state": self._state,
            "facts": list(self._state.facts),
            "variables": {place.name: self._infos[variable.name] for place, variable in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._infos,
        }
        return str(self._rules.grammar.derive(rule, context))


def names_of(identifiers: Iterable[str]) -> dict[str, str]:
    """Return short names: `mug_1` -> `mug 1`; `mug_bar__minus_01_dot_2` -> `mug 2`, in ALFWorld's order."""
    ordered = sorted(identifiers)
    kinds = {identifier: identifier.split("_bar_", 1)[0] for identifier in ordered if "_bar_" in identifier}
    for identifier, kind in kinds.items():
        if "basin" in identifier and not kind.endswith("basin"):
            kinds[identifier] = f"{kind}basin"
    left = Counter(kinds.values())
    names = {}
    for identifier in ordered:
        if identifier in kinds:
            names[identifier] = f"{kinds[identifier]} {left[kinds[identifier]]}"
            left[kinds[identifier]] -= 1
        else:
            names[identifier] = identifier.replace("_", " ")
    return names


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
