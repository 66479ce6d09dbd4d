"""ALFWorld through a real gateway: a model that knows nothing plays, and an agent that knows the way brings it home."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration import gateways
from tests.integration.gateways import AGENT, TRAINER, RunningGateway
from tests.needs import marks
from tests.unit.synchronous_steps import play_step

from rose.api.trajectories import BeginBody, FinishBody
from rose.client import GatewayClient
from rose.envs.alfworld.alfworld_environment import Alfworld, AlfworldSettings
from rose.envs.openai_agent import AgentEndpoint, AgentTask, Verdict, run_agent
from rose.models.model_folder import load_model_folder
from rose.models.presets import write_preset
from rose.run.run_rollouts import Played, Rollouts
from rose.run.run_settings import load_run_settings

pytestmark = marks("alfworld")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0)


@pytest.fixture
def found(model: Path) -> Iterator[RunningGateway]:
    with gateways.gateway(model, "beat_s=0.2") as running:
        with gateways.worker(model, running.url, "steady"):
            running.has_open(1)
            yield running


def test_a_step_of_households(found: RunningGateway, model: Path) -> None:
    overrides = ["groups.groups=2", "groups.size=4", "groups.dynamic_sampling=false", "environment=alfworld"]
    settings = load_run_settings(None, overrides)

    async def story() -> tuple[Played, Any]:
        async with GatewayClient(found.url, TRAINER) as client:
            rollouts = Rollouts(client, load_model_folder(model), settings, "homes", lambda fact, decisions: None)
            return await play_step(rollouts), rollouts.ledger.balance()

    played, balance = asyncio.run(story())
    assert not played.failures and played.trajectories == balance.returned == 8
    assert played.turns == 8 * AlfworldSettings().turns_max, "none was cut off by the context"
    assert all(len(trajectory.token_ids) <= 4096 for group in played.kept for trajectory in group)


def test_an_agent_that_knows_the_way(found: RunningGateway, model: Path) -> None:
    """It asks the model, thanks for the answer and does what the planner says."""
    home = Alfworld(AlfworldSettings(view="full"))

    def agent(client: Any, task: AgentTask) -> None:
        while not task.is_over:
            messages = [{"role": "user", "content": task.observation}]
            client.chat.completions.create(model=task.model, messages=messages, max_tokens=4)
            task.step(home.best_action())

    async def story() -> tuple[Verdict, Any]:
        async with GatewayClient(found.url, TRAINER) as client:
            await client.begin(BeginBody(id="home", group="homes", group_size=1))
            door = AgentEndpoint(found.url, AGENT, "qwen3-3m")
            verdict = await run_agent(agent, door, client.session("home"), AgentTask(7, door.model, home), 120)
            await client.finish("home", FinishBody(reward=verdict.reward, is_success=verdict.is_success))
            return verdict, await client.next_batch(1, 0)

    verdict, batch = asyncio.run(story())
    assert verdict.is_success and verdict.reward == 1.0 and verdict.turns == len(home.plan)
    branches = batch.groups[0].trajectories
    assert len(branches) == verdict.turns, "every question began anew, and each is trained on by itself"
    assert all(branch.is_success and sum(branch.loss_mask) > 0 for branch in branches)
