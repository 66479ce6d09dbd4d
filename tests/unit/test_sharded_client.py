"""Several gateways as one client: real gateways over HTTP, each with a ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.unit.gateway.conftest import folder
from tests.unit.rollout_world import PROMPT, TOKENS, World, scripted, world

from rose.api.requests import TurnSampling
from rose.api.trajectories import BeginBody, FinishBody
from rose.core.shard_placement import shard_of
from rose.errors import ConfigError, RequestRefused
from rose.models.model_folder import ModelFolder
from rose.sharded_client import ShardedGatewayClient

__all__ = ["folder"]

SHARDS, SIZE = 2, 2
Story = Callable[[ShardedGatewayClient, list[World]], Awaitable[None]]


def tell(folder: ModelFolder, tmp_path: Path, story: Story, *, is_swapped: bool = False) -> None:
    async def whole() -> None:
        async with AsyncExitStack() as stack:
            shards = [
                await stack.enter_async_context(
                    world(folder, ledger=str(tmp_path / f"{n}.sqlite"), shards=("http://0", "http://1"), shard=n)
                )
                for n in range(SHARDS)
            ]
            for number, shard in enumerate(shards):
                await shard.worker(f"w{number}")
            urls = [shard.url for shard in shards]
            client = ShardedGatewayClient(urls[::-1] if is_swapped else urls, TOKENS.trainer, patience_s=5.0)
            await story(await stack.enter_async_context(client), shards)

    asyncio.run(whole())


async def play(client: ShardedGatewayClient, group: str, member: int) -> None:
    name = f"{group}/{member}"
    await client.begin(BeginBody(id=name, group=group, group_size=SIZE, seed=1))
    answer = await client.trajectory(name)(PROMPT, TurnSampling(max_tokens=3, seed=member))
    assert list(answer.token_ids) == scripted(PROMPT, 3)
    await client.finish(name, FinishBody(reward=float(member)))


async def play_groups(client: ShardedGatewayClient, *groups: str) -> None:
    await asyncio.gather(*(play(client, group, member) for group in groups for member in range(SIZE)))


def test_groups_are_spread_and_come_back_as_one_stream(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(client: ShardedGatewayClient, shards: list[World]) -> None:
        names = [f"run/{number}" for number in range(8)]
        waiting = asyncio.create_task(client.next_batch(5, 0))
        await play_groups(client, *names)
        first = await waiting
        assert (first.batch, len(first.groups)) == (1, 5)
        assert await client.next_batch(5, 0) == first, "the same batch, until it is confirmed"
        assert await client.next_batch(1, 0) == first, "whatever is asked for"
        second = await client.next_batch(3, 1)
        assert sorted(group.group for batch in (first, second) for group in batch.groups) == names
        on_shards = [{s.group_id for s in shard.gateway.core.trajectories if s.group_id} for shard in shards]
        assert not on_shards[0] & on_shards[1]
        pool = await client.pool()
        assert pool["last_batch"] == 2 and {(m["name"], m["shard"]) for m in pool["members"]} == {("w0", 0), ("w1", 1)}
        assert pool["counts"]["ended"] == 16 and pool["version"] is None

    tell(folder, tmp_path, story)


def test_a_batch_may_come_from_one_shard_alone(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(client: ShardedGatewayClient, shards: list[World]) -> None:
        names = [name for name in (f"run/{n}" for n in range(9)) if shard_of(name, SHARDS) == 1][:2]
        for number, name in enumerate(names):
            await play_groups(client, name)
            batch = await client.next_batch(1, number)
            assert [group.group for group in batch.groups] == [name]
        assert [shard.gateway.core.trajectories.last_batch for shard in shards] == [2, 2]

    tell(folder, tmp_path, story)


def test_a_version_reaches_the_workers_of_all_shards(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(client: ShardedGatewayClient, shards: list[World]) -> None:
        for _ in range(2):
            reply = await client.publish("v1", folder=str(folder.path), wait_s=20)
            assert sorted(reply.ready) == ["w0", "w1"] and not reply.behind
        assert (await client.pool())["version"] == "v1"
        assert [shard.gateway.core.pool.newest_version for shard in shards] == ["v1", "v1"]

    tell(folder, tmp_path, story)


def test_a_trajectory_without_a_name_stays_where_it_was_begun(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(client: ShardedGatewayClient, shards: list[World]) -> None:
        for group in ("a", "b", "c", "d"):
            begun = await client.begin(BeginBody(group=group))
            assert client.shard(begun.id) == shard_of(group, SHARDS)
            assert client.url(begun.id) == shards[client.shard(begun.id)].url
            assert client.session(begun.id) == begun.session
            assert (await client.finish(begun.id, FinishBody())).id == begun.id

    tell(folder, tmp_path, story)


def test_gateways_in_another_order_are_refused(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(client: ShardedGatewayClient, shards: list[World]) -> None:
        with pytest.raises(RequestRefused, match="calls itself shard"):
            await client.next_batch(1, 0)

    tell(folder, tmp_path, story, is_swapped=True)


def test_a_client_without_gateways_is_refused() -> None:
    with pytest.raises(ConfigError):
        ShardedGatewayClient([], "token")
