"""How hard prompts are, and which groups teach something: what makes the demand of DAPO vary from step to step.

A prompt's solve rate is drawn from a beta distribution and rises with training. A group whose members all succeed or
all fail has no gradient; DAPO's dynamic sampling discards it and samples another prompt, so the number of groups that
a step needs is one over the share of mixed groups.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rose.sim.batch_cluster import PlannedTrajectory

DrawGroup = Callable[[str, random.Random], Sequence[PlannedTrajectory]]  # name of the group, chance
RATE_MIN = 1e-4  # a solve rate of 0 or 1 has no finite logit


@dataclass(frozen=True, slots=True)
class Difficulty:
    """Solve rates before training are Beta(alpha, beta); every step adds `gain` to their logits."""

    alpha: float = 0.6
    beta: float = 0.9
    gain: float = 0.04

    def solve_rate(self, step: int, chance: random.Random) -> float:
        first = min(1 - RATE_MIN, max(RATE_MIN, chance.betavariate(self.alpha, self.beta)))
        return 1 / (1 + math.exp(-(math.log(first / (1 - first)) + self.gain * step)))


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """The trajectories of one prompt, and how many of them are correct."""

    name: str
    trajectories: tuple[PlannedTrajectory, ...]
    correct: int

    @property
    def is_mixed(self) -> bool:
        return 0 < self.correct < len(self.trajectories)


class PromptSource:
    """Draws groups; the same seed gives the same groups in the same order, whatever consumes them."""

    def __init__(self, draw: DrawGroup, difficulty: Difficulty, seed: int) -> None:
        self._draw, self._difficulty, self._seed = draw, difficulty, seed
        self.drawn = 0

    def group(self, step: int) -> PlannedGroup:
        """Return the next prompt's group as the weights of `step` answer it."""
        number, self.drawn = self.drawn, self.drawn + 1
        chance = random.Random(f"group {self._seed} {number}")
        name = f"{number}"
        trajectories = tuple(self._draw(name, chance))
        rate = self._difficulty.solve_rate(step, chance)
        correct = sum(chance.random() < rate for _ in trajectories)
        return PlannedGroup(name, trajectories, correct)
