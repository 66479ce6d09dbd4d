"""Environments and agents in trouble, through a real gateway: their episodes are lost, and nothing else is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration import gateways
from tests.integration.gateways import AGENT, TRAINER, RunningGateway
from tests.unit.synchronous_steps import play_step

from rose.api.trajectories import BeginBody, FinishBody
from rose.client import GatewayClient
from rose.envs.environment import EnvironmentFailed
from rose.envs.environment_registry import ENVIRONMENTS, EnvironmentEntry
from rose.envs.frozenlake import FrozenLake, LakeSettings
from rose.envs.openai_agent import AgentEndpoint, AgentTask, Verdict, run_agent
from rose.envs.trouble import Troubled, TroubleSettings
from rose.models.model_folder import load_model_folder
from rose.models.presets import write_preset
from rose.run.run_rollouts import Played, Rollouts
from rose.run.run_settings import load_run_settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("models") / "frozenlake-1m", seed=0)


@pytest.fixture
def found(model: Path) -> Iterator[RunningGateway]:
    with gateways.gateway(model, "beat_s=0.2") as running:
        with gateways.worker(model, running.url, "steady"):
            running.has_open(1)
            yield running


WORDS = ("the call was lost", "it answered", "its reward is", "UnicodeEncodeError", "took over")
TROUBLE = TroubleSettings("exponential:mean=0.01", failure_rate=0.1, hang_rate=0.05, nonsense_rate=0.1, hang_s=20.0)


def test_a_step_ends_with_every_trajectory_accounted_for(
    found: RunningGateway, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(settings: LakeSettings) -> Troubled:
        return Troubled(FrozenLake(settings), TROUBLE, dice)

    dice, name = random.Random(0), "troubled"
    monkeypatch.setitem(ENVIRONMENTS, name, EnvironmentEntry(LakeSettings(turns_max=4), make, 8, "in trouble"))
    overrides = ["groups.groups=3", "groups.size=4", "groups.dynamic_sampling=false", "groups.draws_max=6"]
    patience = ["patience.step_s_max=0.5", "patience.reset_s_max=0.5", "patience.tries_max=1"]
    settings = load_run_settings(None, [*overrides, *patience, f"environment={name}"])

    async def story() -> tuple[Played, Any]:
        async with GatewayClient(found.url, TRAINER) as client:
            rollouts = Rollouts(client, load_model_folder(model), settings, name, lambda fact, decisions: None)
            return await play_step(rollouts), rollouts.ledger.balance()

    played, balance = asyncio.run(asyncio.wait_for(story(), 100))
    assert played.failures, "some episodes were lost"
    assert all(any(word in reason for word in WORDS) for reason in played.failures), played.failures
    assert (balance.lost, balance.doubled, balance.differing, balance.open) == (0, 0, 0, 0)
    assert balance.begun == balance.returned + balance.written_off and balance.written_off >= len(played.failures)
    assert found.pool()["running_turns"] == found.pool()["waiting_turns"] == 0


def walker(client: Any, task: AgentTask) -> None:
    """What anybody would write against the OpenAI client."""
    messages: list[dict[str, str]] = [{"role": "user", "content": task.observation}]
    while not task.is_over:
        reply = client.chat.completions.create(model=task.model, messages=messages, max_tokens=8)
        words = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": task.step(words)}]


async def careless(client: Any, task: AgentTask) -> float:
    """Asks once, and then judges itself."""
    await client.chat.completions.create(
        model=task.model, messages=[{"role": "user", "content": "Where am I?"}], max_tokens=4
    )
    return 0.5


def broken(client: Any, task: AgentTask) -> None:
    client.chat.completions.create(model=task.model, messages=[{"role": "user", "content": "?"}], max_tokens=4)
    raise ValueError("lost the thread")


def test_agents_written_against_the_openai_client_are_rollouts(found: RunningGateway) -> None:
    door = AgentEndpoint(found.url, AGENT, "frozenlake-1m")

    async def one(client: GatewayClient, name: str, agent: Any) -> Verdict | str:
        await client.begin(BeginBody(id=name, group="agents", group_size=4, task="frozenlake"))
        task = AgentTask(1, door.model, FrozenLake(LakeSettings(turns_max=3)))
        try:
            verdict = await run_agent(agent, door, client.session(name), task, seconds_max=60)
        except EnvironmentFailed as error:
            await client.finish(name, FinishBody(is_lost=True))
            return error.what
        await client.finish(name, FinishBody(reward=verdict.reward, invalid_turns=verdict.invalid_turns))
        return verdict

    async def story() -> tuple[list[Verdict | str], Any]:
        async with GatewayClient(found.url, TRAINER) as client:
            agents = {"a": walker, "b": walker, "c": careless, "d": broken}
            verdicts = await asyncio.gather(*(one(client, name, agent) for name, agent in agents.items()))
            return verdicts, await client.next_batch(1, 0)

    verdicts, batch = asyncio.run(story())
    assert verdicts[3] == "agent broken failed: ValueError: lost the thread"
    [group] = batch.groups
    by_name = {trajectory.trajectory_id: trajectory for trajectory in group.trajectories}
    assert group.lost == 1 and set(by_name) == {"a", "b", "c"}
    assert (by_name["a"].turns, by_name["c"].turns, by_name["c"].reward) == (3, 1, 0.5)
    assert by_name["a"].reward == verdicts[0].reward  # type: ignore[union-attr]
    assert by_name["a"].token_ids != by_name["b"].token_ids, "members of a group throw their own dice"
    assert all(sum(trajectory.loss_mask) > 0 for trajectory in by_name.values())
