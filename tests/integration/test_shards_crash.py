"""Two gateways behind HAProxy, each killed again and again, and a trainer that dies too: nothing is lost or doubled.

Gateways, proxy and workers are processes. Some episodes are played by the trainer's own client, the others by an agent
that knows the proxy alone. Tokens are by arithmetic, so the right answer to every turn is known.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.integration import devices
from tests.integration.gateways import AGENT, TOKENS, TRAINER
from tests.integration.proxy import free_port, needs_haproxy, proxy
from tests.unit.rollout_world import scripted

from rose.api.requests import TurnSampling
from rose.api.trajectories import Batch, BeginBody, FinishBody
from rose.client import GatewayClient
from rose.core.shard_placement import shard_of
from rose.models.presets import write_preset
from rose.sharded_client import ShardedGatewayClient

pytestmark = [pytest.mark.slow, needs_haproxy, pytest.mark.timeout(300)]

GROUPS, SIZE, TURNS, TOKENS_MAX, BATCH = 10, 4, 5, 40, 3
KILLS = 4  # of each shard
VERSION = "v1"


async def started(*arguments: str, ready: bytes) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", *arguments),
        stdout=asyncio.subprocess.PIPE,
        cwd=devices.ROOT,
        env=devices.environment() | TOKENS,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            if ready in line:
                return process
        raise AssertionError(f"{arguments[0]} did not start")
    except BaseException:
        process.kill()
        raise


async def killed(process: asyncio.subprocess.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()


class Shards:
    """The gateways, the workers, and what the environments know of every trajectory."""

    def __init__(self, model: Path, folder: Path, seed: int) -> None:
        self.model, self.folder, self.chance = model, folder, random.Random(seed)
        self.ports = [free_port(), free_port()]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.known: dict[str, tuple[int, ...]] = {}
        self.batches: list[Batch] = []
        self.kills = self.abandoned = 0
        self._gateways: dict[int, asyncio.subprocess.Process] = {}
        self._workers: list[asyncio.subprocess.Process] = []
        self._moves, self._moved = 0, asyncio.Event()

    async def start(self, number: int) -> None:
        settings = [f"port={self.ports[number]}", f"ledger={self.folder / f'{number}.sqlite'}", "beat_s=0.2"]
        settings += ["lease_s=3", f"shard={number}", f"shards=[{','.join(self.urls)}]"]
        arguments = ("tests.integration.gateway_process", str(self.model), *settings)
        self._gateways[number] = await started(*arguments, ready=b"ready at")

    async def start_workers(self, address: str) -> None:
        gateway = ",".join(f"{address}/shards/{number}" for number in range(len(self.ports)))
        names = [f"w{number}" for number in range(20)]
        for shard in range(len(self.ports)):
            for name in [name for name in names if shard_of(name, len(self.ports)) == shard][:2]:
                arguments = ("tests.integration.scripted_worker", gateway, self.model.name, name, "0.002")
                self._workers.append(await started(*arguments, ready=b"ready"))

    async def close(self) -> None:
        for process in [*self._gateways.values(), *self._workers]:
            if process.returncode is None:
                await killed(process)

    async def kill_again_and_again(self, number: int) -> None:
        """Kill one shard, each time after a few more turns and at any moment of what it does."""
        wanted = 0
        for _ in range(KILLS):
            wanted += self.chance.randrange(1, 2 * GROUPS * SIZE * TURNS // (3 * KILLS) + 2)
            while self._moves < wanted:
                self._moved.clear()
                await self._moved.wait()
            await asyncio.sleep(self.chance.random() * 0.05)
            await killed(self._gateways[number])
            self.kills += 1
            await self.start(number)

    def _on_move(self) -> None:
        self._moves += 1
        self._moved.set()

    async def play(self, trainer: ShardedGatewayClient, agent: GatewayClient, group: int, member: int) -> None:
        name, ids = f"run/{group}/{member}", [group, member]
        await trainer.begin(BeginBody(id=name, group=f"run/{group}", group_size=SIZE, seed=5))
        generate = trainer.trajectory(name) if member % 2 else agent.trajectory(trainer.session(name))
        for number in range(TURNS):
            answer = await generate(tuple(ids), TurnSampling(max_tokens=TOKENS_MAX, seed=number))
            assert list(answer.token_ids) == scripted(ids, TOKENS_MAX), "the very tokens, none twice, none left out"
            ids += [*answer.token_ids, number]
            self._on_move()
        self.known[name] = tuple(ids[:-1])
        await trainer.finish(name, FinishBody(reward=float(len(ids))))
        self._on_move()

    async def train(self) -> None:
        """Take all groups with one client after another; some die while they wait, some before their checkpoint."""
        left, seen = GROUPS, dict[int, Batch]()
        while left:
            async with ShardedGatewayClient(self.urls, TRAINER) as client:
                asking = asyncio.create_task(client.next_batch(min(left, BATCH), len(self.batches)))
                if self.chance.random() < 0.5:
                    await asyncio.wait([asking], timeout=self.chance.random())
                    if not asking.done():
                        asking.cancel()
                        await asyncio.gather(asking, return_exceptions=True)
                        self.abandoned += 1
                        continue
                batch = await asking
                assert seen.setdefault(batch.batch, batch) == batch, "a batch never changes"
                if self.chance.random() < 0.8:
                    self.batches.append(batch)
                    left -= len(batch.groups)

    def check(self) -> None:
        groups = [group for batch in self.batches for group in batch.groups]
        found = [trajectory for group in groups for trajectory in group.trajectories]
        times = Counter(trajectory.trajectory_id for trajectory in found)
        assert sorted(times) == sorted(self.known) and len(times) == GROUPS * SIZE, "lost"
        assert set(times.values()) == {1}, "doubled"
        assert sum(group.lost for group in groups) == 0
        for trajectory in found:
            assert trajectory.token_ids == self.known[trajectory.trajectory_id]
            assert (trajectory.turns, trajectory.versions_used()) == (TURNS, (VERSION,))
        assert self.kills > KILLS, "shards were killed while turns ran"


@pytest.mark.parametrize("seed", [1, 2])
def test_shards_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    async def story() -> None:
        shards = Shards(write_preset("qwen3-3m", tmp_path / "qwen3-3m", seed=0), tmp_path, seed)
        try:
            await asyncio.gather(shards.start(0), shards.start(1))
            with proxy(*shards.ports) as address:
                await shards.start_workers(address)
                async with (
                    ShardedGatewayClient(shards.urls, TRAINER) as trainer,
                    GatewayClient(address, AGENT) as agent,
                ):
                    await trainer.publish(VERSION, folder=str(shards.model), wait_s=20)
                    killing = [asyncio.create_task(shards.kill_again_and_again(number)) for number in range(2)]
                    members = [(group, member) for group in range(GROUPS) for member in range(SIZE)]
                    await asyncio.gather(shards.train(), *(shards.play(trainer, agent, *one) for one in members))
                    for task in killing:
                        task.cancel()
                    await asyncio.gather(*killing, return_exceptions=True)
                    shards.check()
        finally:
            await shards.close()

    asyncio.run(story())
