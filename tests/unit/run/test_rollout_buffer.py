"""The buffer of an asynchronous run, through a gateway in one object: the bound holds, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.fake_gateway import FakeGateway

from rose.core.groups import Draw, Drop, GroupAged
from rose.core.staleness import StalenessRules, Unmet, oldest_version
from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.run.job import Job as RunJob
from rose.run.resuming import ResumePoint
from rose.run.rollout_buffer import RolloutBuffer
from rose.run.run_rollouts import Played, Rollouts
from rose.run.run_settings import GroupSettings, load_run_settings
from rose.run.trajectory_ledger import Balance


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m"))


class Job:
    """A trainer that changes the version with every batch and checks what it was given. It goes on behind `start`."""

    def __init__(
        self, model: ModelFolder, *, bound: int, batches: int, start: ResumePoint | None = None, **groups: Any
    ) -> None:
        start = start or ResumePoint()
        rules = GroupSettings(**({"groups": 2, "size": 6, "draws_max": 30} | groups))
        settings = replace(load_run_settings(), groups=rules)
        self.gateway = FakeGateway(model, waits=True)
        self.gateway.version = str(start.step)
        self.journal: list[tuple[Any, list[Any]]] = []
        self.rollouts = Rollouts(
            self.gateway,
            model,
            settings,
            "r",
            lambda *said: self.journal.append(said),
            balance=start.balance,  # type: ignore[arg-type]
        )
        self.unmet: list[Unmet] = []
        self.bound, self.batches, self.step = bound, batches, start.step
        limits = StalenessRules(bound, rules.groups, batches)
        self.buffer = RolloutBuffer(self.rollouts, rules.rules(), limits, start, self.unmet.append)
        self.trained: list[str] = []

    async def learn(self) -> Played:
        """One step, up to where workers have not been told of it."""
        played = await self.buffer.take()
        for group in played.kept:
            oldest = oldest_version(group)
            assert oldest is not None and self.step - oldest <= self.bound, "a token beyond the bound"
            self.trained += [trajectory.trajectory_id for trajectory in group]
        self.step += 1
        self.buffer.publish(self.step)
        return played

    def reach(self) -> None:
        self.gateway.version = f"{self.step}-{'ab' * 4}"
        self.buffer.reach(self.step)

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            await self.learn()
            self.reach()

    async def whole(self) -> None:
        self.buffer.begin(0)
        await self.run(self.batches)
        await self.buffer.end()


def in_time(work: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(bounded())


async def settle() -> None:
    """Until everything that can go on without the trainer has gone on."""
    for _ in range(3000):
        await asyncio.sleep(0)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_whole_job_is_within_the_bound_and_loses_nothing(model, bound):
    job = Job(model, bound=bound, batches=5)
    in_time(job.whole())
    balance = job.rollouts.ledger.balance()
    assert len(set(job.trained)) == len(job.trained) >= 5 * 2 * 2, "each trajectory once"
    assert (balance.lost, balance.doubled, balance.differing, balance.unknown, balance.open) == (0, 0, 0, 0, 0)
    assert balance.begun == balance.returned + balance.written_off
    assert job.rollouts.under_way == 0 and not job.unmet


def test_rollouts_go_on_while_the_trainer_learns(model):
    async def scenario() -> None:
        job = Job(model, bound=2, batches=9)
        job.buffer.begin(0)
        await job.learn()
        before = job.rollouts.ended
        await settle()
        assert job.rollouts.ended > before, "nobody told of new weights, and yet they play"
        await settle()
        under_bound = job.rollouts.ended
        await settle()
        assert job.rollouts.ended == under_bound, "but not beyond the bound"
        job.reach()
        await settle()
        assert job.rollouts.ended > under_bound
        await job.buffer.leave()

    in_time(scenario())


def test_what_has_ended_is_counted_from_one_moment_to_another(model):
    async def scenario() -> None:
        job = Job(model, bound=2, batches=9)
        job.buffer.begin(0)
        first = await job.learn()
        assert job.buffer.take_ended().trajectories == first.trajectories
        ended = job.rollouts.ended
        await settle()
        between = job.buffer.take_ended()
        assert between.trajectories == job.rollouts.ended - ended > 0 and between.generated_tokens > between.turns > 0
        assert job.buffer.take_ended().trajectories == 0
        assert (await job.learn()).trajectories >= between.trajectories, "a batch brings all since the one before"
        await job.buffer.leave()

    in_time(scenario())


def test_with_a_bound_of_nothing_it_waits_for_the_workers(model):
    async def scenario() -> None:
        job = Job(model, bound=0, batches=4)
        job.buffer.begin(0)
        await job.learn()
        await settle()
        ended = job.rollouts.ended
        await settle()
        assert job.rollouts.ended == ended and job.rollouts.under_way == 0
        job.reach()
        await settle()
        assert job.rollouts.ended > ended
        await job.buffer.leave()

    in_time(scenario())


def test_a_group_that_is_overtaken_for_too_long_is_dropped_and_told(model):
    async def scenario() -> Job:
        job = Job(model, bound=1, batches=6, dynamic_sampling=False)
        release = asyncio.Event()
        held = job.rollouts.group_name(0)

        async def pause(name: str) -> None:
            if name.startswith(f"{held}/") and name.endswith("/0"):
                await release.wait()
            await asyncio.sleep(0)

        job.gateway.pause = pause
        job.buffer.begin(0)
        await job.run(3)
        release.set()
        await job.run(3)
        await job.buffer.end()
        return job

    job = in_time(scenario())
    [(aged, [drop])] = [(fact, decisions) for fact, decisions in job.journal if isinstance(fact, GroupAged)]
    assert aged.group == 0 and aged.versions > 1 and drop == Drop(0, "stale")
    assert not any(name.startswith("r/0/") for name in job.trained)
    balance = job.rollouts.ledger.balance()
    assert balance.lost == balance.doubled == balance.open == 0, "it came back all the same"


def test_a_job_whose_rollouts_are_always_too_slow_is_told_what_it_needs(model):
    async def scenario() -> Job:
        job = Job(model, bound=1, batches=3, draws_max=6, dynamic_sampling=False)
        job.buffer.version = 7  # workers are stuck with what they had
        job.buffer.begin(7)
        played = await job.buffer.take()
        assert played.kept == [] and played.counts.stale == 6
        await job.buffer.leave()
        return job

    job = in_time(scenario())
    [unmet] = job.unmet
    assert unmet.versions == 7 and unmet.speed_needed == 4.0


def test_what_ends_the_gateway_ends_the_rollouts(model):
    async def scenario() -> None:
        job = Job(model, bound=1, batches=3)

        async def refuse(*_: Any) -> None:
            raise ConnectionResetError("gone")

        job.gateway.finish = refuse  # type: ignore[method-assign]
        job.buffer.begin(0)
        try:
            await job.run(3)
        finally:
            await job.buffer.leave()

    with pytest.raises(ConnectionResetError, match="gone"):
        in_time(scenario())


def test_a_job_that_ends_early_writes_off_what_is_under_way(model):
    async def scenario() -> Job:
        job = Job(model, bound=2, batches=50)
        job.buffer.begin(0)
        await job.run(2)
        await job.buffer.end()
        begun = job.rollouts.ledger.balance().begun
        job.reach()  # workers take the last weights after the end
        await settle()
        assert job.rollouts.ledger.balance().begun == begun and job.rollouts.under_way == 0
        return job

    job = in_time(scenario())
    balance = job.rollouts.ledger.balance()
    assert balance.written_off > 0 and balance.begun == balance.returned + balance.written_off
    assert balance.lost == balance.doubled == balance.open == 0


def test_where_a_resumed_run_goes_on_is_known(model):
    job = Job(model, bound=1, batches=2)
    in_time(job.whole())
    state = job.buffer.state()
    assert state["next_group"] * 6 == state["balance"]["begun"] == job.rollouts.ledger.balance().begun
    assert state["outstanding"] == [], "a job that is over leaves nothing"


def drawn(job: Job) -> list[int]:
    return [fact.group for fact, _ in job.journal if isinstance(fact, Draw)]


def start_of(state: dict[str, Any], step: int) -> ResumePoint:
    balance, outstanding = Balance(**state["balance"]), tuple(state["outstanding"])
    return ResumePoint(step=step, next_group=state["next_group"], outstanding=outstanding, balance=balance)


async def never(*_: Any) -> None:
    await asyncio.Event().wait()


def test_a_resumed_run_plays_again_what_no_step_has_learnt_from(model):
    async def killed() -> tuple[Job, dict[str, Any]]:
        """Behind its second step 7 is under way, the tokens of 8 are coming, and 4, 5, 6 and 9 are ready."""
        job = Job(model, bound=2, batches=6, dynamic_sampling=False)
        finish = job.gateway.finish

        async def pause(name: str) -> None:
            await (never() if name == "r/7/0" else asyncio.sleep(0))

        async def finish_or_hang(name: str, *more: Any) -> None:
            await (never() if name.startswith("r/8/") else finish(name, *more))

        job.gateway.pause = pause
        job.gateway.finish = finish_or_hang  # type: ignore[method-assign]
        job.buffer.begin(0)
        for _ in range(2):
            await settle()
            await job.run(1)
        await settle()
        state = job.buffer.state()
        await job.buffer.leave()
        return job, state

    async def resumed(state: dict[str, Any]) -> Job:
        job = Job(model, bound=2, batches=6, start=start_of(state, 2), dynamic_sampling=False)
        job.buffer.begin(2)
        for _ in range(4):
            await settle()
            await job.run(1)
        await job.buffer.end()
        return job

    before, state = in_time(killed())
    assert (state["next_group"], state["outstanding"]) == (10, [4, 5, 6, 7, 8, 9])
    assert state["balance"] == asdict(Balance(begun=4 * 6, returned=4 * 6)), "of what was learnt from, and nothing else"
    after = in_time(resumed(state))
    assert drawn(after) == [4, 5, 6, 7, 8, 9, 10, 11]
    members = [f"r/{group}/{member}" for group in range(12) for member in range(6)]
    assert sorted(before.trained + after.trained) == sorted(members), "each once, in whichever attempt"
    assert after.rollouts.ledger.balance() == Balance(begun=12 * 6, returned=12 * 6)


def test_a_run_that_is_killed_again_has_forgotten_nothing(model):
    async def scenario() -> dict[str, Any]:
        start = ResumePoint(step=2, next_group=9, outstanding=(3, 5, 7), balance=Balance(begun=36, returned=36))
        job = Job(model, bound=0, batches=9, start=start, dynamic_sampling=False)
        job.buffer.begin(2)
        assert drawn(job) == [3, 5], "the bound allows no more"
        await settle()
        state = job.buffer.state()
        await job.buffer.leave()
        return state

    state = in_time(scenario())
    assert (state["next_group"], state["outstanding"]) == (9, [3, 5, 7])
    assert state["balance"] == asdict(Balance(begun=36, returned=36))


def test_a_group_that_was_dropped_is_outstanding_until_it_has_come_back(model):
    async def scenario() -> tuple[Job, dict[str, Any]]:
        job = Job(model, bound=2, batches=9, groups=4, size=2)
        job.gateway.finish = never  # type: ignore[method-assign]
        job.buffer.begin(0)
        await settle()
        state = job.buffer.state()
        await job.buffer.leave()
        return job, state

    job, state = in_time(scenario())
    assert any(isinstance(decision, Drop) for _, decisions in job.journal for decision in decisions)
    assert state["outstanding"] == list(range(12)) and state["balance"] == asdict(Balance())


def test_the_loop_goes_on_with_what_its_checkpoint_names_and_writes_it_into_the_next(model):
    async def scenario() -> tuple[list[int], dict[str, Any]]:
        start = ResumePoint(step=2, next_group=9, outstanding=(3, 5))
        parts = Job(model, bound=0, batches=9, start=start)
        settings = load_run_settings(None, ["groups.groups=2", "groups.size=6", "asynchrony.max_staleness=0"])
        learner: Any = SimpleNamespace(published=SimpleNamespace(version=SimpleNamespace(version=2)))
        pool: Any = SimpleNamespace(counts={})
        nothing: Any = None
        job = RunJob(
            settings, nothing, nothing, learner, parts.rollouts, pool, nothing, nothing, nothing, nothing, start
        )
        buffer = job._begin_step(3)
        state = buffer.state()
        await buffer.leave()
        return drawn(parts), state

    groups, state = in_time(scenario())
    assert groups == state["outstanding"] == [3, 5] and state["next_group"] == 9
