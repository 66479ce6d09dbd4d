"""Runs an agent written against the OpenAI client as a rollout: any function of a client and a task.

    def agent(client, task):
        messages = [{"role": "user", "content": task.observation}]
        while not task.is_over:
            reply = client.chat.completions.create(model=task.model, messages=messages, max_tokens=32)
            text = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": task.step(text)}]

The client speaks to the gateway. Every request belongs to one trajectory (the header X-Session-ID), whose sampled
tokens the gateway keeps. So an existing agent needs no change: it may use tools, think in several requests, or have a
task of its own. An `async` function is given the asynchronous client. An agent runs in a thread of its own and may
raise, hang or return nonsense: then its episode is lost (`AgentFailed`), and nothing else.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import math
import numbers
import os
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rose.envs.environment import (
    CallTimedOut,
    Environment,
    EnvironmentFailed,
    Outcome,
    ThreadCall,
    checked_outcome,
    checked_text,
    error_text,
)
from rose.envs.retrying import retrying_client
from rose.errors import ConfigError, RoseError

SESSION_HEADER = "X-Session-ID"
CLIENT, CLIENT_HINT = "openai", "pip install openai"
NAME_FORM = "say it as module:function or file.py:function, as in agent=my_agent.py:play"
PATIENCE_S = 120.0  # with a gateway that is away: a restart takes seconds, a machine that boots a minute

Agent = Callable[[Any, "AgentTask"], Any]


class AgentFailed(EnvironmentFailed):
    """A failure of an agent: it raised, returned nonsense or did not end."""


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """The gateway's address, an agent's token for it, and the model's name there.

    A request that fails is sent again for `patience_s`.
    """

    url: str
    token: str
    model: str
    patience_s: float = PATIENCE_S


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an episode."""

    reward: float
    is_success: bool = False
    turns: int = 0
    invalid_turns: int = 0


class AgentTask:
    """A task in turns for an agent. Without an environment it is only a seed, and the agent has the task.

    `temperature` is what the trainer assumes, `max_tokens` bounds an answer of this task. `answers` counts the
    responses that the client received.
    """

    is_quick = False

    def __init__(
        self,
        seed: int,
        model: str = "",
        environment: Environment | None = None,
        *,
        temperature: float = 1.0,
        max_tokens: int = 16,
    ) -> None:
        self.seed, self.model = seed, model
        self.temperature, self.max_tokens = temperature, max_tokens
        self.answers = 0
        self.observation = ""
        self.is_over = False
        self.failure: EnvironmentFailed | None = None
        self.verdict = Verdict(0.0)
        self._environment = environment

    def begin(self) -> None:
        """Reset the environment, if there is one."""
        if self._environment is not None:
            self.observation = self._call(lambda environment: checked_text(environment.reset(self.seed)))

    def step(self, action: str) -> str:
        """Return the next observation."""
        return self.act(action).observation

    def act(self, action: str) -> Outcome:
        """Take an action and return its whole outcome."""
        assert not self.is_over, "the episode is over"
        outcome: Outcome = self._call(lambda environment: checked_outcome(environment.step(action)))
        self.observation, self.is_over = outcome.observation, outcome.is_done
        self.verdict = Verdict(
            self.verdict.reward + outcome.reward,
            outcome.is_done and outcome.is_success,
            self.verdict.turns + 1,
            self.verdict.invalid_turns + (not outcome.is_valid),
        )
        return outcome

    def on_response(self, response: Any) -> None:
        """Count a response that the client received."""
        self.answers += response.status_code == 200

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _call(self, call: Callable[[Environment], Any]) -> Any:
        """Call the environment; its failure ends the episode, even if the agent swallows the error."""
        assert self._environment is not None, "this task has no environment"
        try:
            return call(self._environment)
        except Exception as error:
            self.is_over = True
            self.failure = EnvironmentFailed(f"{type(self._environment).__name__} failed: {error_text(error)}")
            raise self.failure from error


async def run_agent(
    agent: Agent, endpoint: AgentEndpoint, trajectory_id: str, task: AgentTask, seconds_max: float
) -> Verdict:
    """Run one episode to its end. Raises EnvironmentFailed; the caller begins and finishes the trajectory."""
    name = getattr(agent, "__name__", type(agent).__name__)
    try:
        returned = await ThreadCall(task, lambda: _play(agent, endpoint, trajectory_id, task)).result(seconds_max)
    except CallTimedOut as error:
        hint = "see what it waits for, or raise the time it may take"
        raise AgentFailed(f"agent {name} took over {seconds_max:g} s", hint=hint) from error
    except RoseError:
        raise
    except Exception as error:
        raise task.failure or AgentFailed(f"agent {name} failed: {error_text(error)}") from error
    if task.failure is not None:
        raise task.failure
    verdict = task.verdict if returned is None else returned
    if isinstance(verdict, numbers.Real) and not isinstance(verdict, bool):
        verdict = Verdict(float(verdict), task.verdict.is_success, task.verdict.turns, task.verdict.invalid_turns)
    if not isinstance(verdict, Verdict):
        hint = "return a number, a Verdict, or nothing to take the environment's reward"
        raise AgentFailed(f"agent {name} returned {returned!r:.80}", hint=hint)
    if not isinstance(verdict.reward, numbers.Real) or not math.isfinite(verdict.reward):
        raise AgentFailed(f"agent {name} returned the reward {verdict.reward!r:.80}, which nothing can be learnt from")
    return verdict


def _play(agent: Agent, endpoint: AgentEndpoint, trajectory_id: str, task: AgentTask) -> Any:
    """Run the agent in its thread, with an event loop of its own if it is asynchronous."""

    async def play_asynchronously() -> Any:
        async with _client("Async", endpoint, trajectory_id, task) as client:
            return await agent(client, task)

    try:
        task.begin()
        if inspect.iscoroutinefunction(agent):
            return asyncio.run(play_asynchronously())
        with _client("", endpoint, trajectory_id, task) as client:
            return agent(client, task)
    finally:
        task.close()


def _client(kind: str, endpoint: AgentEndpoint, trajectory_id: str, task: AgentTask) -> Any:
    """Return a client; `kind` is "Async" or empty."""
    try:
        openai = importlib.import_module(CLIENT)
    except ImportError as error:
        what = f"an agent written against the OpenAI client needs the package {CLIENT}"
        raise ConfigError(what, hint=CLIENT_HINT) from error
    http = retrying_client(getattr(openai, f"Default{kind}HttpxClient"), endpoint.patience_s, task.on_response)
    return getattr(openai, f"{kind}OpenAI")(
        base_url=f"{endpoint.url.rstrip('/')}/v1",
        api_key=endpoint.token,
        default_headers={SESSION_HEADER: trajectory_id},
        max_retries=0,  # its own count of tries ends after half a minute
        http_client=http(verify=_certificates(), follow_redirects=True),
    )


@cache
def _certificates() -> ssl.SSLContext:
    """Read the certificates once: it takes twenty times as long as all the rest of making a client."""
    return ssl.create_default_context()


# Agents by their name in the settings: `module:function`, or `file.py:function`


def check_agent(name: str) -> None:
    """Check that the agent exists and can be imported, with what it needs. Raises ConfigError."""
    find_agent(name)
    if importlib.util.find_spec(CLIENT) is None:
        raise ConfigError(f"agent {name} needs the package {CLIENT}, whose client it is given", hint=CLIENT_HINT)


def find_agent(name: str) -> Agent:
    """Import the agent from where Python and the current folder have modules, or from a file. Raises ConfigError."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ConfigError(f"agent {name!r} names no function", hint=NAME_FORM)
    try:
        if place.endswith(".py"):
            module = _module_of_file(Path(place))
        else:
            if (folder := os.getcwd()) not in sys.path:
                sys.path.append(folder)
            module = importlib.import_module(place)
    except ConfigError:
        raise
    except Exception as error:  # the agent's code may raise anything
        what = f"agent {place} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(what, hint=f"see that `python -c 'import {place}'` works where you start ROSE") from error
    agent: Agent | None = getattr(module, function, None)
    if agent is None:
        near = difflib.get_close_matches(function, vars(module), n=1)
        raise ConfigError(f"there is no {function} in {place}", hint=f"did you mean {near[0]}?" if near else NAME_FORM)
    if not callable(agent):
        raise ConfigError(f"{name} is no function", hint="an agent is a function of a client and a task")
    return agent


def absolute_name(name: str) -> str:
    """Return a name of an agent that is the same from every folder: files by their whole path."""
    place, _, function = name.rpartition(":")
    return f"{Path(place).resolve()}:{function}" if place.endswith(".py") else name


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"there is no file {path} to take an agent from", hint=NAME_FORM)
    name = f"rose_agent_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look for it there
    spec.loader.exec_module(module)
    return module
