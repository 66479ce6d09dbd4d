"""A device that serves users or plays rollouts, never both: the models take turns in its memory.

ServerlessLLM's way of sharing, reduced to its cost: while serving has had no work for a moment, its model makes room
for the rollouts' model, and the next request waits until the serving model is loaded again. No admission looks ahead.
"""

from __future__ import annotations

from typing import Any

from rose.sim.lent_timeline import SaturatedDevice

KEEP_ALIVE_S = 0.25  # without a request before serving's model leaves the device


class ReloadDevice(SaturatedDevice):
    """One simulated device with one loaded model at a time; a load takes `reload_s`."""

    def __init__(self, *args: Any, reload_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reload_s = reload_s
        self._is_rollouts = False
        self._served_until_s = 0.0

    def _run_lent_step(self) -> bool:
        has_work = bool(self._waiting or self._running)
        if has_work:
            if self._is_rollouts:
                self._is_rollouts = False
                self._spend(self._reload_s, is_lent=False)
            self._served_until_s = self.now_s
            return False
        if not self._is_rollouts:
            leaves_s = max(self.now_s, self._served_until_s + KEEP_ALIVE_S)
            if self._coming and self._coming[0].at_s <= leaves_s:
                return False
            self._is_rollouts = True
            self._spend(leaves_s - self.now_s + self._reload_s, is_lent=False)
            return True
        return super()._run_lent_step()
