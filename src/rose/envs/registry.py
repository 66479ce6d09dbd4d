"""Environments by name, each with the settings that make it what it is.

Names that differ only in numbers share a class; a job may change single settings on top of a name: its options.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rose.config.load import changed
from rose.envs.alfworld.environment import Alfworld, AlfworldSettings
from rose.envs.base import Environment
from rose.envs.frozenlake import FrozenLake, LakeSettings
from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """`answer_tokens_max` is how long one turn of the agent may be; `summary` is for people."""

    settings: Any
    make: Callable[[Any], Environment]
    answer_tokens_max: int
    summary: str
    is_planned: bool = False  # the agent writes a short plan before its answer


SMALL = LakeSettings()
LARGE = LakeSettings(size=8, turns_max=30)
LONG = LakeSettings(turns_max=16)
HOUSEHOLD = AlfworldSettings()

ENVIRONMENTS: dict[str, Entry] = {
    "frozenlake": Entry(SMALL, FrozenLake, 8, "4x4, one-line view"),
    "frozenlake-grid": Entry(replace(SMALL, view="grid"), FrozenLake, 8, "4x4, the whole map"),
    "frozenlake-slippery": Entry(replace(SMALL, is_slippery=True, turns_max=20), FrozenLake, 8, "4x4, slippery"),
    "frozenlake-8x8": Entry(LARGE, FrozenLake, 8, "8x8, one-line view"),
    "frozenlake-8x8-slippery": Entry(replace(LARGE, is_slippery=True, turns_max=60), FrozenLake, 8, "8x8, slippery"),
    "frozenlake-plan": Entry(LONG, FrozenLake, 128, "4x4, a short plan before every answer", is_planned=True),
    "alfworld": Entry(HOUSEHOLD, Alfworld, 48, "errands in drawn households, few words"),
    "alfworld-full": Entry(replace(HOUSEHOLD, view="full"), Alfworld, 512, "the same, in ALFWorld's own words"),
    "alfworld-official": Entry(
        replace(HOUSEHOLD, view="full", data="ALFWORLD_DATA", turns_max=50), Alfworld, 512, "ALFWorld's own data set"
    ),
}


def find_environment(name: str) -> Entry:
    """The entry of this name, or a ConfigError that names the nearest one."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    near = difflib.get_close_matches(name, ENVIRONMENTS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"there is no environment {name!r}", hint=f"{hint}there are {', '.join(ENVIRONMENTS)}")


def make_environment(name: str, **options: Any) -> Environment:
    """A fresh environment, with single settings changed. Raises ConfigError."""
    return find_environment(name).make(environment_settings(name, options))


def environment_settings(name: str, options: Mapping[str, Any]) -> Any:
    """Those of the name with the options laid over them. Raises ConfigError."""
    settings = find_environment(name).settings
    known = [field.name for field in fields(settings)]
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"environment {name} has no option {key!r}", hint=f"{hint}there are {', '.join(known)}")
    return changed(settings, options, f"in the options of {name}") if options else settings
