"""A gateway that is killed, again and again, in the middle of everything: nothing is lost, nothing is doubled.

The gateway is a process with a ledger; agents and environments live here and simply try again. Tokens are by
arithmetic, so the right answer to every turn is known, and every trajectory must come out of the batches exactly once
with exactly what its environment was told.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.integration import devices
from tests.integration.gateways import TOKENS, TRAINER, WORKER
from tests.unit.rollout_world import LoopEngine, scripted

from rose.api.requests import TurnSampling
from rose.api.trajectories import Batch, BeginBody, FinishBody
from rose.client import GatewayClient
from rose.models.presets import write_preset
from rose.worker import agent
from rose.worker.agent import AgentSettings, run_agent

GROUPS, SIZE, TURNS, TOKENS_MAX = 6, 4, 5, 40
VERSION = "v1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0)


class Chaos:
    """A gateway at one address, in one life after another."""

    def __init__(self, model: Path, ledger: Path, kills: int, seed: int) -> None:
        self.model, self.ledger, self.kills = model, ledger, kills
        self.chance = random.Random(seed)
        self.lives = 0
        self.told: dict[str, tuple[int, ...]] = {}  # every token of each trajectory, as its environment knows it
        self.batches: list[Batch] = []
        self._moves = 0
        self._moved = asyncio.Event()
        self._process: asyncio.subprocess.Process
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port: int = found.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        settings = [f"port={self.port}", f"ledger={self.ledger}", "beat_s=0.2", "lease_s=3"]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.integration.gateway_process", str(self.model), *settings),
            stdout=asyncio.subprocess.PIPE,
            cwd=devices.ROOT,
            env=devices.environment() | TOKENS,
        )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if b"ready at" in line:
                self.lives += 1
                return
        raise AssertionError("the gateway did not start")

    async def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def kill_again_and_again(self) -> None:
        """Each time after a few more turns, and a moment that falls anywhere in what they do."""
        wanted = 0
        for _ in range(self.kills):
            wanted += self.chance.randrange(1, 2 * GROUPS * SIZE * TURNS // (3 * self.kills) + 2)
            while self._moves < wanted:
                self._moved.clear()
                await self._moved.wait()
            await asyncio.sleep(self.chance.random() * 0.05)
            await self.kill()
            await self.start()

    def _move(self) -> None:
        self._moves += 1
        self._moved.set()

    async def play(self, client: GatewayClient, name: str) -> None:
        group = name.split("-")[0]
        await client.begin(BeginBody(id=name, group=group, group_size=SIZE, seed=5))
        generate = client.trajectory(name)
        ids = [int(part) for part in name.split("-")]
        for number in range(TURNS):
            answer = await generate(tuple(ids), TurnSampling(max_tokens=TOKENS_MAX, seed=number))
            assert list(answer.token_ids) == scripted(ids, TOKENS_MAX), "the very tokens, none twice, none left out"
            ids += [*answer.token_ids, number]
            self._move()
        self.told[name] = tuple(ids[:-1])
        await client.finish(name, FinishBody(reward=float(len(ids))))
        self._move()

    async def train(self, client: GatewayClient) -> None:
        for number in range(GROUPS):
            batch = await client.next_batch(1, number)
            assert batch.batch == number + 1
            self.batches.append(batch)


@pytest.mark.parametrize(
    "kills, seed", [(2, 1), pytest.param(15, 2, marks=pytest.mark.slow), pytest.param(15, 3, marks=pytest.mark.slow)]
)
def test_a_gateway_killed_at_random_moments(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, seed: int
) -> None:
    monkeypatch.setattr(agent, "PAUSE_LONGEST_S", 0.3)

    async def story() -> None:
        chaos = Chaos(model, tmp_path / "ledger.sqlite", kills, seed)
        await chaos.start()
        engines = [LoopEngine(step_s=0.002) for _ in range(2)]
        agents = [
            asyncio.create_task(
                run_agent(engine, AgentSettings(chaos.url, WORKER, model.name, "dedicated", 16, f"w{n}"))
            )
            for n, engine in enumerate(engines)
        ]
        names = [f"{group}-{member}" for group in range(GROUPS) for member in range(SIZE)]
        try:
            async with GatewayClient(chaos.url, TRAINER) as client:
                await client.publish(VERSION, folder=str(model), wait_s=20)
                killing = asyncio.create_task(chaos.kill_again_and_again())
                await asyncio.gather(chaos.train(client), *(chaos.play(client, name) for name in names))
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)
                await check(chaos, client, names)
        finally:
            for task in agents:
                task.cancel()
            await asyncio.gather(*agents, return_exceptions=True)
            for engine in engines:
                await engine.close()
            await chaos.kill()

    asyncio.run(story())


async def check(chaos: Chaos, client: GatewayClient, names: list[str]) -> None:
    found = [trajectory for batch in chaos.batches for group in batch.groups for trajectory in group.trajectories]
    times = Counter(trajectory.trajectory_id for trajectory in found)
    assert sorted(times) == sorted(names), "lost"
    assert set(times.values()) == {1}, "doubled"
    assert sum(group.lost for batch in chaos.batches for group in batch.groups) == 0
    for trajectory in found:
        assert trajectory.token_ids == chaos.told[trajectory.trajectory_id]
        assert trajectory.generated_tokens == TURNS * TOKENS_MAX and trajectory.turns == TURNS
        assert trajectory.versions_used() == (VERSION,)
    assert chaos.lives > 1 + chaos.kills // 2, "it was killed as often as that"
    await chaos.kill()
    await chaos.start()
    assert await client.next_batch(1, GROUPS - 1) == chaos.batches[-1], "the same batch in the next life"
    assert (await client.pool())["version"] == VERSION
