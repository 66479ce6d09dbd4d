"""An agent as a setting of a run: how it is found, what it is given, and what comes of its episodes."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.unit.fake_gateway import FakeGateway
from tests.unit.rollout_world import TOKENS, world
from tests.unit.synchronous_steps import play_step

from rose.api.requests import TurnSampling
from rose.client import GatewayClient
from rose.core.staleness import StalenessRules
from rose.core.trajectory import Trajectory
from rose.envs import openai_agent
from rose.envs.environment import EnvironmentFailed
from rose.envs.openai_agent import AgentEndpoint, AgentFailed, absolute_name, find_agent
from rose.envs.play import Episode
from rose.errors import ConfigError
from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.run.resuming import ResumePoint
from rose.run.rollout_buffer import RolloutBuffer
from rose.run.run_folder import in_force
from rose.run.run_rollouts import AgentEpisodes, Played, Rollouts
from rose.run.run_settings import GroupSettings, RunSettings, load_run_settings

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_agent.py"
NOWHERE = AgentEndpoint("http://127.0.0.1:9", "a-token", "m")

# How it is found


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "an_agent.py").write_text("def play(client, task):\n    return 1.0\n\nNUMBER = 3\n")
    (tmp_path / "broken_agent.py").write_text("import nothing_of_this_name\n")
    yield tmp_path
    sys.modules.pop("an_agent", None)


@pytest.mark.parametrize("name", ["an_agent:play", "an_agent.py:play"])
def test_an_agent_by_module_or_file(here, name):
    assert find_agent(name)(None, None) == 1.0
    assert load_run_settings(None, [f"agent={name}"]).agent == name


@pytest.mark.parametrize(
    "name, word",
    [
        ("play", "names no function"),
        (":play", "names no function"),
        ("an_agent.py:plat", "did you mean play"),
        ("an_agent.py:NUMBER", "is no function"),
        ("nowhere.py:play", "no file nowhere.py"),
        ("no_such_module:play", "ModuleNotFoundError"),
        ("broken_agent.py:play", "No module named 'nothing_of_this_name'"),
    ],
)
def test_what_is_wrong_with_it_is_told_before_anything_is_started(here, name, word):
    with pytest.raises(ConfigError) as told:
        load_run_settings(None, [f"agent={name}"])
    assert word in str(told.value)


def test_an_agent_without_a_client_is_told_before_anything_is_started(here, monkeypatch):
    monkeypatch.setattr(openai_agent, "CLIENT", "no_such_client")
    with pytest.raises(ConfigError, match="needs the package no_such_client"):
        load_run_settings(None, ["agent=an_agent.py:play"])


def test_a_run_that_is_resumed_from_elsewhere_finds_its_agent(here, monkeypatch):
    assert absolute_name("an_agent.py:play") == f"{here / 'an_agent.py'}:play"
    assert absolute_name("package.module:play") == "package.module:play"
    settings = in_force(load_run_settings(None, ["agent=an_agent.py:play"]), "it")
    monkeypatch.chdir(here.parent)
    assert find_agent(settings.agent or "")(None, None) == 1.0


# What it is given


class Completions(BaseHTTPRequestHandler):
    """Always goes right. Turns down every first request of a session, as a gateway that asks for patience."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = self.headers["X-Session-ID"]
        is_first = all(session != other for other, _ in self.asked)
        self.asked.append((session, body))
        words = {"role": "assistant", "content": "<answer>Right</answer>"}
        choice = {"index": 0, "message": words, "finish_reason": "stop"}
        reply = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        data = b"{}" if is_first else json.dumps(reply).encode()
        self.send_response(429 if is_first else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    Completions.asked = []
    found = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    found.daemon_threads = True
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}", Completions.asked
    found.shutdown()
    found.server_close()


def episode(name: str = "r/0/1", seed: int = 3) -> Episode:
    return Episode(name, "r/0", seed, TurnSampling(temperature=0.7, max_tokens=8, seed=1))


def settings_for(agent: str, *more: str) -> RunSettings:
    return load_run_settings(None, [f"agent={agent}", *more])


@pytest.mark.parametrize("function", ["play", "play_asynchronously"])
def test_an_episode_through_the_client(server, tmp_path, function):
    url, asked = server
    text = EXAMPLE.read_text()
    awaited = text.replace("def play(", "async def play_asynchronously(").replace("= client.", "= await client.")
    (tmp_path / "both.py").write_text(text + awaited)
    episodes = AgentEpisodes(
        settings_for(f"{tmp_path / 'both.py'}:{function}"), AgentEndpoint(url, "a-token", "the-model")
    )
    found = asyncio.run(episodes.play(episode(), episode().trajectory_id))
    assert (found.trajectory_id, found.group_id, found.token_ids) == ("r/0/1", "r/0", ())
    assert (found.reward, found.is_success, found.turns) == (0.0, False, 2), "a request that was turned down is no turn"
    assert {session for session, _ in asked} == {"r/0/1"}
    bodies = [body for _, body in asked]
    assert all((body["model"], body["temperature"], body["max_tokens"]) == ("the-model", 0.7, 8) for body in bodies)
    assert [len(body["messages"]) for body in bodies] == [1, 1, 3]


def test_an_agent_plays_the_environment_with_its_options(server):
    url, asked = server
    settings = settings_for(f"{EXAMPLE}:play", "environment_options.view=grid")
    asyncio.run(
        AgentEpisodes(settings, AgentEndpoint(url, "a-token", "the-model")).play(episode(), episode().trajectory_id)
    )
    assert asked[0][1]["messages"][0]["content"].startswith("P")


def test_an_agent_that_asks_nothing_has_nothing_to_learn_from(tmp_path):
    (tmp_path / "silent.py").write_text("def play(client, task):\n    return 1.0\n")
    episodes = AgentEpisodes(settings_for(f"{tmp_path / 'silent.py'}:play"), NOWHERE)
    with pytest.raises(AgentFailed, match="asked the model nothing"):
        asyncio.run(episodes.play(episode(), episode().trajectory_id))


def test_an_agent_has_its_own_patience(tmp_path):
    (tmp_path / "slow.py").write_text("import threading\n\ndef play(client, task):\n    threading.Event().wait(3)\n")
    episodes = AgentEpisodes(settings_for(f"{tmp_path / 'slow.py'}:play", "patience.agent_s_max=0.05"), NOWHERE)
    with pytest.raises(AgentFailed, match=r"agent play took over 0\.05 s"):
        asyncio.run(episodes.play(episode(), episode().trajectory_id))


# What comes of it


class Agents:
    """Asks the fake gateway for one answer, as an agent would through its client."""

    def __init__(self, gateway: FakeGateway, failing: str = "") -> None:
        self.gateway, self.failing = gateway, failing

    async def play(self, episode: Episode, session: str) -> Trajectory:
        if episode.trajectory_id == self.failing:
            raise EnvironmentFailed("lost the thread")
        await self.gateway.trajectory(episode.trajectory_id)((5, 6, 7), episode.sampling)
        reward = float(episode.sampling.seed % 2)
        return Trajectory(episode.trajectory_id, episode.group_id, (), (), (), (), reward, reward > 0, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m"))


def rollouts_of(model: ModelFolder, failing: str = "") -> tuple[Rollouts, FakeGateway]:
    gateway = FakeGateway(model, waits=True)
    settings = replace(load_run_settings(), groups=GroupSettings(groups=1, size=4, draws_max=4))
    playing: Any = Agents(gateway, failing)
    return Rollouts(gateway, model, settings, "r", lambda fact, decisions: None, playing), gateway  # type: ignore[arg-type]


def test_tokens_of_an_agent_are_those_that_the_gateway_kept(model):
    rollouts, _ = rollouts_of(model)
    played = asyncio.run(play_step(rollouts))
    [group] = played.kept
    assert [sum(trajectory.loss_mask) > 0 for trajectory in group] == [True] * 4
    assert played.generated_tokens == sum(trajectory.generated_tokens for trajectory in group)
    assert (played.trajectories, played.turns, played.successes) == (4, 4, 2)
    balance = rollouts.ledger.balance()
    assert (balance.begun, balance.returned, balance.differing, balance.unknown, balance.lost) == (4, 4, 0, 0, 0)


def test_tokens_of_an_agent_count_where_rollouts_never_stop_too(model):
    rollouts, _ = rollouts_of(model)

    async def story() -> Played:
        rules = GroupSettings(groups=1, size=4, draws_max=4).rules()
        buffer = RolloutBuffer(rollouts, rules, StalenessRules(1, 1, 1), ResumePoint())
        buffer.begin(1)
        played = await buffer.take()
        assert buffer.take_ended().generated_tokens == played.generated_tokens
        await buffer.end()
        return played

    played = asyncio.run(story())
    [group] = played.kept
    assert played.generated_tokens == sum(trajectory.generated_tokens for trajectory in group) > 0


def test_branches_of_an_agent_come_with_their_member(model):
    rollouts, gateway = rollouts_of(model)
    gateway.tamper = lambda found: [found[0], replace(found[0], trajectory_id="r/0/0~1"), *found[1:]]
    [group] = asyncio.run(play_step(rollouts)).kept
    assert [trajectory.trajectory_id for trajectory in group] == ["r/0/0", "r/0/0~1", "r/0/1", "r/0/2", "r/0/3"]
    assert rollouts.ledger.balance().unknown == 0


def test_an_agent_that_fails_loses_its_episode_only(model):
    rollouts, _ = rollouts_of(model, failing="r/0/2")
    played = asyncio.run(play_step(rollouts))
    assert played.failures == ["lost the thread"] and [len(group) for group in played.kept] == [3]
    balance = rollouts.ledger.balance()
    assert (balance.written_off, balance.lost, balance.returned) == (1, 0, 3)


# Through a gateway

TWO_MINDS = """
def play(client, task):
    for question in ("Where to?", "Are you sure?"):  # two conversations: neither goes on from the other
        asked = [{"role": "user", "content": question}]
        reply = client.chat.completions.create(model=task.model, messages=asked, max_tokens=4)
    return float(len(reply.choices[0].message.content))
"""


def played_through_a_gateway(folder: Path, agent: str) -> tuple[Played, Rollouts]:
    """A step of two groups of three, with real HTTP and a scripted engine."""
    model = load_model_folder(write_preset("qwen3-3m", folder / "qwen3-3m"))
    settings = settings_for(agent, "groups.groups=2", "groups.size=3", "groups.dynamic_sampling=false")

    async def story() -> tuple[Played, Rollouts]:
        async with world(model) as found, GatewayClient(found.url, TOKENS.trainer) as client:
            await found.worker("a")
            playing = AgentEpisodes(settings, AgentEndpoint(found.url, TOKENS.agent, "qwen3-3m"))
            rollouts = Rollouts(client, model, settings, "r", lambda fact, decisions: None, playing)
            return await play_step(rollouts), rollouts

    return asyncio.run(story())


def test_a_step_of_an_agent_through_the_gateway(tmp_path):
    played, rollouts = played_through_a_gateway(tmp_path, f"{EXAMPLE}:play")
    members = [trajectory for group in played.kept for trajectory in group]
    assert [trajectory.trajectory_id for trajectory in members] == [f"r/{g}/{m}" for g in (0, 1) for m in range(3)]
    assert played.failures == [] and played.turns == sum(trajectory.turns for trajectory in members) == 60
    for trajectory in members:
        own = [place for place, is_own in enumerate(trajectory.loss_mask) if is_own]
        assert len(own) == trajectory.generated_tokens > 0 and {trajectory.versions[place] for place in own} == {"v0"}
        assert all(trajectory.logprobs[place] < 0 for place in own), "as the engine told them"
    balance = rollouts.ledger.balance()
    assert (balance.begun, balance.returned, balance.lost, balance.differing, balance.unknown) == (6, 6, 0, 0, 0)


def test_an_agent_of_two_minds_is_learnt_from_twice(tmp_path):
    (tmp_path / "minds.py").write_text(TWO_MINDS)
    played, rollouts = played_through_a_gateway(tmp_path, f"{tmp_path / 'minds.py'}:play")
    names = [trajectory.trajectory_id for trajectory in played.kept[0]]
    assert names == [f"r/0/{member}{branch}" for member in range(3) for branch in ("", "~1")]
    assert (played.trajectories, played.turns, played.generated_tokens) == (6, 12, 48)
    assert rollouts.ledger.balance().unknown == 0
