"""The owner's limit on compute: rollouts get at most this share of a device's time.

A bucket of seconds: time fills it at the share, lent steps empty it. It holds little, so that a quiet minute is no
licence for the next one, and may go below empty by the one step that emptied it.
"""

from __future__ import annotations

BUCKET_S = 0.25  # dozens of steps; over any second the share holds to within this


class Ration:
    """Tell it of every lent step; ask before the next one."""

    def __init__(self, share: float = 1.0) -> None:
        assert 0 <= share <= 1
        self.share = share
        self._level_s = BUCKET_S
        self._at_s: float | None = None

    def spend(self, seconds: float, now_s: float) -> None:
        self._fill(now_s)
        self._level_s -= seconds

    def is_spent(self, now_s: float) -> bool:
        """Whether rollouts have had their share for now."""
        if self.share >= 1:
            return False
        self._fill(now_s)
        return self._level_s <= 0 or self.share == 0

    def within_s(self, seconds: float, now_s: float) -> float:
        """How much of so many seconds from now on steps that follow one another may have."""
        if self.share >= 1 or self.share == 0:
            return self.share * seconds
        self._fill(now_s)
        return max(0.0, min(seconds, self._level_s + self.share * seconds))

    def _fill(self, now_s: float) -> None:
        if self._at_s is not None:
            self._level_s = min(BUCKET_S, self._level_s + self.share * (now_s - self._at_s))
        self._at_s = now_s
