"""Whatever the job: every trajectory counts once, staleness keeps its bound, and a seed gives one result."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.core.router import Router
from rose.engines.profiles import load_profile
from rose.sim.batch_cluster import PlannedTrajectory, PlannedTurn
from rose.sim.job_loop import Algorithm, JobPool, JobResult, JobShape, play_job
from rose.sim.prompt_difficulty import Difficulty, PromptSource
from rose.sim.step_costs import StepCosts
from rose.sim.supply_terms import SupplyTerms, spot_offers, unshared_timeline
from rose.sim.trajectory_router import TrajectoryRouter

PROFILE = load_profile("h800-qwen3-8b")
COSTS = StepCosts(8e9, 8, 989e12, 0.3, 5, 1.6e9, 200.0)


def short_group(name: str, chance: random.Random) -> Sequence[PlannedTrajectory]:
    members = []
    for member in range(4):
        prompt, turns = chance.randint(20, 400), []
        for _ in range(chance.randint(1, 4)):
            output = chance.randint(1, 300)
            turns.append(PlannedTurn(prompt, output, chance.choice([0.0, 2.0])))
            prompt += output + 20
        members.append(PlannedTrajectory(f"{name}-{member}", name, tuple(turns)))
    return members


def played(algorithm: Algorithm, router: str, supply: str, staleness: int, seed: int) -> JobResult:
    terms = {
        "none": SupplyTerms(),
        "spot": SupplyTerms(3.0, offers=spot_offers(3, 20.0, 5.0, 1e4, seed), is_kept=True),
        "cold": SupplyTerms(cold_start_s=1.5),
    }[supply]
    lines = () if supply == "none" else (unshared_timeline(PROFILE),) * 3
    shape = JobShape(algorithm, 3, 3, 1, staleness_max=staleness)
    source = PromptSource(short_group, Difficulty(), seed)
    made = TrajectoryRouter(limit=5) if router == "paper" else Router("cost")
    return play_job(shape, PROFILE, made, source, COSTS, JobPool(lambda now_s: lines, terms))


@pytest.mark.parametrize("router", ["cost", "paper"])
@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "asynchronous"])
@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["none", "spot", "cold"]), st.integers(0, 3), st.integers(0, 10_000))
def test_every_trajectory_is_trained_on_once_and_in_time(
    algorithm: Algorithm, router: str, supply: str, staleness: int, seed: int
) -> None:
    result = played(algorithm, router, supply, staleness, seed)
    trained = [name for step in result.steps for name in step.trained]
    assert len(trained) == len(set(trained)) == 3 * 3 * 4
    assert all(step.played >= len(step.trained) for step in result.steps)
    assert all(0 <= step.staleness <= staleness for step in result.steps)
    assert all(step.rollout_s >= 0 and 0 <= step.allocation_s <= result.seconds for step in result.steps)
    if algorithm != "asynchronous":
        spent = sum(step.rollout_s + step.train_s + step.sync_s for step in result.steps)
        assert result.seconds == pytest.approx(spent)


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["grpo", "dapo", "asynchronous"]),
    st.sampled_from(["cost", "paper"]),
    st.sampled_from(["none", "spot", "cold"]),
    st.integers(0, 10_000),
)
def test_the_same_seed_gives_the_same_job(algorithm: Algorithm, router: str, supply: str, seed: int) -> None:
    assert played(algorithm, router, supply, 2, seed) == played(algorithm, router, supply, 2, seed)
