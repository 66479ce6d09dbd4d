"""A batch of trajectories on modelled workers under the real router and provisioner."""

from __future__ import annotations

import pytest

from rose.core.router import Router
from rose.engines.profiles import load_profile
from rose.sim.batch_cluster import BatchCluster, PlannedTrajectory, PlannedTurn
from rose.sim.lent_timeline import LentTimeline
from rose.sim.supply_terms import ACTIVATION_S

PROFILE = load_profile("h800-qwen3-8b")
TIMELINE = LentTimeline((1.0,) * 8, (200_000,) * 8, (None,) * 8, 1.0, 1, tuple(0.25 * edge for edge in range(9)))


def trajectories(count: int, env_s: float = 0.0) -> list[PlannedTrajectory]:
    turns = tuple(PlannedTurn(500 * number, 100, env_s) for number in (1, 2, 3))
    return [PlannedTrajectory(f"t{number}", "g", turns) for number in range(count)]


def test_every_turn_runs_once_and_finds_its_prefix() -> None:
    result = BatchCluster(Router(), PROFILE, 2, [], trajectories(4)).run()
    assert len(result.turn_s) == 12 and len(result.end_s) == 4
    assert result.end_s[-1] == result.completion_s
    assert result.prompt_tokens == 4 * (500 + 1000 + 1500)
    assert result.cached_tokens == result.known_tokens == 4 * (600 + 1100)
    assert result.evictions == 0 and result.borrowed_s == 0


def test_the_environment_takes_its_time_between_turns() -> None:
    quick, slow = (BatchCluster(Router(), PROFILE, 1, [], trajectories(1, env_s)).run() for env_s in (0.0, 10.0))
    assert slow.completion_s == pytest.approx(quick.completion_s + 20.0, abs=1.0)


def test_a_device_is_borrowed_when_there_is_no_other_worker() -> None:
    result = BatchCluster(Router(), PROFILE, 0, [TIMELINE], trajectories(3)).run()
    assert len(result.end_s) == 3 and result.borrowed_s > 0
    assert result.completion_s > ACTIVATION_S
