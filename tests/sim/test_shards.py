"""Several gateways in virtual time, with every fault of the simulator: what holds for one holds for all of them.

Workers move between shards all the while: the rules are those of `core.shard_balance` with shorter times, so that a
world of half a minute sees several moves.
"""

from __future__ import annotations

import dataclasses

import pytest

from rose.core.shard_balance import BalanceRules
from rose.sim.scenario import Scenario, Traffic, random_scenario
from rose.sim.simulated_shards import SimulatedShards
from rose.sim.world import WorldReport, simulate

SEEDS = range(6)
CALM = {"faults_per_s": 0.0, "vanishing": 0.0, "borrowed_max": None, "dedicated_max": None}


class TwoShards(SimulatedShards):
    rules = BalanceRules(starving_s=0.5, calm_s=0.5, hold_s=3.0, settle_s=2.0)


class ThreeShards(TwoShards):
    count = 3


def check(report: WorldReport) -> WorldReport:
    assert report.is_fine, "\n".join([report.violation, *report.last_lines[-20:], f"seed {report.scenario.seed}"])
    return report


@pytest.mark.parametrize("shards", [TwoShards, ThreeShards])
def test_every_seed_keeps_every_invariant(shards: type[SimulatedShards]) -> None:
    counts = [check(simulate(random_scenario(seed), host=shards)).counts for seed in SEEDS]
    for name in ("trajectories", "moved", "restarts", "lost", "evicted"):
        assert sum(count.get(name, 0) for count in counts) > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_more_seeds_keep_every_invariant(seed: int) -> None:
    check(simulate(random_scenario(seed), host=ThreeShards))


def test_the_same_seed_is_the_same_world() -> None:
    digests = {simulate(random_scenario(7), host=TwoShards).story_digest for _ in range(2)}
    assert len(digests) == 1


def scenario(**changes: object) -> Scenario:
    return dataclasses.replace(random_scenario(2), **{**CALM, **changes})  # type: ignore[arg-type]


def test_the_only_device_works_for_all_shards_in_turn() -> None:
    alone = scenario(dedicated=1, borrowed=0, groups=4, ahead=1, trouble_s=60.0, max_concurrency=4)
    report = check(simulate(alone, host=TwoShards))
    assert report.counts["moved"] > 2 and report.counts["batches"] > 3


def test_parked_devices_move_to_a_shard_that_starves() -> None:
    parked = scenario(
        dedicated=0, borrowed=2, groups=4, ahead=1, trouble_s=60.0, return_after_s=0.5, pages=120, mode="decode",
        traffic=Traffic(0.3, 24, 5),
    )  # fmt: skip
    report = check(simulate(parked, host=ThreeShards))
    assert report.counts["moved"] > 0 and report.counts["batches"] > 1


def test_without_work_no_device_moves() -> None:
    idle = scenario(dedicated=2, borrowed=2, groups=1, group_size=2, turns_max=1, max_concurrency=8, trouble_s=30.0)
    report = check(simulate(idle, host=TwoShards))
    assert report.counts.get("moved", 0) <= report.counts["batches"]


class OneKilled(ThreeShards):
    def start(self) -> None:
        super().start()
        self._loop.call_later(10.0, self.shards[1].kill)
        self._loop.call_later(12.0, self.shards[1].start)


def test_a_shard_that_is_killed_in_a_step_of_many_devices_loses_nothing() -> None:
    many = scenario(
        dedicated=30, borrowed=0, trouble_s=0.0, ahead=1, groups=30, group_size=8, turns_max=2, tokens_max=16,
        coarseness=32, begun_at_once=4, max_concurrency=8, kv_blocks=2048, max_waiting=1000, wait_s=600.0, idle_s=1e6,
        beat_s=5.0, lease_s=20.0,
    )  # fmt: skip
    report = check(simulate(many, host=OneKilled))
    assert report.counts["trajectories"] == len(report.data) == 240
    assert report.counts["restarts"] == 1 and report.virtual_s > 30.0 + 12.0
