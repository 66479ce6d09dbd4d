"""One game of ALFWorld, by TextWorld's own logic: what is seen, what may be done, whether it is won.

TextWorld's PDDL environment does the same and more: it derives every possible command through the text grammar at every
step, which takes tens of milliseconds, and translates each problem four times. Here the rules (Fast Downward's
translation and state) and the texts (ALFWorld's grammar) are used directly, and commands are filled into their
templates.

This module runs in the games' own process only (`host`): Fast Downward's translator changes `sys.argv` and
`sys.stdout`, and its library keeps one game in global variables.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textworld.envs.pddl import logic as pddl_logic
from textworld.generator.game import EntityInfo

TASK_MARK = "UNKNOWN GOAL"
"""Where ALFWorld's grammar has a place for the task."""

NOTHING = "Nothing happens."


@dataclass(frozen=True, slots=True)
class Seen:
    """What a player is told. Commands are sorted; `help` is not among them."""

    text: str
    commands: tuple[str, ...]
    is_won: bool = False
    is_valid: bool = True


class Rules:
    """A domain and a grammar, read once and used for every game that has the same."""

    def __init__(self, domain: str, grammar: str) -> None:
        self.logic = pddl_logic.GameLogic(domain, grammar)


def packaged_rules() -> Rules:
    """Those of the installed `alfworld`. Importing the package itself would make a folder in the user's home."""
    found = importlib.util.find_spec("alfworld")
    assert found is not None and found.origin is not None
    folder = Path(found.origin).parent / "data"
    return Rules((folder / "alfred.pddl").read_text(), (folder / "alfred.twl2").read_text())


class Game:
    """One game in this process's copy of the library: a second one would end the first."""

    def __init__(self, library: Any, rules: Rules, problem: str, task: str) -> None:
        self._logic, self._task = rules.logic, task
        self._state = pddl_logic.PddlState(library, problem, self._logic)
        self._infos = _named_infos(self._state.facts)
        self._actions: dict[str, Any] = {}

    def begin(self) -> Seen:
        return self._seen(self._text("#intro#", {}).replace(TASK_MARK, self._task))

    def do(self, command: str) -> Seen:
        action = self._actions.get(command)
        if action is None:
            return self._seen(NOTHING, is_valid=False)
        self._state.apply(action)
        return self._seen(self._text(action.feedback_rule, action.mapping))

    def plan(self) -> list[str]:
        """What an expert would do from here, by the planner; empty when nothing is left to do."""
        return list(self._state.replan(self._infos))

    def _seen(self, text: str, *, is_valid: bool = True) -> Seen:
        found = self._state.all_applicable_actions()
        self._actions = {self._command(action): action for action in reversed(found)}
        commands = sorted(command for command in self._actions if command != "help")
        return Seen(text.strip(), tuple(commands), bool(self._state.check_goal()), is_valid)

    def _command(self, action: Any) -> str:
        template = "go to {r}" if action.name == "gotolocation" else action.command_template
        names = {place.name: self._infos[variable.name].name for place, variable in action.mapping.items()}
        return str(template.format(**names))

    def _text(self, rule: str, mapping: dict[Any, Any]) -> str:
        context = {
            "state": self._state,
            "facts": list(self._state.facts),
            "variables": {place.name: self._infos[variable.name] for place, variable in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._infos,
        }
        return str(self._logic.grammar.derive(rule, context))


def _named_infos(facts: Iterable[Any]) -> dict[str, Any]:
    infos = {v.name: EntityInfo(v.name, v.type) for fact in facts for v in fact.arguments}
    for identifier, name in names_of(infos).items():
        info = infos[identifier]
        info.name, info.definite, info.indefinite = name, "the", "a"
    return infos


def names_of(identifiers: Iterable[str]) -> dict[str, str]:
    """`mug_1` -> `mug 1`; the data set's `mug_bar__minus_01_dot_2` -> `mug 2`, counted down in ALFWorld's order."""
    ordered = sorted(identifiers)
    kinds = {identifier: _kind(identifier) for identifier in ordered if "_bar_" in identifier}
    left = Counter(kinds.values())
    names = {}
    for identifier in ordered:
        if identifier in kinds:
            names[identifier] = f"{kinds[identifier]} {left[kinds[identifier]]}"
            left[kinds[identifier]] -= 1
        else:
            names[identifier] = identifier.replace("_", " ")
    return names


def _kind(identifier: str) -> str:
    kind = identifier.split("_bar_", 1)[0]
    return f"{kind}basin" if "basin" in identifier and not kind.endswith("basin") else kind
