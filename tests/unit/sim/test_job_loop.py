"""The loop of whole jobs: what each algorithm waits for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rose.core.router import Router
from rose.engines.profiles import load_profile
from rose.sim.batch_cluster import PlannedTrajectory, PlannedTurn
from rose.sim.job_loop import Algorithm, JobPool, JobResult, JobShape, play_job
from rose.sim.prompt_difficulty import Difficulty, PromptSource
from rose.sim.step_costs import StepCosts
from rose.sim.supply_terms import ACTIVATION_S, unshared_timeline

PROFILE = load_profile("h800-qwen3-8b")
COSTS = StepCosts(8e9, 8, 989e12, 0.3, 5, 1.6e9, 200.0)
MIXED, SOLVED = Difficulty(50.0, 50.0, 0.0), Difficulty(0.2, 0.2, 0.0)


def group_of(name: str, chance: random.Random) -> Sequence[PlannedTrajectory]:
    """Return a group in which one trajectory of eight is twenty times as long as the others."""
    lengths = [2000 if member == 0 else 100 for member in range(8)]
    return [
        PlannedTrajectory(f"{name}-{member}", name, (PlannedTurn(100, length, 0.0),))
        for member, length in enumerate(lengths)
    ]


def play(
    algorithm: Algorithm, difficulty: Difficulty = MIXED, borrowed: int = 0, costs: StepCosts = COSTS, steps: int = 3
) -> JobResult:
    shape = JobShape(algorithm, 4, steps, 1, staleness_max=2)
    lines = (unshared_timeline(PROFILE),) * borrowed
    source = PromptSource(group_of, difficulty, 1)
    return play_job(shape, PROFILE, Router("cost"), source, costs, JobPool(lambda now_s: lines))


def test_a_grpo_step_plays_what_it_trains_on() -> None:
    result = play("grpo")
    assert [step.played for step in result.steps] == [32, 32, 32] and result.demand_ratio == 1.0
    assert result.steps[1].begin_s == pytest.approx(sum(getattr(result.steps[0], part) for part in (
        "rollout_s", "train_s", "sync_s")))  # fmt: skip


def test_a_dapo_step_replaces_groups_without_a_gradient() -> None:
    assert sum(step.played for step in play("dapo").steps) < 1.2 * 96
    result = play("dapo", SOLVED)
    assert all(len(step.trained) == 32 for step in result.steps)
    assert sum(step.played for step in result.steps) > 1.3 * 96


def test_an_asynchronous_job_overlaps_training_with_rollouts() -> None:
    slow = replace(COSTS, mfu=0.002)
    synchronous, asynchronous = play("grpo", costs=slow, steps=6), play("asynchronous", costs=slow, steps=6)
    assert asynchronous.seconds < 0.9 * synchronous.seconds
    assert max(step.staleness for step in asynchronous.steps) <= 2
    assert asynchronous.steady_per_s(2) > 0


def test_without_staleness_an_asynchronous_job_waits_for_the_weights() -> None:
    shape = JobShape("asynchronous", 4, 3, 1, staleness_max=0)
    source = PromptSource(group_of, MIXED, 1)
    result = play_job(shape, PROFILE, Router("cost"), source, COSTS, JobPool())
    assert all(step.staleness == 0 for step in result.steps)
    assert result.seconds >= sum(step.train_s + step.sync_s for step in result.steps)


def test_borrowing_takes_its_time_in_every_step() -> None:
    result = play("grpo", borrowed=2)
    assert all(step.allocation_s == pytest.approx(ACTIVATION_S) for step in result.steps)
    assert all(step.borrowed_s > 0 for step in result.steps)
    assert 0 < result.allocation_share < 1
