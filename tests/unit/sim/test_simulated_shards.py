"""Several simulated gateways: who is asked, and what a kill of one means for the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from rose.clock import VirtualClock, run_virtual
from rose.core.shard_placement import shard_of
from rose.engines.base import Sampling
from rose.gateway.sessions import Finish
from rose.sim.invariant_checker import EventLog, InvariantChecker
from rose.sim.scenario import SimulatedEpisode, random_scenario
from rose.sim.simulated_shards import SimulatedShards
from rose.sim.weight_store import WeightStore

GROUPS = {shard_of(name, 2): name for name in ("a", "b", "c", "d")}


def run(story: Callable[[SimulatedShards], Awaitable[None]]) -> None:
    async def live() -> None:
        scenario, store = random_scenario(1), WeightStore()
        log = EventLog(asyncio.get_running_loop().time)
        shards = SimulatedShards(scenario, store, InvariantChecker(scenario), log, random.Random(1))
        shards.start()
        try:
            await story(shards)
        finally:
            shards.close()
            store.close()

    run_virtual(live(), VirtualClock())


async def play(shards: SimulatedShards, name: str, group: str) -> None:
    await shards.begin(SimulatedEpisode(name, 0, turns=1, seed=3, sampling=Sampling(max_tokens=4)), group, 1)
    await shards.finish(name, Finish(1.0))


def test_a_batch_waits_for_a_shard_that_is_away_and_has_its_groups() -> None:
    async def story(shards: SimulatedShards) -> None:
        await play(shards, "t0", GROUPS[0])
        await play(shards, "t1", GROUPS[1])
        shards.shards[1].kill()
        with pytest.raises(ConnectionError):
            await shards.batch(2, 0, 5.0)
        shards.shards[1].start()
        batch = await shards.batch(2, 0, 5.0)
        assert batch is not None and {group.group for group in batch.groups} == set(GROUPS.values())

    run(story)


def test_a_killed_shard_takes_only_its_own_sessions_with_it() -> None:
    async def story(shards: SimulatedShards) -> None:
        shards.shards[0].kill()
        await play(shards, "t1", GROUPS[1])
        with pytest.raises(ConnectionRefusedError):
            await play(shards, "t0", GROUPS[0])

    run(story)


def test_too_few_groups_are_no_batch() -> None:
    async def story(shards: SimulatedShards) -> None:
        await play(shards, "t0", GROUPS[0])
        assert await shards.batch(2, 0, 5.0) is None

    run(story)
