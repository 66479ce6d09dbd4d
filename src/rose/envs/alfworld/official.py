"""The games of ALFWorld's own data set, if `alfworld-download` has fetched it and ALFWORLD_DATA names its folder.

Held-out seeds play `valid_unseen`, whose rooms are in no other split. Where that is missing, or is itself trained on,
every tenth task of the split is kept apart for them, with all of its trials.
"""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path

from rose.envs.alfworld.households import KINDS
from rose.envs.environment import HELD_OUT_SEEDS
from rose.errors import ConfigError

FROM_VARIABLE = "ALFWORLD_DATA"
FOLDER = "json_2.1.1"
LEFT_OUT = ("movable", "Sliced")  # ALFWorld itself does not play them as text
HELD_OUT_SPLIT = "valid_unseen"
HELD_OUT_EVERY = 10  # tasks, of a split that has to do for both


def official_game(folder: str, split: str, kinds: tuple[str, ...], seed: int) -> Path:
    """Return the game of this seed: a solvable one of these kinds, from the seed's part of the games."""
    games = _part(_data_folder(folder), split, kinds, is_held_out=seed >= HELD_OUT_SEEDS)
    first = random.Random(f"official/{seed}").randrange(len(games))
    for game in (*games[first:], *games[:first]):
        try:
            data = json.loads(game.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(data, dict) and data.get("solvable") is True:
            return game
    raise ConfigError(f"no game of {games[0].parts[-4]} in {_data_folder(folder)} is marked as solvable")


def check_data(folder: str, split: str, kinds: tuple[str, ...]) -> None:
    """Raise a ConfigError if there is nothing to play."""
    _part(_data_folder(folder), split, kinds, is_held_out=False)


def _data_folder(folder: str) -> Path:
    if folder != FROM_VARIABLE:
        return Path(folder).expanduser()
    if not os.environ.get(FROM_VARIABLE):
        hint = f"run alfworld-download and set {FROM_VARIABLE} to its folder, or play `alfworld`, which needs no data"
        raise ConfigError("ALFWorld's own games need its data set, and ALFWORLD_DATA is not set", hint=hint)
    return Path(os.environ[FROM_VARIABLE]).expanduser()


def _part(folder: Path, split: str, kinds: tuple[str, ...], *, is_held_out: bool) -> tuple[Path, ...]:
    """Return the games for training, or those only for evaluation: no game is in both."""
    games = _games(folder, split, kinds)
    if not games:
        hint = f"there should be {FOLDER}/{split}/TASK/TRIAL/game.tw-pddl; run alfworld-download"
        raise ConfigError(f"{folder} has no ALFWorld games of {split}", hint=hint)
    unseen = _games(folder, HELD_OUT_SPLIT, kinds) if split != HELD_OUT_SPLIT else ()
    if unseen:
        return unseen if is_held_out else games
    apart = set(sorted({path.parts[-3] for path in games})[1::HELD_OUT_EVERY])
    if is_held_out and not apart:
        hint = "run alfworld-download; or evaluate never: --set evaluation.every_steps=0"
        raise ConfigError(f"{folder} has a single task in {split}: none is left to evaluate on", hint=hint)
    return tuple(path for path in games if (path.parts[-3] in apart) == is_held_out)


@functools.lru_cache(maxsize=8)
def _games(folder: Path, split: str, kinds: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the games in the order of their names, so that a seed means the same game on every machine."""
    root = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    tasks = tuple(f"{KINDS[kind]}-" for kind in kinds)
    paths = sorted(root.glob(f"{split}/*/*/game.tw-pddl"))
    return tuple(
        path
        for path in paths
        if path.parts[-3].startswith(tasks) and not any(word in path.parts[-3] for word in LEFT_OUT)
    )
