"""What to do, as frozen values; every decision carries its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to run steps of at most this size until `until_s`; an expired grant is a closed gate.

    Whoever can look at a plan before running it drops one whose upper estimate is over `step_s_max`.
    """

    tokens: int
    sequences: int
    until_s: float
    reason: str = ""
    step_s_max: float = math.inf

    def is_open(self, now_s: float) -> bool:
        return self.tokens > 0 and self.sequences > 0 and now_s < self.until_s
