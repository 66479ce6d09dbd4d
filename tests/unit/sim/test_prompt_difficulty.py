"""Prompts and their difficulty."""

from __future__ import annotations

import random

from rose.sim.batch_cluster import PlannedTrajectory, PlannedTurn
from rose.sim.prompt_difficulty import Difficulty, PromptSource


def draw(name: str, chance: random.Random) -> list[PlannedTrajectory]:
    turns = (PlannedTurn(10, chance.randint(1, 9), 0.0),)
    return [PlannedTrajectory(f"{name}-{member}", name, turns) for member in range(16)]


def mixed_share(step: int) -> float:
    source = PromptSource(draw, Difficulty(0.6, 0.9, 0.272), 3)
    return sum(source.group(step).is_mixed for _ in range(600)) / 600


def test_training_makes_prompts_easier_and_demand_grow() -> None:
    first, last = mixed_share(0), mixed_share(24)
    assert first > 0.7 and 3.5 < first / last < 9


def test_the_same_seed_gives_the_same_groups() -> None:
    first, second = (PromptSource(draw, Difficulty(), 5) for _ in range(2))
    assert [first.group(0) for _ in range(5)] == [second.group(0) for _ in range(5)]
    assert first.drawn == 5


def test_solve_rates_at_the_ends_stay_finite() -> None:
    hard = Difficulty(1e-3, 1e3, 0.1)
    assert all(0 < hard.solve_rate(step, random.Random(step)) < 1 for step in range(50))
