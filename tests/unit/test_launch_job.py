"""The loop of a run, where it is not about rollouts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rose.core.groups import StepGroups
from rose.errors import RoseError
from rose.launch.asynchronous import AsynchronousJob
from rose.launch.figures import pause_s
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


def test_one_episode_that_failed_among_many_is_told_and_not_blamed():
    told = learnt_from(Played([], StepGroups(), trajectories=31, failures=["Lake: thin ice"]))
    assert "in the last one 1 episode was given up: Lake: thin ice" in told.what
    assert told.hint == "lower train.learning_rate"


def test_a_job_that_learns_nothing_from_games_that_were_played_is_told_as_the_trainer_says_it():
    assert "learning_rate" in learnt_from(Played([], StepGroups())).hint


@pytest.mark.parametrize(
    "story, seconds, is_changed, told_s",
    [
        ("the longest counts", [{"commit": 0.002}, {"commit": 0.004}], True, 0.004),
        ("one of them tells", [{}, {"commit": 0.002}], True, 0.002),
        ("nobody tells, after a restart of the gateway", [{}, {}], True, None),
        ("there is nobody", [], True, None),
        ("the weights are those of a step before", [{"commit": 0.002}], False, None),
    ],
)
def test_a_pause_that_nobody_told_is_not_a_pause_of_nothing(story, seconds, is_changed, told_s):
    members = [
        {"name": str(number), "version": "3-ab", "state": "open", "turns": 0, "seconds": told}
        for number, told in enumerate(seconds)
    ]

    async def pool() -> dict[str, Any]:
        return {"members": members}

    lines, reached = [], []
    folder: Any = SimpleNamespace(record=lambda kind, **line: lines.append({"kind": kind} | line))
    client: Any = SimpleNamespace(pool=pool)
    flow: Any = SimpleNamespace(reached=reached.append)
    published: Any = SimpleNamespace(label="3-ab", version=SimpleNamespace(version=3))
    nothing: Any = None
    job = AsynchronousJob(
        nothing, folder, client, nothing, nothing, nothing, nothing, nothing, nothing, nothing, flow=flow
    )
    asyncio.run(job._until_taken(published, 7, is_changed))
    assert [line["pause_s"] for line in lines] == [told_s] and reached == [7], story
    assert pause_s(lines) == told_s
