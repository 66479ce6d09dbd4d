"""Recipes of warm starts: found by environment, and read without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rose.envs.environment_registry import find_environment
from rose.errors import ConfigError
from rose.models.presets import find_preset
from rose.train.recipes import RECIPES, find_recipe


@pytest.mark.parametrize("environment", RECIPES)
def test_a_recipe_names_an_environment_and_a_preset_that_exist(environment):
    recipe = find_recipe(environment)
    assert recipe is RECIPES[environment] and recipe.environment == environment
    assert find_environment(recipe.environment) and find_preset(recipe.preset)
    assert recipe.games >= recipe.rows, "an epoch has at least one batch"


def test_an_environment_without_a_recipe_is_refused():
    with pytest.raises(ConfigError, match="no recipe for a warm start on frozenlake-8x8") as refused:
        find_recipe("frozenlake-8x8")
    assert "rollout_model=FOLDER" in str(refused.value) and "frozenlake-plan" in str(refused.value)


def test_reading_a_recipe_loads_no_torch():
    program = "import sys, rose.train.recipes, rose.train.train_settings; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
