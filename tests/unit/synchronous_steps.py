"""Steps of a synchronous run without a trainer: what the buffer hands out, one batch after the other."""

from __future__ import annotations

from typing import Any

from rose.core.staleness import StalenessRules
from rose.run.resuming import ResumePoint
from rose.run.rollout_buffer import RolloutBuffer
from rose.run.run_rollouts import Played, Rollouts

ANY_VERSION = -1  # of weights that no token is too old for


async def play_step(rollouts: Rollouts) -> Played:
    [played], _ = await play_steps(rollouts, 1)
    return played


async def play_steps(
    rollouts: Rollouts, steps: int, start: ResumePoint | None = None
) -> tuple[list[Played], dict[str, Any]]:
    """Play so many steps, and return them with what a checkpoint says of the buffer."""
    groups, start = rollouts._settings.groups, start or ResumePoint()
    buffer = RolloutBuffer(rollouts, groups.rules(), StalenessRules(0, groups.groups, start.step + steps), start)
    played = []
    try:
        buffer.begin(ANY_VERSION)
        for step in range(start.step, start.step + steps):
            buffer.reach(step)
            played.append(await buffer.take())
        return played, buffer.state()
    finally:
        await buffer.leave()
