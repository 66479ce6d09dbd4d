"""A gateway that is killed and comes back a minute later: every kind of client goes on, nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integration import devices
from tests.integration.gateways import AGENT, TRAINER, WORKER
from tests.integration.test_gateway_crash import GROUPS, SIZE, TOKENS_MAX, TURNS, VERSION, Chaos, check
from tests.unit.rollout_world import LoopEngine, scripted

from rose.api.trajectories import BeginBody, FinishBody
from rose.client import GatewayClient
from rose.envs.openai_agent import AgentEndpoint, AgentTask, run_agent
from rose.models.presets import write_preset
from rose.worker import agent
from rose.worker.agent import AgentSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

AWAY_S = 60.0
EPISODE_S_MAX = 300.0
MOVES_BEFORE = 30  # turns of all trajectories before the gateway is killed, of 120


def documented_options() -> dict[str, Any]:
    """What the page for agents tells users of the official client to set."""
    page = (devices.ROOT / "docs" / "agents.md").read_text()
    [(retries, timeout)] = re.findall(r"max_retries=(\d+), timeout=(\d+)\)", page)
    return {"max_retries": int(retries), "timeout": float(timeout)}


def wanted(name: str, ids: list[int], number: int) -> dict[str, Any]:
    more = {"return_token_ids": True, "trajectory": name}
    return {"model": "qwen3-3m", "prompt": ids, "max_tokens": TOKENS_MAX, "seed": number, "extra_body": more}


class Away(Chaos):
    """Four kinds of clients, one per member of each group."""

    async def play(self, client: GatewayClient, name: str) -> None:
        kind = int(name.split("-")[1])
        if kind == 0:
            await super().play(client, name)
            return
        group, ids = name.split("-")[0], [int(part) for part in name.split("-")]
        await client.begin(BeginBody(id=name, group=group, group_size=SIZE, seed=5))
        if kind == 1:
            await asyncio.to_thread(self._play_plainly, client.session(name), ids)
        else:
            task, door = AgentTask(0), AgentEndpoint(self.url, AGENT, "qwen3-3m")
            session = client.session(name)
            await run_agent(self._agent(session, ids, kind), door, session, task, EPISODE_S_MAX)
            assert task.answers == TURNS, "each counted once"
        self.told[name] = tuple(ids[:-1])
        await client.finish(name, FinishBody(reward=float(len(ids))))

    def _play_plainly(self, name: str, ids: list[int]) -> None:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=AGENT, **documented_options()) as client:
            for number in range(TURNS):
                self._take(ids, client.completions.create(**wanted(name, ids, number)), number)

    def _agent(self, name: str, ids: list[int], kind: int) -> Any:
        def play(client: openai.OpenAI, task: AgentTask) -> float:
            for number in range(TURNS):
                self._take(ids, client.completions.create(**wanted(name, ids, number)), number)
            return 1.0

        async def play_asynchronously(client: openai.AsyncOpenAI, task: AgentTask) -> float:
            for number in range(TURNS):
                self._take(ids, await client.completions.create(**wanted(name, ids, number)), number)
            return 1.0

        return play if kind == 2 else play_asynchronously

    def _take(self, ids: list[int], reply: Any, number: int) -> None:
        answer = reply.choices[0].token_ids
        assert list(answer) == scripted(ids, TOKENS_MAX), "the very tokens, none twice, none left out"
        ids += [*answer, number]
        self._loop.call_soon_threadsafe(self._move)

    async def leave_and_return(self) -> None:
        while self._moves < MOVES_BEFORE:
            self._moved.clear()
            await self._moved.wait()
        await self.kill()
        await asyncio.sleep(AWAY_S)
        await self.start()

    async def run(self, client: GatewayClient, names: list[str]) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.gather(self.leave_and_return(), self.train(client), *(self.play(client, name) for name in names))


def test_a_minute_without_a_gateway_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "PAUSE_LONGEST_S", 2.0)
    model = write_preset("qwen3-3m", tmp_path / "qwen3-3m", seed=0)

    async def story() -> None:
        away = Away(model, tmp_path / "ledger.sqlite", kills=1, seed=0)
        await away.start()
        engine = LoopEngine(step_s=0.002)
        settings = AgentSettings(away.url, WORKER, model.name, "dedicated", 16, "w")
        working = asyncio.create_task(agent.run_agent(engine, settings))
        names = [f"{group}-{member}" for group in range(GROUPS) for member in range(SIZE)]
        try:
            async with GatewayClient(away.url, TRAINER) as client:
                await client.publish(VERSION, folder=str(model), wait_s=20)
                await away.run(client, names)
                assert away.lives == 2
                await check(away, client, names)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await engine.close()
            await away.kill()

    asyncio.run(story())
