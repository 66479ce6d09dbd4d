"""The games of ALFWorld's own data set, when the user has it: `alfworld-download`, and ALFWORLD_DATA says where."""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path

from rose.envs.alfworld.households import KINDS
from rose.errors import ConfigError

FROM_VARIABLE = "ALFWORLD_DATA"
FOLDER = "json_2.1.1"
LEFT_OUT = ("movable", "Sliced")  # ALFWorld itself does not play them as text


def official_game(folder: str, split: str, kinds: tuple[str, ...], seed: int) -> Path:
    """The game of this seed: any one of the split that is of these kinds and can be solved."""
    found = _games(_data_folder(folder), split, kinds)
    first = random.Random(f"official/{seed}").randrange(len(found))
    for game in (*found[first:], *found[:first]):
        if _is_solvable(game):
            return game
    raise ConfigError(f"no game of {split} in {_data_folder(folder)} is marked as solvable")


def check_data(folder: str, split: str, kinds: tuple[str, ...]) -> None:
    """Raises ConfigError if there is nothing to play."""
    _games(_data_folder(folder), split, kinds)


def _data_folder(folder: str) -> Path:
    if folder != FROM_VARIABLE:
        return Path(folder).expanduser()
    if not os.environ.get(FROM_VARIABLE):
        hint = f"run alfworld-download and set {FROM_VARIABLE} to its folder, or play `alfworld`, which needs no data"
        raise ConfigError("ALFWorld's own games need its data set, and ALFWORLD_DATA is not set", hint=hint)
    return Path(os.environ[FROM_VARIABLE]).expanduser()


@functools.lru_cache(maxsize=8)
def _games(folder: Path, split: str, kinds: tuple[str, ...]) -> tuple[Path, ...]:
    """In the order of their names, so that a seed means the same game on every machine."""
    root = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    tasks = tuple(f"{KINDS[kind]}-" for kind in kinds)
    found = sorted(root.glob(f"{split}/*/*/game.tw-pddl"))
    wanted = [
        path
        for path in found
        if path.parts[-3].startswith(tasks) and not any(word in path.parts[-3] for word in LEFT_OUT)
    ]
    if not wanted:
        hint = f"there should be {FOLDER}/{split}/TASK/TRIAL/game.tw-pddl; run alfworld-download"
        raise ConfigError(f"{folder} has no ALFWorld games of {split}", hint=hint)
    return tuple(wanted)


def _is_solvable(game: Path) -> bool:
    try:
        data = json.loads(game.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("solvable") is True
