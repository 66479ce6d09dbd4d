"""What no router can beat."""

from __future__ import annotations

import pytest

from rose.core.router import Router
from rose.engines.profiles import load_profile
from rose.sim.batch_cluster import BatchCluster, PlannedTrajectory, PlannedTurn
from rose.sim.routing_bound import alone_s, clairvoyant_s, lower_bound_s
from rose.sim.trajectory_router import TrajectoryRouter

PROFILE = load_profile("h800-qwen3-8b")


def batch(count: int, prompt: int, output: int) -> list[PlannedTrajectory]:
    turns = (PlannedTurn(prompt, output, 1.0), PlannedTurn(prompt + output, output, 1.0))
    return [PlannedTrajectory(f"{number}", "g", turns) for number in range(count)]


@pytest.mark.parametrize("count, prompt, output", [(1, 200, 500), (100, 200, 200), (120, 12_000, 300)])
def test_no_router_is_faster_than_the_bound(count: int, prompt: int, output: int) -> None:
    drawn = batch(count, prompt, output)
    bound_s = clairvoyant_s(PROFILE, 2, [], drawn)
    for router in (Router("cost"), TrajectoryRouter()):
        assert BatchCluster(router, PROFILE, 2, [], drawn).run().completion_s >= 0.99 * bound_s


def test_one_trajectory_alone_takes_its_bound() -> None:
    drawn = batch(1, 200, 500)
    taken_s = BatchCluster(Router("cost"), PROFILE, 1, [], drawn).run().completion_s
    assert taken_s == pytest.approx(alone_s(PROFILE, drawn[0].turns), rel=0.05)
    for bound in (lower_bound_s, clairvoyant_s):
        assert taken_s == pytest.approx(bound(PROFILE, 1, [], drawn), rel=0.05)
