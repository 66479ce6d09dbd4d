"""Environments by name, and their options."""

from __future__ import annotations

import pytest

from rose.envs.alfworld.households import KINDS
from rose.envs.environment_registry import ENVIRONMENTS, find_environment, make_environment
from rose.errors import ConfigError


def test_environments_are_made_by_name_and_options():
    for name in (name for name in ENVIRONMENTS if name.startswith("frozenlake")):
        assert make_environment(name).reset(1)
    assert make_environment("frozenlake", size=8).reset(1)
    with pytest.raises(ConfigError, match="did you mean frozenlake"):
        find_environment("frozenlak")
    with pytest.raises(ConfigError, match=r"did you mean turns_max\? there are size, "):
        make_environment("frozenlake", turn_max=3)
    with pytest.raises(ConfigError, match="`is_slippery` must be true or false, not 'no'"):
        make_environment("frozenlake", is_slippery="no")


def test_alfworld_is_in_the_registry_with_its_options():
    assert {"alfworld", "alfworld-full", "alfworld-official"} <= set(ENVIRONMENTS)
    assert find_environment("alfworld").settings.kinds == tuple(KINDS)
    with pytest.raises(ConfigError, match="did you mean places"):
        make_environment("alfworld", place=3)
