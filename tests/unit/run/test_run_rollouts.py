"""Playing a step through a gateway: environments that raise or hang, groups that are dropped, batches that lie."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.fake_gateway import FakeGateway
from tests.unit.synchronous_steps import play_step, play_steps

from rose.core.groups import Draw, MemberEnded, StepGroups
from rose.core.trajectory import Trajectory
from rose.envs.environment_registry import ENVIRONMENTS, EnvironmentEntry
from rose.envs.frozenlake import FrozenLake, LakeSettings
from rose.envs.trouble import TroubleSettings
from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.run.job import shown_played
from rose.run.run_rollouts import Played, Rollouts
from rose.run.run_settings import GroupSettings, RunSettings, load_run_settings
from rose.run.trajectory_ledger import Balance


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m"))


def rollouts_on(
    gateway: FakeGateway, model: ModelFolder, settings: RunSettings, balance: Balance | None = None
) -> tuple[Rollouts, list[Any]]:
    journal: list[Any] = []
    gateway.waits = True
    client: Any = gateway
    made = Rollouts(
        client, model, settings, "r", lambda fact, decisions: journal.append((fact, decisions)), balance=balance
    )
    return made, journal


def small(**changes: Any) -> RunSettings:
    return replace(load_run_settings(), groups=GroupSettings(**({"groups": 2, "size": 6, "draws_max": 12} | changes)))


def test_the_mean_reward_does_not_depend_on_who_ended_first():
    """Added up one after the other, these four are told as -0.2437 or -0.2438."""
    rewards = (-0.5, 0.0625, -0.6, 0.0625)
    told = set()
    for order in itertools.permutations(rewards):
        played = Played([], StepGroups())
        for reward in order:
            played.add(Trajectory("t", "g", (), (), (), (), reward))
        told.add(shown_played(played)["reward_mean"])
    assert told == {-0.2437} and shown_played(Played([], StepGroups()))["reward_mean"] == 0.0


def test_a_step_is_played_fetched_and_balanced(model):
    gateway = FakeGateway(model)
    rollouts, journal = rollouts_on(gateway, model, small())
    played = asyncio.run(play_step(rollouts))
    balance = rollouts.ledger.balance()
    assert played.counts.kept == len(played.kept) == 2
    assert balance.begun == balance.returned == played.trajectories == 6 * played.counts.drawn
    assert (balance.lost, balance.doubled, balance.differing, balance.open) == (0, 0, 0, 0)
    assert sum(isinstance(fact, MemberEnded) for fact, _ in journal) == played.trajectories
    assert sum(isinstance(fact, Draw) for fact, _ in journal) == played.counts.drawn
    assert isinstance(journal[-1][0], StepGroups)


def test_steps_follow_each_other_with_fresh_maps(model):
    rollouts, _ = rollouts_on(FakeGateway(model), model, small())

    async def two() -> list[set[str]]:
        steps, _ = await play_steps(rollouts, 2)
        return [{t.trajectory_id for group in step.kept for t in group} for step in steps]

    first, second = asyncio.run(two())
    assert first and second and not first & second


def test_only_the_chosen_members_are_trained_on(model):
    rollouts, _ = rollouts_on(FakeGateway(model), model, small(train_size=2))
    played = asyncio.run(play_step(rollouts))
    assert [len(group) for group in played.kept] == [2, 2]
    assert all(group[0].reward != group[1].reward for group in played.kept)


def test_surplus_groups_are_stopped_and_written_off(model):
    rollouts, _ = rollouts_on(FakeGateway(model), model, small(groups=1, draw_ahead=4.0))
    played = asyncio.run(play_step(rollouts))
    balance = rollouts.ledger.balance()
    assert played.counts.kept == 1
    assert balance.lost == balance.doubled == balance.open == 0
    assert balance.begun == balance.returned + balance.written_off


def test_a_batch_that_brings_something_twice_or_not_at_all_is_found(model):
    gateway = FakeGateway(model)
    rollouts, _ = rollouts_on(gateway, model, small())
    gateway.tamper = lambda trajectories: [*trajectories[1:], trajectories[-1]]
    played = asyncio.run(play_step(rollouts))
    balance = rollouts.ledger.balance()
    assert balance.lost == balance.doubled == played.counts.drawn


def test_tokens_that_changed_on_the_way_are_not_trained_on(model):
    gateway = FakeGateway(model)
    rollouts, _ = rollouts_on(gateway, model, small())
    gateway.tamper = lambda trajectories: [_changed(trajectories[0]), *trajectories[1:]]
    played = asyncio.run(play_step(rollouts))
    assert rollouts.ledger.balance().differing == played.counts.drawn
    assert all(trajectory.token_ids[-1] != 7 for group in played.kept for trajectory in group)


def _changed(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, token_ids=(*trajectory.token_ids[:-1], 7))


class Raising(FrozenLake):
    """Breaks on every other map."""

    def reset(self, seed: int) -> str:
        if seed % 2:
            raise OSError("thin ice")
        return super().reset(seed)


class Hanging(Raising):
    is_quick = False

    def reset(self, seed: int) -> str:
        if seed % 2:
            time.sleep(3.0)
        return super().reset(seed - seed % 2)


class Wordy(FrozenLake):
    """Says more than the model can read, on every other map."""

    def reset(self, seed: int) -> str:
        return super().reset(seed) * (4096 if seed % 2 else 1)


@pytest.mark.parametrize(
    "kind, word", [(Raising, "thin ice"), (Hanging, "took over"), (Wordy, "together more than the context")]
)
def test_environments_that_raise_hang_or_say_too_much_cost_their_episodes_only(model, monkeypatch, kind, word):
    monkeypatch.setitem(ENVIRONMENTS, "broken", EnvironmentEntry(LakeSettings(), kind, 8, "breaks"))
    settings = load_run_settings(None, ["patience.reset_s_max=0.05", "patience.tries_max=1"])
    settings = replace(settings, environment="broken", groups=small(draws_max=6).groups)
    rollouts, _ = rollouts_on(FakeGateway(model), model, settings)
    played = asyncio.run(play_step(rollouts))
    balance = rollouts.ledger.balance()
    assert played.failures and all(word in reason for reason in played.failures)
    assert balance.written_off == len(played.failures) and balance.lost == 0
    assert played.counts.lost >= 1 and played.counts.kept >= 1


def test_a_gateway_that_is_gone_ends_the_step_with_its_error(model):
    gateway = FakeGateway(model)
    rollouts, _ = rollouts_on(gateway, model, small())

    async def refuse(*_: Any) -> None:
        raise ConnectionResetError("gone")

    gateway.finish = refuse  # type: ignore[method-assign]
    with pytest.raises(Exception, match="gone"):
        asyncio.run(play_step(rollouts))


def test_held_out_games_that_cannot_be_played_are_told(model, monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "broken", EnvironmentEntry(LakeSettings(), Raising, 8, "breaks"))
    settings = load_run_settings(None, ["patience.tries_max=1"])
    rollouts, _ = rollouts_on(FakeGateway(model), model, replace(settings, environment="broken"))
    rate = asyncio.run(rollouts.evaluate(10))
    assert len(rollouts.held_out_failures) == 5 and all("thin ice" in why for why in rollouts.held_out_failures)
    assert rate <= 0.5 and rollouts.under_way == 0


def test_slow_environments_are_evaluated_as_many_at_once_as_a_step_plays(model, monkeypatch):
    at_once = []

    class Slow(FrozenLake):
        is_quick = False

    def made(settings):
        at_once.append(rollouts.under_way)
        return Slow(settings)

    made.is_quick = False
    monkeypatch.setitem(ENVIRONMENTS, "slow", EnvironmentEntry(LakeSettings(), made, 8, "takes its time"))
    settings = small()
    settings = replace(settings, environment="slow", groups=replace(settings.groups, groups=1, size=3))
    rollouts, _ = rollouts_on(FakeGateway(model), model, settings)
    asyncio.run(rollouts.evaluate(12))
    assert len(at_once) == 12 and max(at_once) <= 3


def test_held_out_games_that_meet_trouble_wait_for_each_other_too(model, monkeypatch):
    at_once = []

    class Watched(FrozenLake):
        def reset(self, seed: int) -> str:
            at_once.append(rollouts.under_way)
            return super().reset(seed)

    monkeypatch.setitem(ENVIRONMENTS, "watched", EnvironmentEntry(LakeSettings(), Watched, 8, "is quick by itself"))
    settings = replace(small(groups=1, size=3), environment="watched")
    settings = replace(settings, trouble=TroubleSettings(latency="constant:seconds=0.001"))
    rollouts, _ = rollouts_on(FakeGateway(model), model, settings)
    asyncio.run(rollouts.evaluate(12))
    assert len(at_once) == 12 and max(at_once) <= 3


def test_the_options_hold_for_training_and_for_held_out_games(model, monkeypatch):
    found = []

    def made(settings):
        found.append(settings)
        return FrozenLake(settings)

    monkeypatch.setitem(ENVIRONMENTS, "told", EnvironmentEntry(LakeSettings(), made, 8, "says what it is made of"))
    settings = replace(small(), environment="told", environment_options={"turns_max": 9})
    rollouts, _ = rollouts_on(FakeGateway(model), model, settings)
    asyncio.run(play_step(rollouts))
    assert set(found) == {LakeSettings(turns_max=9)}
    found.clear()
    asyncio.run(rollouts.evaluate(4))
    assert set(found) == {LakeSettings(turns_max=9)}


def test_held_out_games_are_not_booked(model):
    rollouts, _ = rollouts_on(FakeGateway(model), model, small())
    assert 0 <= asyncio.run(rollouts.evaluate(10)) <= 1
    assert rollouts.ledger.balance().begun == 0
