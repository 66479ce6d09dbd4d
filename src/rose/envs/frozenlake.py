"""FrozenLake in text, on gymnasium's engine: walk over the ice to the goal, and into no hole.

Every seed is another random map that can be solved. The view `egocentric` is one line: where the walker stands, and
what lies to its left, below, to its right and above, such as `0,1 L_D_ROU#` (`_` ice, `O` hole, `G` goal, `#` edge).
It never shows the whole map, so the history matters, and a model of a million weights learns to read it in minutes.
The view `grid` is the whole map with the walker as `P`. The same model learns a route from it, but not to read it.

An action is `<answer>Right</answer>`, with anything before it. Any other text costs a turn and a little reward.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from rose.envs.environment import Outcome
from rose.errors import ConfigError

View = Literal["egocentric", "grid"]
ACTIONS = ("Left", "Down", "Right", "Up")  # gymnasium's numbers are their places here
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
ANSWER = re.compile(r"<answer>\s*(Left|Down|Right|Up)\s*</answer>\s*\Z")
ICE, HOLE, GOAL, EDGE, WALKER = "_", "O", "G", "#", "P"
SHOWN = {"S": ICE, "F": ICE, "H": HOLE, "G": GOAL}


@dataclass(frozen=True, slots=True)
class LakeSettings:
    """Settings of FrozenLake."""

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
    """One walker. A slippery lake moves it sideways as often as in the chosen direction."""

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
        match = ANSWER.search(action)
        if match is None:
            return Outcome(self._observation(), -self.settings.invalid_penalty, is_last, is_valid=False)
        place, reward, is_over, _, _ = self._engine.step(ACTIONS.index(match[1]))
        self._place = int(place)
        return Outcome(self._observation(), float(reward), bool(is_over) or is_last, is_success=reward > 0)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def best_action(self) -> str:
        """Return the first move of a shortest way to the goal, for an expert to imitate."""
        size = self.settings.size
        first_moves = {self._place: ""}
        queue = deque([self._place])
        while queue:
            place = queue.popleft()
            row, column = divmod(place, size)
            if self._cell(row, column) == GOAL:
                return first_moves[place]
            for action, (down, right) in zip(ACTIONS, MOVES):
                after = (row + down) * size + column + right
                if self._cell(row + down, column + right) in (ICE, GOAL) and after not in first_moves:
                    first_moves[after] = first_moves[place] or action
                    queue.append(after)
        return ACTIONS[0]  # in a hole there is no way, and no next move

    def surroundings(self) -> dict[str, str]:
        """Return the cell in each direction, as it is shown: ice, hole, goal or edge."""
        row, column = divmod(self._place, self.settings.size)
        return {action: self._cell(row + down, column + right) for action, (down, right) in zip(ACTIONS, MOVES)}

    def _cell(self, row: int, column: int) -> str:
        size = self.settings.size
        return SHOWN[self._map[row][column]] if 0 <= row < size and 0 <= column < size else EDGE

    def _observation(self) -> str:
        row, column = divmod(self._place, self.settings.size)
        if self.settings.view == "egocentric":
            around = "".join(action[0] + cell for action, cell in self.surroundings().items())
            return f"{row},{column} {around}"
        return self.board()

    def board(self) -> str:
        """Return the whole map with the walker."""
        size = self.settings.size
        row, column = divmod(self._place, size)
        cells = [[self._cell(r, c) for c in range(size)] for r in range(size)]
        cells[row][column] = WALKER
        return "\n".join("".join(line) for line in cells)


@functools.cache
def _toy_text() -> ModuleType:
    """Import gymnasium late: it takes a while, and only this environment needs it."""
    try:
        from gymnasium.envs.toy_text import frozen_lake
    except ImportError as error:
        raise ConfigError("FrozenLake needs the package gymnasium", hint="pip install gymnasium") from error
    return frozen_lake
