"""Rollouts that never stop, through a gateway in one object: the bound holds, nothing is lost, the slow are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.fake_gateway import FakeGateway

from rose.core.groups import Drop, GroupAged
from rose.core.staleness import GroupStream, StalenessRules, Unmet, oldest_version
from rose.launch.flow import Flow
from rose.launch.rollouts import Played, Rollouts
from rose.launch.settings import GroupSettings, load_run_settings
from rose.models.folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m"))


class Job:
    """A trainer that changes the version with every batch and checks what it was given."""

    def __init__(self, model: ModelFolder, *, bound: int, batches: int, **groups: Any) -> None:
        rules = GroupSettings(**({"groups": 2, "size": 6, "draws_max": 30} | groups))
        settings = replace(load_run_settings(), groups=rules)
        self.gateway = FakeGateway(model, waits=True)
        self.gateway.version = "0"
        self.journal: list[tuple[Any, list[Any]]] = []
        self.rollouts = Rollouts(self.gateway, model, settings, "r", lambda *said: self.journal.append(said))  # type: ignore[arg-type]
        self.unmet: list[Unmet] = []
        self.bound, self.batches, self.step = bound, batches, 0
        stream = GroupStream(rules.rules(), StalenessRules(bound, rules.groups, batches))
        self.flow = Flow(self.rollouts, stream, self.unmet.append)
        self.trained: list[str] = []

    async def learn(self) -> Played:
        """One step, up to where workers have not been told of it."""
        played = await self.flow.take()
        for group in played.kept:
            oldest = oldest_version(group)
            assert oldest is not None and self.step - oldest <= self.bound, "a token beyond the bound"
            self.trained += [trajectory.trajectory_id for trajectory in group]
        self.step += 1
        self.flow.published(self.step)
        return played

    def reach(self) -> None:
        self.gateway.version = f"{self.step}-{'ab' * 4}"
        self.flow.reached(self.step)

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            await self.learn()
            self.reach()

    async def whole(self) -> None:
        self.flow.begin(0)
        await self.run(self.batches)
        await self.flow.end()


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
        job.flow.begin(0)
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
        await job.flow.leave()

    in_time(scenario())


def test_with_a_bound_of_nothing_it_waits_for_the_workers(model):
    async def scenario() -> None:
        job = Job(model, bound=0, batches=4)
        job.flow.begin(0)
        await job.learn()
        await settle()
        ended = job.rollouts.ended
        await settle()
        assert job.rollouts.ended == ended and job.rollouts.under_way == 0
        job.reach()
        await settle()
        assert job.rollouts.ended > ended
        await job.flow.leave()

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
        job.flow.begin(0)
        await job.run(3)
        release.set()
        await job.run(3)
        await job.flow.end()
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
        job.flow.version = 7  # workers are stuck with what they had
        job.flow.begin(7)
        played = await job.flow.take()
        assert played.kept == [] and played.counts.stale == 6
        await job.flow.leave()
        return job

    job = in_time(scenario())
    [unmet] = job.unmet
    assert unmet.versions == 7 and unmet.speed_needed == 4.0


def test_what_ends_the_gateway_ends_the_flow(model):
    async def scenario() -> None:
        job = Job(model, bound=1, batches=3)

        async def refuse(*_: Any) -> None:
            raise ConnectionResetError("gone")

        job.gateway.finish = refuse  # type: ignore[method-assign]
        job.flow.begin(0)
        try:
            await job.run(3)
        finally:
            await job.flow.leave()

    with pytest.raises(ConnectionResetError, match="gone"):
        in_time(scenario())


def test_a_job_that_ends_early_writes_off_what_is_under_way(model):
    async def scenario() -> Job:
        job = Job(model, bound=2, batches=50)
        job.flow.begin(0)
        await job.run(2)
        await job.flow.end()
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
    state = job.rollouts.state()
    assert state["next_group"] * 6 == job.rollouts.ledger.balance().begun
