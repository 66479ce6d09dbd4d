"""FrozenLake in text: walk over the ice to the goal, and into no hole. The engine is gymnasium's.

Every seed is another random map that can be solved. Two views of it:

- `egocentric`, one line: where the walker stands and what lies to its left, below, to its right and above, such as
  `0,1 L_D_ROU#` (`_` ice, `O` hole, `G` goal, `#` edge). The map is never shown whole, so the history matters; a
  model of a million weights learns to read it in minutes.
- `grid`, the whole map with the walker as `P`. The same small model learns a route from it, but not to read it.

An action is `<answer>Right</answer>`, with anything before it: what a model thinks first is its own affair. Anything
else is invalid: it costs a turn and a little reward and moves nobody. The reward is 1 for the goal.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from rose.envs.base import Outcome
from rose.errors import ConfigError

View = Literal["egocentric", "grid"]
ACTIONS = ("Left", "Down", "Right", "Up")  # gymnasium's numbers are their places here
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
ANSWER = re.compile(r"<answer>\s*(Left|Down|Right|Up)\s*</answer>\s*\Z")
ICE, HOLE, GOAL, EDGE, WALKER = "_", "O", "G", "#", "P"
SHOWN = {"S": ICE, "F": ICE, "H": HOLE, "G": GOAL}


@dataclass(frozen=True, slots=True)
class LakeSettings:
    size: int = 4
    is_slippery: bool = False
    view: View = "egocentric"
    turns_max: int = 10
    frozen_share: float = 0.8
    invalid_penalty: float = 0.1

    def __post_init__(self) -> None:
        if self.size not in (4, 8):
            raise ConfigError(f"a frozen lake has size 4 or 8, not {self.size}")
        if self.view not in ("egocentric", "grid"):
            raise ConfigError(f"there is no view {self.view!r} of a frozen lake", hint="use egocentric or grid")
        if self.turns_max < 1 or not 0 < self.frozen_share <= 1 or self.invalid_penalty < 0:
            raise ConfigError("a frozen lake needs turns_max >= 1, 0 < frozen_share <= 1 and invalid_penalty >= 0")


class FrozenLake:
    """One walker. A slippery lake moves it sideways as often as where it wants to go."""

    is_quick = True

    def __init__(self, settings: LakeSettings | None = None) -> None:
        self.settings = settings or LakeSettings()
        self._toy_text = _toy_text()
        self._engine: Any = None
        self._map: list[str] = []
        self._place = 0
        self._turns = 0

    def reset(self, seed: int) -> str:
        settings = self.settings
        self._map = self._toy_text.generate_random_map(size=settings.size, p=settings.frozen_share, seed=seed)
        self._engine = self._toy_text.FrozenLakeEnv(desc=self._map, is_slippery=settings.is_slippery)
        self._place = int(self._engine.reset(seed=seed)[0])
        self._turns = 0
        return self._observation()

    def step(self, action: str) -> Outcome:
        assert self._engine is not None, "step before reset"
        self._turns += 1
        is_last = self._turns >= self.settings.turns_max
        wanted = ANSWER.search(action)
        if wanted is None:
            return Outcome(self._observation(), -self.settings.invalid_penalty, is_last, is_valid=False)
        place, reward, is_over, _, _ = self._engine.step(ACTIONS.index(wanted[1]))
        self._place = int(place)
        return Outcome(self._observation(), float(reward), bool(is_over) or is_last, is_success=reward > 0)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def best_action(self) -> str:
        """The first move of a shortest way to the goal, for an expert to imitate."""
        first_moves = {self._place: ""}
        queue = deque([self._place])
        while queue:
            place = queue.popleft()
            if self._cell(*divmod(place, self.settings.size)) == GOAL:
                return first_moves[place]
            for action, after in self._neighbours(place):
                if after not in first_moves:
                    first_moves[after] = first_moves[place] or action
                    queue.append(after)
        return ACTIONS[0]  # in a hole there is no way, and no next move

    def surroundings(self) -> dict[str, str]:
        """What lies in each direction: ice, hole, goal or edge, as it is shown."""
        row, column = divmod(self._place, self.settings.size)
        return {action: self._cell(row + down, column + right) for action, (down, right) in zip(ACTIONS, MOVES)}

    def _neighbours(self, place: int) -> list[tuple[str, int]]:
        size = self.settings.size
        row, column = divmod(place, size)
        found = []
        for action, (down, right) in zip(ACTIONS, MOVES):
            if self._cell(row + down, column + right) in (ICE, GOAL):
                found.append((action, (row + down) * size + column + right))
        return found

    def _cell(self, row: int, column: int) -> str:
        size = self.settings.size
        return SHOWN[self._map[row][column]] if 0 <= row < size and 0 <= column < size else EDGE

    def _observation(self) -> str:
        size = self.settings.size
        row, column = divmod(self._place, size)
        if self.settings.view == "egocentric":
            around = "".join(action[0] + cell for action, cell in self.surroundings().items())
            return f"{row},{column} {around}"
        cells = [[self._cell(r, c) for c in range(size)] for r in range(size)]
        cells[row][column] = WALKER
        return "\n".join("".join(line) for line in cells)


@functools.cache
def _toy_text() -> ModuleType:
    """gymnasium takes a while to import, and only who plays needs it."""
    try:
        from gymnasium.envs.toy_text import frozen_lake
    except ImportError as error:
        raise ConfigError("FrozenLake needs the package gymnasium", hint="pip install gymnasium") from error
    return frozen_lake
