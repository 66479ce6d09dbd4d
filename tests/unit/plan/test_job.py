"""The RL job of a plan: its text, its lengths and its times."""

from __future__ import annotations

from statistics import median

import pytest
from tests.unit.plan_world import small_fleet, small_job

from rose.errors import ConfigError
from rose.plan.job import JobInputs, draw, job_inputs, job_on, tasks


def test_a_job_is_read_from_its_text() -> None:
    job = job_inputs("dapo:256x8,turns=math,accept=0.3,overlap=yes,train_s=60")
    assert (job.algorithm, job.batch, job.group, job.turns) == ("dapo", 256, 8, "math")
    assert (job.accept, job.overlap, job.train_s) == (0.3, "yes", 60.0)
    assert job_inputs("grpo") == JobInputs()


@pytest.mark.parametrize(
    "text, message",
    [
        ("ppo:1x1", "this is no job"),
        ("grpo:1024", "`1024` is no batch"),
        ("grpo:0x16", "this is no job"),
        ("grpo:axb", "`axb` is no batch"),
        ("grpo:16x4,turns=chess", "no trajectory lengths for `chess`"),
        ("grpo:16x4,speed=2", "`speed=2` is no part of a job"),
        ("grpo:16x4,mfu=fast", "mfu is `fast`, not a number"),
        ("grpo:16x4,mfu=1.5", "this is no job"),
        ("grpo:16x4,accept=nan", "this is no job"),
        ("grpo:99999999x16", "this is no job"),
    ],
)
def test_a_wrong_job_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_inputs(text)


@pytest.mark.parametrize("name", tasks())
def test_drawn_lengths_follow_the_quantiles(name: str) -> None:
    task, inputs = tasks()[name], JobInputs(turns=name, accept=1.0, likeness=0.0)
    drawn = draw(task, inputs, 32_768, 0)
    outputs = [turn.output_tokens for one in drawn for turn in one.turns]
    assert median(outputs) == pytest.approx(task.output_tokens[3], rel=0.15)
    assert all(turn.prompt_tokens + turn.output_tokens <= 32_768 for one in drawn for turn in one.turns)
    assert task.source and task.assumed
    assert all(list(getattr(task, part)) == sorted(getattr(task, part)) for part in ("turns", "output_tokens", "env_s"))


def test_failed_trajectories_are_the_long_tail() -> None:
    task = tasks()["alfworld"]
    drawn = draw(task, JobInputs(accept=0.75), 32_768, 0)
    failed = sum(len(one.turns) == task.failed_turns for one in drawn) / len(drawn)
    assert failed == pytest.approx(0.25, abs=0.05)


def test_members_of_a_group_are_alike() -> None:
    def spread(likeness: float) -> float:
        drawn = draw(tasks()["swebench"], JobInputs(likeness=likeness), 1 << 20, 0)
        groups = [[len(one.turns) for one in drawn[first : first + 16]] for first in range(0, len(drawn), 16)]
        return sum(max(group) - min(group) for group in groups) / len(groups)

    assert spread(0.95) < 0.6 * spread(0.0)


def test_training_takes_its_flops_and_weights_their_bytes() -> None:
    fleet = small_fleet()
    job = small_job(fleet, "grpo:8x4,turns=tools,mfu=0.5,link_gbps=10,delta=0.1")
    tokens = sum(one.turns[-1].prompt_tokens + one.turns[-1].output_tokens for one in job.trajectories)
    assert job.train_s == pytest.approx(6 * 8.19e9 * tokens / (2 * 989e12 * 0.5), rel=0.01)
    assert job.sync_s == pytest.approx(2 * 0.1 * 2 * 8.19e9 * 8 / 10e9, rel=0.01)
    assert job.step_s(100.0) == 100.0 + job.train_s + job.sync_s
    assert small_job(fleet, "grpo:8x4,turns=tools,overlap=yes,train_s=500").step_s(100.0) == pytest.approx(
        500, rel=0.01
    )


def test_a_job_without_trainers_must_say_their_seconds() -> None:
    fleet = small_fleet(train_gpus=0)
    assert small_job(fleet).train_s == 5.0
    with pytest.raises(ConfigError, match="without --train-gpus"):
        job_on(fleet, job_inputs("grpo:8x4"), 0)
