"""Two guards against the ways a small RL job dies.

A batch now and then gives a gradient many times its usual size, and one such update can ruin the weights.
`SpikeGuard` skips an update whose gradient norm is far above the median of the accepted ones.

A ruined model fails everywhere alike: then every group is without variance, dynamic sampling drops them all, and
training would stand still for ever without an error. `StarvationGuard` counts steps in a row that kept no group,
and after too many says to roll back to the weights of the last step that had something to learn from, or to stop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Literal

NORMS_MIN = 5  # fewer say little about what is usual
NORMS_KEPT = 30

Verdict = Literal["fine", "starved", "roll_back", "stop"]


class SpikeGuard:
    """Ask `is_spike` of every gradient norm before the update."""

    def __init__(self, factor: float, norms: Iterable[float] = ()) -> None:
        self.factor = factor
        self.norms: deque[float] = deque(norms, maxlen=NORMS_KEPT)

    def is_spike(self, norm: float) -> bool:
        """Whether to skip this update. A skipped norm does not become usual."""
        assert math.isfinite(norm)
        if len(self.norms) >= NORMS_MIN and norm > self.factor * median(self.norms):
            return True
        if norm > 0:  # a batch that is clipped altogether says nothing about what is usual
            self.norms.append(norm)
        return False


class StarvationGuard:
    """Tell it how many groups every step kept."""

    def __init__(self, steps_max: int, roll_backs_max: int) -> None:
        self.steps_max = steps_max
        self.roll_backs_max = roll_backs_max
        self.starved_steps = 0
        self.roll_backs = 0

    def observe(self, groups_kept: int) -> Verdict:
        if groups_kept:
            self.starved_steps = 0
            return "fine"
        self.starved_steps += 1
        if self.starved_steps < self.steps_max:
            return "starved"
        self.starved_steps = 0
        if self.roll_backs >= self.roll_backs_max:
            return "stop"
        self.roll_backs += 1
        return "roll_back"
