"""When a burst of serving evicts many turns at once, how fast they may go on elsewhere.

Every re-routed turn brings its whole prompt to a worker that has none of it, and while prompts are computed, those who
run there get their tokens late. A few such turns are no matter. When a fleet-wide burst evicts everything, all prompts
would arrive at the workers that are left, the dedicated ones, in the same second, and stop them for as long as it takes
to compute them all. So beyond a few, re-routed turns are placed at the pace at which the workers that are left can
compute prompts in part of their time; turns that were not evicted never wait for this.

The pace is what the caller says of the workers that are left (`survivors`). It is a bucket of permits: it fills at that
pace, holds a few per worker, and a re-routed turn that is placed takes one.
"""

from __future__ import annotations

from dataclasses import dataclass

DUST = 1e-9  # of a permit: what adding up seconds may lose


@dataclass(frozen=True, slots=True)
class PacingRules:
    burst_turns: int = 4  # per surviving worker, that may go on at once
    prompt_share: float = 0.5  # of the survivors' time may go into prompts of re-routed turns
    turns_per_s_min: float = 2.0  # however little is known of them


class Pacer:
    """One per pool. Tell it of evictions; ask `may_place` last, just before a re-routed turn is placed."""

    def __init__(self, rules: PacingRules | None = None) -> None:
        self.rules = rules or PacingRules()
        self._burst = float(self.rules.burst_turns)
        self._turns_per_s = self.rules.turns_per_s_min
        self._permits = self._burst
        self._filled_s = 0.0
        self._owed = 0  # turns that were evicted and have not been placed again

    def survivors(self, workers: int, prompts_per_s: float) -> None:
        """Who is left to take re-routed turns, and how many such prompts they could compute in a second."""
        self._burst = float(self.rules.burst_turns * max(1, workers))
        self._turns_per_s = max(self.rules.turns_per_s_min, self.rules.prompt_share * prompts_per_s)

    def evicted(self, count: int, now_s: float) -> None:
        """So many turns were just evicted or lost."""
        self._fill(now_s)
        self._owed += count

    def may_place(self, now_s: float, is_rerouted: bool) -> bool:
        """Whether a turn may be placed now; a yes to a re-routed one counts as done."""
        if not is_rerouted:
            return True
        self._fill(now_s)
        if self._permits < 1.0 - DUST:
            return False
        self._permits -= 1.0
        self._owed = max(0, self._owed - 1)
        return True

    def next_s(self) -> float | None:
        """When the next re-routed turn may be placed; None if nobody has to wait."""
        if self._permits >= 1.0 - DUST or not self._owed:
            return None
        return self._filled_s + (1.0 - self._permits) / self._turns_per_s

    def _fill(self, now_s: float) -> None:
        """A clock that jumps back gives nothing and takes nothing."""
        passed_s = max(0.0, now_s - self._filled_s)
        self._permits = min(self._burst, self._permits + passed_s * self._turns_per_s)
        self._filled_s = now_s
