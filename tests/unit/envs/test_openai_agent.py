"""Agents written against the OpenAI client, run as rollouts. A client that makes no request needs no gateway."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from rose.envs.environment import EnvironmentFailed, Outcome
from rose.envs.frozenlake import FrozenLake
from rose.envs.openai_agent import AgentEndpoint, AgentFailed, AgentTask, Verdict, run_agent

RIGHT = "<answer>Right</answer>"
ENDPOINT = AgentEndpoint("http://127.0.0.1:9", "a-token", "frozenlake-1m")


def run(agent, task: AgentTask | None = None, seconds_max: float = 20.0) -> Verdict:
    return asyncio.run(run_agent(agent, ENDPOINT, "run/0/1", task or AgentTask(3, "m"), seconds_max))


def walks(client, task: AgentTask) -> None:
    while not task.is_over:
        task.step(RIGHT)


async def walks_slowly(client, task: AgentTask) -> None:
    while not task.is_over:
        await asyncio.sleep(0)
        task.step("<answer>Down</answer>" if task.verdict.turns < 3 else RIGHT)


def test_an_agent_is_any_function_of_a_client_and_a_task():
    assert run(walks, AgentTask(3, "m", FrozenLake())) == Verdict(0.0, False, 2, 0)
    assert run(walks_slowly, AgentTask(3, "m", FrozenLake())) == Verdict(1.0, True, 6, 0)
    assert run(lambda client, task: task.seed / 2) == Verdict(1.5)
    assert run(lambda client, task: Verdict(0.25, True)) == Verdict(0.25, True)


def test_the_client_sends_the_trajectory_in_a_header():
    seen = []
    run(lambda client, task: seen.append((str(client.base_url), client.api_key, dict(client.default_headers))))
    [(url, token, headers)] = seen
    assert (url, token, headers["X-Session-ID"]) == ("http://127.0.0.1:9/v1/", "a-token", "run/0/1")


def test_an_agent_that_raises_hangs_or_returns_nonsense_fails():
    released = threading.Event()

    def raises(client, task):
        raise ValueError("no idea")

    def hangs(client, task):
        released.wait()

    with pytest.raises(AgentFailed, match="agent raises failed: ValueError: no idea"):
        run(raises)
    with pytest.raises(AgentFailed, match=r"agent hangs took over 0\.05 s"):
        run(hangs, seconds_max=0.05)
    released.set()
    with pytest.raises(AgentFailed, match="returned 'won'"):
        run(lambda client, task: "won")
    with pytest.raises(AgentFailed, match="returned the reward nan"):
        run(lambda client, task: float("nan"))


def test_a_failed_environment_ends_the_episode_though_the_agent_goes_on():
    def swallows(client, task: AgentTask) -> float:
        with contextlib.suppress(EnvironmentFailed):
            task.step(RIGHT)
        return 1.0

    class Breaking(FrozenLake):
        def step(self, action: str) -> Outcome:
            raise OSError("thin ice")

    with pytest.raises(EnvironmentFailed, match="Breaking failed: OSError: thin ice"):
        run(swallows, AgentTask(3, "m", Breaking()))
