"""The loop of a run, where it is not about rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.launch_lines import compared, costs_of, lines_of, notes_of, pause_s, record, step
from tests.unit.launch_lines import step as line_of_step

from rose.core.groups import StepGroups
from rose.core.staleness import Unmet
from rose.errors import RoseError, Unavailable
from rose.run.job import Job, shown_played
from rose.run.monitor import PoolSample, PoolWatch
from rose.run.run_records import StepRecord
from rose.run.run_rollouts import Played
from rose.run.run_settings import load_run_settings
from rose.run.version_sync import VersionSync


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
    folder: Any = SimpleNamespace(record=lambda one: lines.extend(lines_of([one])))
    client: Any = SimpleNamespace(pool=pool)
    published: Any = SimpleNamespace(label="3-ab", version=SimpleNamespace(version=3))
    nothing: Any = None
    versions = VersionSync(client, nothing, folder, nothing)
    asyncio.run(versions._until_taken(published, 7, is_changed, lambda: reached.append(7)))
    assert [line["pause_s"] for line in lines] == [told_s] and reached == [7], story
    assert pause_s(lines) == told_s


class Away:
    """A borrowed device that does not answer its owner."""

    async def lend(self) -> bool:
        raise Unavailable("it is started again")

    hold_back = breaches = lend


class Counting:
    """A borrowed device with one more breach whenever somebody looks; the second time nobody answers."""

    def __init__(self) -> None:
        self.looks = 0
        self.lent: dict[str, int] = {}

    async def breaches(self) -> dict[str, int]:
        self.looks += 1
        if self.looks == 2:
            raise Unavailable("it is started again")
        self.lent = {"steps": 10 * self.looks}
        return {"ttft": self.looks}


class Steps(Job):
    """A job without rollouts."""

    async def _step(self, step: int) -> None:
        self.folder.record(record(line_of_step(step, 0.0)))

    def __post_init__(self) -> None:
        async def nothing(**_: object) -> None:
            pass

        self.versions = SimpleNamespace(compare=nothing, close=lambda: None)  # type: ignore[assignment]

    async def _record_costs(self, when: str) -> None:
        pass


def job_of(kind: type[Job], lending: Any, *overrides: str) -> tuple[Job, list[dict[str, Any]], list[str]]:
    """The job, its lines and what it says."""
    lines: list[dict[str, Any]] = []
    words: list[str] = []
    folder: Any = SimpleNamespace(record=lambda one: lines.extend(lines_of([one])))
    screen: Any = SimpleNamespace(say=words.append)
    settings = load_run_settings(None, ["evaluation.every_steps=0", "checkpoint.every_steps=0", *overrides])
    nothing: Any = None
    job = kind(settings, folder, nothing, nothing, nothing, nothing, lending, nothing, screen, nothing)
    return job, lines, words


def test_a_device_that_cannot_be_asked_makes_no_pairs_and_ends_no_run():
    job, _, words = job_of(Job, Away(), "compare=true", "steps=4")
    borrowed = [asyncio.run(job._lend(number)) for number in (1, 2, 3, 4)]
    assert borrowed == [False, True, True, False], "as it was before"
    assert [said.split(": ")[0].strip() for said in words] == [
        f"the device could not be {what} for now" for what in ("borrowed", "held back", "held back", "borrowed")
    ]
    with_then_without = [step(1, 0.0), step(2, 9.0, is_borrowed=borrowed[1], rollout_s=4.0)]
    assert compared(with_then_without)["throughput_ratio"] is None


def test_a_run_whose_device_is_away_at_the_end_is_finished():
    job, lines, _ = job_of(Steps, Away(), "steps=2")
    asyncio.run(job.run())
    assert [line["kind"] for line in lines] == ["step", "step", "finished"]


def test_breaches_are_written_down_with_every_step():
    job, lines, _ = job_of(Steps, Counting(), "steps=3")
    asyncio.run(job.run())
    kinds = [line["kind"] for line in lines]
    assert kinds == ["step", "lending", "lent", "step", "step", "lending", "lent", "lending", "lent", "finished"]
    assert [line["counts"]["steps"] for line in lines if line["kind"] == "lent"] == [10, 30, 40]
    assert [line["breaches"] for line in lines if line["kind"] == "lending"] == [{"ttft": 1}, {"ttft": 3}, {"ttft": 4}]


def test_turns_between_two_marks_are_known_over_a_restart_of_the_gateway():
    ended = iter([10, 14, 3])

    async def pool() -> dict[str, Any]:
        count = next(ended)
        member = {"name": "a", "kind": "dedicated", "state": "open", "trouble": "", "turns": 0, "turns_ended": count}
        return {"members": [member], "counts": {"ended": count}, "version": None}

    job, lines, _ = job_of(Job, None)
    client: Any = SimpleNamespace(pool=pool)
    gateway_s = iter([1.0, 1.7])
    job.pool, job.costs = PoolWatch(client, lambda sample: None), lambda: {"gateway": next(gateway_s)}

    async def marks() -> None:
        await job._record_costs("begin")
        await job.pool.look()
        await job._record_costs("end")

    asyncio.run(marks())
    assert costs_of(lines)["control_cpu_ms_per_turn"] == 100.0


# What a step's line counts


@dataclass
class Report:
    """Of a step that had nothing to learn from."""

    step: int = 1
    trajectories: int = 0
    verdict: str = "starved"
    staleness_max: int | None = None


class Pool:
    """Whose workers have ended ten more turns and written fifty more tokens whenever somebody looks."""

    def __init__(self) -> None:
        self.looks, self.counts = 0, {"tokens": 0}

    async def look(self) -> PoolSample:
        self.looks += 1
        self.counts = {"tokens": 50 * self.looks}
        return PoolSample(float(self.looks), {"dedicated": 10 * self.looks, "borrowed": 0}, {}, None)


class Telling(Job):
    def _report_step(self, record: StepRecord) -> None:
        self.folder.record(record)


def line_of(*overrides: str, ended: Sequence[Played] = ()) -> dict[str, Any]:
    """Of a step in which four trajectories had ended when its batch was there."""
    played = Played([], StepGroups(), trajectories=4, successes=2, turns=9, generated_tokens=40)

    async def play() -> Played:
        return played

    async def learn(*_: object) -> Report:
        return Report()

    ends = iter(ended)
    job, lines, _ = job_of(Telling, None, "steps=9", *overrides)
    job.learner = SimpleNamespace(learn=learn, published=SimpleNamespace(label="1"))  # type: ignore[assignment]
    job.pool = Pool()  # type: ignore[assignment]
    job.screen.live = SimpleNamespace()  # type: ignore[assignment]
    job.costs = dict
    job.versions = SimpleNamespace(watch=lambda *_: None)  # type: ignore[assignment]
    job.buffer = SimpleNamespace(take=play, take_ended=lambda: next(ends, None), reach=lambda step: None)  # type: ignore[assignment]
    asyncio.run(job._step(1))
    return lines[0]


def test_a_step_says_what_was_judged_and_what_the_pool_has_generated():
    line = line_of()
    assert (line["turns"], line["generated_tokens"]) == (9, 40), "of the trajectories that ended"
    assert (line["turns_by_pool"]["dedicated"], line["pool_tokens"]) == (30, 150), "of all there were"
    assert line["rollout_s"] == 1.0 and line["step_s"] == 3.0 and "in_step" not in line and "wait_s" not in line


def test_an_asynchronous_step_says_the_same_and_what_ended_in_its_time():
    between = Played([], StepGroups(), trajectories=3, successes=1, turns=7, generated_tokens=32)
    within = Played([], StepGroups(), trajectories=1, successes=1, turns=2, generated_tokens=8)
    line = line_of("asynchrony.is_used=true", ended=[between, within])
    assert line["rollout_s"] == line["step_s"] == 3.0 and line["wait_s"] == 1.0
    assert (line["turns"], line["generated_tokens"]) == (9, 40)
    assert (line["turns_by_pool"]["dedicated"], line["pool_tokens"]) == (30, 150)
    assert line["in_step"] == {"trajectories": 1, "successes": 1, "turns": 2, "generated_tokens": 8}


def test_a_bound_that_cannot_be_met_is_shown_and_recorded():
    said, lines = [], []
    pool = SimpleNamespace(last=SimpleNamespace(at_s=30.0), counts={"tokens": 2500})
    job = Job(
        None, SimpleNamespace(record=lambda one: lines.extend(lines_of([one]))), None, None, None, pool,
        None, None, SimpleNamespace(say=said.append), dict, began=(10.0, 500),
    )  # fmt: skip
    job._report_unmet(Unmet(3, 5, 1, 3.0))
    [words] = said
    assert "3.0 times as quick (300 tokens/s instead of 100)" in words and "asynchrony.max_staleness=5" in words
    assert lines[0]["tokens_per_s"] == 100.0 and notes_of(lines) == [words.strip()]
    assert notes_of([*lines, *lines]) == [f"2 times: {words.strip()}"]


def test_a_step_records_the_commonest_failures():
    failures = ["ice"] * 3 + ["wind"] * 2 + [f"reset({seed}): fog" for seed in (7, 3, 12, 1)] + ["rain"]
    line = shown_played(Played([], StepGroups(), failures=failures))
    assert line["episodes_failed"] == 10
    assert line["failures"] == {"reset(7): fog": 4, "ice": 3, "wind": 2}, "whatever the seed"
