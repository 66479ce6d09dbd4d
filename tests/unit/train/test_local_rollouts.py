"""The loop in one process: episodes that share an engine, environments that fail, engines that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.local_rollouts import LocalRollouts, Task, synchronous

from rose.config.server_settings import EngineSettings
from rose.core.groups import GroupRules
from rose.engines.embedded.engine import EmbeddedEngine
from rose.envs.environment import EnvironmentTimeouts, TimedEnvironment
from rose.envs.frozenlake import FrozenLake
from rose.models.presets import write_preset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def rollouts(folder: Path) -> LocalRollouts:
    return LocalRollouts(EmbeddedEngine.load(folder, EngineSettings(kv_memory_mb=64)), folder, Task())


class Stumbling(FrozenLake):
    """Works on even maps only."""

    def reset(self, seed: int) -> str:
        if seed % 2:
            raise OSError("thin ice")
        return super().reset(seed)


def test_groups_are_played_on_one_map_each_with_other_dice(rollouts):
    groups = synchronous(GroupRules(groups=2, size=3, dynamic_sampling=False))
    kept, counts = rollouts.play_groups(groups)
    assert [len(group) for group in kept] == [3, 3] and counts.trajectories == 6
    for group in kept:
        first = len(rollouts.frame.first("0,0 L#D_R_U#"))
        assert len({trajectory.token_ids[:first] for trajectory in group}) == 1
        assert len({trajectory.token_ids for trajectory in group}) == 3
    assert {trajectory.versions_used() for group in kept for trajectory in group} == {("0",)}


def test_the_same_seeds_are_the_same_games(rollouts, folder):
    rules = GroupRules(groups=2, size=2, dynamic_sampling=False)
    again = LocalRollouts(EmbeddedEngine.load(folder, EngineSettings(kv_memory_mb=64)), folder, Task())
    assert rollouts.play_groups(synchronous(rules))[0] == again.play_groups(synchronous(rules))[0]


def test_episodes_with_a_failing_environment_are_lost_others_continue(rollouts, monkeypatch):
    monkeypatch.setattr(Task, "make", lambda self: TimedEnvironment(Stumbling, EnvironmentTimeouts(resets_max=1)))
    kept, counts = rollouts.play_groups(synchronous(GroupRules(groups=2, size=2, dynamic_sampling=False)))
    assert len(kept) == 1 and (counts.kept, counts.lost, counts.trajectories) == (1, 1, 2)


def test_an_engine_that_fails_ends_the_loop_with_its_error(rollouts, monkeypatch):
    def broken(plan):
        raise RuntimeError("out of order")

    monkeypatch.setattr(rollouts.engine, "step", broken)
    with pytest.raises(RuntimeError, match="out of order"):
        rollouts.success_rate(2)


def test_the_success_rate_of_an_untrained_model_is_low(rollouts):
    assert rollouts.success_rate(8) < 0.5
