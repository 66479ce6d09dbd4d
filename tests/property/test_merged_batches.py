"""The merged stream of batches: every group once and in one batch, whatever dies between any two steps.

The shards are real tables of trajectories with ledgers that outlive them. Client and shards die at random moments:
before a call, and after it has taken effect but before its answer arrives.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from typing import Any

import pytest

from rose.api.trajectories import Batch, ShardStatus
from rose.client import GatewayClient
from rose.config.server_settings import GatewaySettings
from rose.core.shard_placement import shard_of
from rose.errors import RoseError
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.ledger import Ledger
from rose.gateway.sessions import Finish
from rose.sharded_client import ShardedGatewayClient

GROUPS, SIZE = 40, 2


class ClientDied(Exception):
    """The trainer's process is killed."""


class ShardProcess:
    """The core of a gateway in one incarnation after another."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self.restart()

    def restart(self) -> None:
        self.ledger = Ledger(None, "model", connection=self._connection)
        self.core = GatewayCore("model", GatewaySettings(), self.ledger)

    def close(self) -> None:
        self._connection.close()


class MortalClient(GatewayClient):
    """The client of one shard; chance may kill the shard or the trainer before and after each call."""

    def __init__(self, shard: ShardProcess, chance: random.Random) -> None:
        super().__init__("http://shard", "token")
        self._shard, self._chance = shard, chance

    def _die(self) -> None:
        kind = self._chance.random()
        if kind < 0.05:
            raise ClientDied
        if kind < 0.1:
            self._shard.ledger.abandon()
            self._shard.restart()

    async def shard_status(self, at_least: int = 0) -> ShardStatus:
        self._die()
        while (known := self._shard.core.trajectories).complete_groups < at_least:
            await asyncio.sleep(0)
        self._die()
        return ShardStatus(None, 0, known.last_batch, known.last_groups, known.complete_groups)

    async def next_batch(self, groups: int, after: int) -> Batch:
        self._die()
        while (batch := self._shard.core.trajectories.batch(groups, after)) is None:
            await asyncio.sleep(0)
        if self._chance.random() < 0.1:  # it was not acknowledged, so it need not be durable
            self._shard.ledger.abandon()
            self._shard.restart()
            return await self.next_batch(groups, after)
        self._shard.ledger.commit()
        self._die()
        return batch


async def play(shards: list[ShardProcess], chance: random.Random) -> None:
    for number in range(GROUPS):
        group = f"run/{number}"
        shard = shards[shard_of(group, len(shards))]
        for member in range(SIZE):
            shard.core.trajectories.begin(f"{group}/{member}", 0.0, group=group, group_size=SIZE)
            shard.ledger.commit()
            shard.core.finish(f"{group}/{member}", Finish(1.0), 0.0)
            shard.ledger.commit()
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)


async def train(shards: list[ShardProcess], chance: random.Random) -> list[Batch]:
    """Take batches, going back to the last checkpoint after each death, as a trainer does."""
    taken: list[Batch] = []
    seen: dict[int, Batch] = {}
    while sum(len(batch.groups) for batch in taken) < GROUPS:
        client: Any = ShardedGatewayClient(["x"] * len(shards), "token")
        client._shards = [MortalClient(shard, chance) for shard in shards]
        try:
            left = GROUPS - sum(len(batch.groups) for batch in taken)
            batch = await client.next_batch(min(left, chance.randint(1, 6)), len(taken))
        except ClientDied:
            continue
        assert seen.setdefault(batch.batch, batch) == batch, "a batch never changes"
        assert batch.batch == len(taken) + 1
        if chance.random() < 0.7:  # else it dies before its checkpoint, and asks for the same batch again
            taken.append(batch)
    return taken


@pytest.mark.parametrize("seed", range(60))
def test_every_group_is_delivered_once_whatever_dies(seed: int) -> None:
    chance = random.Random(seed)
    shards = [ShardProcess() for _ in range(chance.choice([1, 2, 3, 5]))]

    async def story() -> list[Batch]:
        playing = asyncio.create_task(play(shards, chance))
        async with asyncio.timeout(60):
            taken = await train(shards, chance)
        await playing
        return taken

    try:
        taken = asyncio.run(story())
    finally:
        for shard in shards:
            shard.close()
    delivered = [group.group for batch in taken for group in batch.groups]
    assert sorted(delivered) == sorted(f"run/{number}" for number in range(GROUPS))
    assert all(group.lost == SIZE for batch in taken for group in batch.groups), "empty trajectories count as lost"


def test_a_shard_that_never_made_a_batch_refuses_the_next_one() -> None:
    shard = ShardProcess()
    try:
        with pytest.raises(RoseError, match="there is no batch 3"):
            asyncio.run(MortalClient(shard, random.Random(1)).next_batch(1, 3))
    finally:
        shard.close()
