"""The recipes of warm starts, by environment, apart from the code that follows them: reading them loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rose.errors import ConfigError

IMITATION_SEEDS = 1 << 41  # from here on: maps of imitated games are neither trained nor evaluated on


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a warm start; the digest its checkpoint is kept under covers all of them."""

    environment: str = "frozenlake"
    preset: str = "frozenlake-1m"
    games: int = 320
    epochs: int = 2
    rows: int = 8
    learning_rate: float = 1e-3
    warm_up_updates: int = 20
    gradient_norm_max: float = 1.0
    noise: float = 0.63
    turns_max: int = 0  # of an imitated game; 0 plays to the end
    seed: int = 0


RECIPES = {
    "frozenlake": Recipe(),
    "frozenlake-plan": Recipe(
        environment="frozenlake-plan",
        games=520,
        epochs=1,
        rows=4,
        learning_rate=2e-3,
        warm_up_updates=40,
        turns_max=5,
        noise=0.5,
    ),
}


def find_recipe(environment: str) -> Recipe:
    """Return the recipe of an environment, or raise ConfigError if it has none."""
    if environment not in RECIPES:
        raise ConfigError(
            f"there is no recipe for a warm start on {environment}: the model to train has to be given",
            hint=f"--set rollout_model=FOLDER, a model that can play it a little; or play {' or '.join(RECIPES)}",
        )
    return RECIPES[environment]
