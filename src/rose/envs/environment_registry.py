"""Environments by name, each with its settings; names that differ only in numbers share a class.

A job may change single settings on top of a name: its options.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rose.config.loading import apply_layer
from rose.envs.alfworld.alfworld_environment import Alfworld, AlfworldSettings
from rose.envs.environment import Environment
from rose.envs.frozenlake import FrozenLake, LakeSettings
from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """An environment by name. `answer_tokens_max` bounds one turn of the agent; `summary` is for people."""

    settings: Any
    make: Callable[[Any], Environment]
    answer_tokens_max: int
    summary: str
    is_planned: bool = False  # the agent writes a short plan before its answer


SMALL = LakeSettings()
SLIPPERY = LakeSettings(is_slippery=True, turns_max=20)
LARGE = LakeSettings(size=8, turns_max=30)
LARGE_SLIPPERY = replace(LARGE, is_slippery=True, turns_max=60)
FULL = AlfworldSettings(view="full")
OFFICIAL = replace(FULL, data="ALFWORLD_DATA", turns_max=50)

ENVIRONMENTS: dict[str, EnvironmentEntry] = {
    "frozenlake": EnvironmentEntry(SMALL, FrozenLake, 8, "4x4, one-line view"),
    "frozenlake-grid": EnvironmentEntry(replace(SMALL, view="grid"), FrozenLake, 8, "4x4, the whole map"),
    "frozenlake-slippery": EnvironmentEntry(SLIPPERY, FrozenLake, 8, "4x4, slippery"),
    "frozenlake-8x8": EnvironmentEntry(LARGE, FrozenLake, 8, "8x8, one-line view"),
    "frozenlake-8x8-slippery": EnvironmentEntry(LARGE_SLIPPERY, FrozenLake, 8, "8x8, slippery"),
    "frozenlake-plan": EnvironmentEntry(
        replace(SMALL, turns_max=16), FrozenLake, 128, "4x4, a short plan before every answer", is_planned=True
    ),
    "alfworld": EnvironmentEntry(AlfworldSettings(), Alfworld, 48, "errands in drawn households, few words"),
    "alfworld-full": EnvironmentEntry(FULL, Alfworld, 512, "the same, in ALFWorld's own words"),
    "alfworld-official": EnvironmentEntry(OFFICIAL, Alfworld, 512, "ALFWorld's own data set"),
}


def find_environment(name: str) -> EnvironmentEntry:
    """Return the entry of this name, or raise a ConfigError that names the nearest one."""
    if name not in ENVIRONMENTS:
        raise ConfigError(f"there is no environment {name!r}", hint=_nearest(name, ENVIRONMENTS))
    return ENVIRONMENTS[name]


def make_environment(name: str, **options: Any) -> Environment:
    """Return a new environment by its name, with these settings changed. Raises ConfigError."""
    return find_environment(name).make(environment_settings(name, options))


def environment_settings(name: str, options: Mapping[str, Any]) -> Any:
    """Return the settings of the name with the options applied. Raises ConfigError."""
    settings = find_environment(name).settings
    known = [field.name for field in fields(settings)]
    for key in options:
        if key not in known:
            raise ConfigError(f"environment {name} has no option {key!r}", hint=_nearest(key, known))
    return apply_layer(settings, dict(options), f"in the options of {name}") if options else settings


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"{f'did you mean {near[0]}? ' if near else ''}there are {', '.join(known)}"
