"""The loop of a run, where it is not about rollouts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rose.core.groups import StepGroups
from rose.errors import RoseError
from rose.launch.job import Job
from rose.launch.rollouts import Played


class Starved(RoseError):
    """As the trainer says it."""


def learnt_from(played: Played) -> Any:
    async def learn(*_: object) -> None:
        raise Starved("no group had anything to learn from", hint="lower train.learning_rate")

    learner: Any = SimpleNamespace(learn=learn)
    nothing: Any = None
    job = Job(nothing, nothing, nothing, learner, nothing, nothing, nothing, nothing, nothing, nothing)
    with pytest.raises(Starved) as refused:
        asyncio.run(job.learn(played))
    return refused.value


def test_a_job_whose_environments_fail_does_not_blame_the_learning_rate():
    told = learnt_from(
        Played([], StepGroups(), failures=[f"Lake: reset({seed}) took over 60 s" for seed in range(8)] + ["other"])
    )
    assert "in the last one 8 episodes were given up: Lake: reset(0) took over 60 s" in str(told)
    assert "patience.reset_s_max" in told.hint and "learning_rate" not in str(told)


def test_a_job_that_learns_nothing_from_games_that_were_played_is_told_as_the_trainer_says_it():
    assert "learning_rate" in learnt_from(Played([], StepGroups())).hint
