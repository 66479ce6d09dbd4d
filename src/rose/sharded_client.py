"""Several gateways as one, for trainers and environments.

A group of trajectories lives on one gateway, its shard: `core.shard_placement` says which. Everything about one
trajectory goes there, versions go to all shards, and batches of all shards become one stream of batches, whose state is
in the shards' ledgers. So a client may be killed and started again at any moment, and continues with the number of its
last batch as it would with one gateway. A shard that is away is waited for, as one gateway is.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from rose.api.trajectories import Batch, BeginBody, Begun, FinishBody, Finished, PublishReply, ShardStatus
from rose.client import PATIENCE_S, GatewayClient, TrajectoryTurns
from rose.core.shard_placement import ShardBatches, group_of, plan_batch, shard_of
from rose.errors import ConfigError, RequestRefused

Result = TypeVar("Result")


class ShardedGatewayClient:
    """A connection to several gateways that share the trajectories of one job, used like a `GatewayClient`.

    List the gateways in the same order everywhere: a gateway's place in the list is its number. One trainer asks for
    batches at a time.
    """

    def __init__(self, urls: Sequence[str], token: str, *, patience_s: float = PATIENCE_S) -> None:
        self._shards = [GatewayClient(url, token, patience_s=patience_s) for url in urls]
        self._urls = list(urls)
        if not self._shards:
            raise ConfigError("a sharded client needs the address of at least one gateway")

    async def __aenter__(self) -> ShardedGatewayClient:
        for client in self._shards:
            await client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(client.__aexit__(*error) for client in self._shards))

    def shard(self, trajectory_id: str, group: str | None = None) -> int:
        """Return the number of the gateway that a trajectory lives on.

        Without its group the trajectory was begun by this client, or its id is GROUP/MEMBER.
        """
        if group is not None:
            return shard_of(group, len(self._shards))
        begun = (number for number, client in enumerate(self._shards) if client.has_begun(trajectory_id))
        return next(begun, shard_of(group_of(trajectory_id), len(self._shards)))

    def url(self, trajectory_id: str) -> str:
        """Return the address of the gateway that a trajectory lives on, for agents that play it."""
        return self._urls[self.shard(trajectory_id)]

    async def begin(self, body: BeginBody) -> Begun:
        """Begin a trajectory. With an `id`, repeating the call is safe."""
        if body.id is None:
            body = msgspec.structs.replace(body, id=f"trajectory-{uuid.uuid4().hex}")
        assert body.id is not None
        return await self._shards[self.shard(body.id, body.group)].begin(body)

    def session(self, trajectory_id: str) -> str:
        """Return the name under which another client, with an agent's token, may play turns of this trajectory."""
        return self._of(trajectory_id).session(trajectory_id)

    def trajectory(self, trajectory_id: str, priority: int = 0) -> TrajectoryTurns:
        """Return a callable that plays turns of this trajectory, for `rose.play`."""
        return self._of(trajectory_id).trajectory(trajectory_id, priority)

    async def finish(self, trajectory_id: str, body: FinishBody) -> Finished:
        """End a trajectory with its reward."""
        return await self._of(trajectory_id).finish(trajectory_id, body)

    async def turn(self, trajectory_id: str, body: dict[str, Any]) -> bytes:
        """Play one turn with a body of the generate route, and return the response."""
        return await self._of(trajectory_id).turn(trajectory_id, body)

    async def next_batch(self, groups: int, after: int) -> Batch:
        """Return the batch after number `after` (0 at first); wait until so many groups are complete on all shards."""
        parts = await self._plan(groups, after)
        batches = await _all(client.next_batch(count, after) for client, count in zip(self._shards, parts))
        return Batch(after + 1, tuple(group for batch in batches for group in batch.groups))

    async def publish(
        self, version: str, *, folder: str = "", relay: str = "", run: str = "", hash: str = "", wait_s: float = 0.0
    ) -> PublishReply:
        """Publish a version of the weights on all shards. If this raises, repeat it: some shards may have it."""
        replies = await _all(
            client.publish(version, folder=folder, relay=relay, run=run, hash=hash, wait_s=wait_s)
            for client in self._shards
        )
        return PublishReply(
            version,
            [name for reply in replies for name in reply.ready],
            {name: why for reply in replies for name, why in reply.behind.items()},
            {name: seconds for reply in replies for name, seconds in reply.sync_s.items()},
            {name: seconds for reply in replies for name, seconds in reply.pause_s.items()},
        )

    async def pool(self) -> dict[str, Any]:
        """Return the state of all workers, each with its `shard`, and the sums over all shards.

        `version` is None while shards differ, `last_batch` is the last one that all have made; `shards` has what each
        gateway said.
        """
        pools = await _all(client.pool() for client in self._shards)
        versions = {pool["version"] for pool in pools}
        return {
            "version": versions.pop() if len(versions) == 1 else None,
            "members": [{**worker, "shard": n} for n, pool in enumerate(pools) for worker in pool["members"]],
            "waiting_turns": sum(pool["waiting_turns"] for pool in pools),
            "running_turns": sum(pool["running_turns"] for pool in pools),
            "counts": {name: sum(pool["counts"][name] for pool in pools) for name in pools[0]["counts"]},
            "last_batch": min(pool["last_batch"] for pool in pools),
            "shards": pools,
        }

    def _of(self, trajectory_id: str) -> GatewayClient:
        return self._shards[self.shard(trajectory_id)]

    async def _plan(self, groups: int, after: int) -> list[int]:
        """Wait until the shards have enough complete groups, and return how many each contributes."""
        known = await _all(self._status(number, 0) for number in range(len(self._shards)))
        polls: dict[asyncio.Task[ShardStatus], int] = {}
        try:
            while (parts := plan_batch(groups, after, [_batches(status) for status in known])) is None:
                polled = set(polls.values())
                for number, status in enumerate(known):
                    if status.last_batch <= after and number not in polled:
                        polls[asyncio.create_task(self._status(number, status.complete_groups + 1))] = number
                done, _ = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    known[polls.pop(task)] = task.result()
        finally:
            for task in polls:
                task.cancel()
            await asyncio.gather(*polls, return_exceptions=True)
        return parts

    async def _status(self, number: int, at_least: int) -> ShardStatus:
        status = await self._shards[number].shard_status(at_least)
        if status.shard is not None and (status.shard, status.shards) != (number, len(self._shards)):
            raise RequestRefused(
                f"gateway {number} of {len(self._shards)} calls itself shard {status.shard} of {status.shards}",
                hint="list all gateways, in the same order everywhere",
            )
        return status


def _batches(status: ShardStatus) -> ShardBatches:
    return ShardBatches(status.last_batch, status.last_groups, status.complete_groups)


async def _all(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Call all shards at once. If one fails the other calls are cancelled, and its error is raised."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
