"""ALFWorld: errands in a household, in text. The rules and texts are ALFWorld's, played by TextWorld.

Every seed is another household (`households`), or another game of the official data set (`official`). The agent writes
one command, such as `take mug 1 from cabinet 1`: the words between `<answer>` and `</answer>` if there are such, else
its last line. The reward is 1 when the task is done. A command that is not possible costs a turn and a little reward.
The view `short` has the same facts in few characters and no list of commands, so that thirty turns fit into the context
of a small model that reads bytes. The view `full` has ALFWorld's own sentences, and the list of possible commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from rose.envs.alfworld.expert import Expert, plan_of
from rose.envs.alfworld.game_connection import GameConnection, check_packages
from rose.envs.alfworld.households import KINDS, PLACES_MAX, PLACES_MIN, THINGS_MAX, draw_household, problem
from rose.envs.alfworld.official import check_data, official_game
from rose.envs.environment import Outcome
from rose.errors import ConfigError

View = Literal["short", "full"]
SPLITS = ("train", "valid_seen", "valid_unseen")
ANSWER = re.compile(r"<answer>([^<]*)</answer>\s*\Z")
WELCOME = "-= Welcome to TextWorld, ALFRED! =-"


@dataclass(frozen=True, slots=True)
class AlfworldSettings:
    """Settings of ALFWorld. `data` is the folder of the official games, or ALFWORLD_DATA; empty draws households."""

    tasks: str = ",".join(KINDS)
    places: int = 7
    things: int = 8
    turns_max: int = 30
    view: View = "short"
    data: str = ""
    split: str = "train"
    invalid_penalty: float = 0.05

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ConfigError(f"ALFWorld has no tasks {self.tasks!r}", hint=f"there are {', '.join(KINDS)}")
        if self.view not in ("short", "full"):
            raise ConfigError(f"there is no view {self.view!r} of a household", hint="use short or full")
        if self.split not in SPLITS:
            raise ConfigError(f"ALFWorld has no split {self.split!r}", hint=f"there are {', '.join(SPLITS)}")
        if not PLACES_MIN <= self.places <= PLACES_MAX or not 2 <= self.things <= THINGS_MAX:
            limits = f"{PLACES_MIN} to {PLACES_MAX} places and 2 to {THINGS_MAX} things"
            raise ConfigError(f"a household has {limits}, not {self.places} and {self.things}")
        if self.turns_max < 1 or self.invalid_penalty < 0:
            raise ConfigError("ALFWorld needs turns_max >= 1 and invalid_penalty >= 0")

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.tasks.split(",") if part.strip())


class Alfworld:
    """One household at a time, each game in a process of its own."""

    is_quick = False

    def __init__(self, settings: AlfworldSettings | None = None) -> None:
        self.settings = settings or AlfworldSettings()
        check_packages()
        if self.settings.data:
            check_data(self.settings.data, self.settings.split, self.settings.kinds)
        self.plan: tuple[str, ...] = ()
        self.commands: tuple[str, ...] = ()
        self._expert: Expert | None = None
        self._game: GameConnection | None = None
        self._turns = 0

    def reset(self, seed: int) -> str:
        self.close()
        self._turns = 0
        settings = self.settings
        if settings.data:
            self.plan, self._expert = (), None
            request = {"file": str(official_game(settings.data, settings.split, settings.kinds, seed))}
        else:
            household = draw_household(seed, settings.kinds, settings.places, settings.things)
            self.plan, self._expert = plan_of(household), Expert(household)
            request = {"problem": problem(household), "task": household.task}
        self._game = GameConnection(request)
        return self._observation(self._game.first)

    def step(self, action: str) -> Outcome:
        assert self._game is not None, "step before reset"
        self._turns += 1
        command = command_of(action)
        answer = self._game.ask({"command": command})
        is_won, is_valid = bool(answer["is_won"]), bool(answer["is_valid"])
        if is_valid and self._expert is not None:
            self._expert.on_command(command)
        reward = 1.0 if is_won else 0.0 if is_valid else -self.settings.invalid_penalty
        is_done = is_won or self._turns >= self.settings.turns_max
        return Outcome(self._observation(answer), reward, is_done, is_won, is_valid)

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None

    def best_action(self) -> str:
        """Return an expert's next command, for imitation; `look` when all is done. Official games ask a planner."""
        assert self._game is not None, "best_action before reset"
        if self._expert is not None:
            return self._expert.next() or "look"
        commands = self._game.ask({"plan": True})["plan"]
        return str(commands[0]) if commands else "look"

    def _observation(self, answer: dict[str, Any]) -> str:
        self.commands = tuple(answer["commands"])
        if self.settings.view == "short":
            return shortened(answer["text"])
        return f"{answer['text'].removeprefix(WELCOME).strip()}\nYou can: {', '.join(self.commands)}."


def command_of(action: str) -> str:
    """Return the command in what the agent wrote."""
    match = ANSWER.search(action)
    lines = (match[1] if match else action).strip().splitlines()
    last = lines[-1] if lines else ""
    return " ".join(last.lower().strip(" \t>.`'\"").split())


_SHORTER = (
    (re.compile(r"\s+"), " "),
    (re.compile(rf"^{re.escape(WELCOME)} "), ""),
    (re.compile(r"You are in the middle of a room\. Looking quickly around you, you see"), "You see:"),
    (re.compile(r"^(You see: [^.]*\.) Your task is to: (.*)$"), r"Task: \2 \1"),
    (re.compile(r"You (?:arrive at|open the) [^.]*\. "), ""),
    (re.compile(r", you see "), ": "),
    (re.compile(r"(?<=[:,] )(?:and )?an? "), ""),
)


def shortened(text: str) -> str:
    """Return ALFWorld's sentence with the same facts and fewer words."""
    for pattern, shorter in _SHORTER:
        text = pattern.sub(shorter, text)
    return text.strip()
