"""An agent that somebody wrote against the OpenAI client, as a rollout: any function of a client and a task.

    def agent(client, task):
        messages = [{"role": "user", "content": task.observation}]
        while not task.is_over:
            reply = client.chat.completions.create(model=task.model, messages=messages, max_tokens=32)
            words = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": words}, {"role": "user", "content": task.step(words)}]

The client speaks to the gateway, and every request it makes belongs to one trajectory (the header X-Session-ID): the
gateway keeps the tokens that were sampled, and what the agent makes of their text is its own affair. So an agent that
exists needs no change: it may use tools, think in several requests, or have a task of its own and use none of ours.

The reward is what the task's environment gave, or what the function returns: a number, or a `Verdict`. An `async`
function is given the asynchronous client. An agent runs in a thread of its own and may raise, hang or return nonsense:
then its episode is lost (`AgentFailed`), and nothing else. A gateway that is away for a while costs it only time.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from rose.envs.base import (
    ApartCall,
    Environment,
    EnvironmentFailed,
    Outcome,
    TookTooLong,
    sensible_outcome,
    sensible_text,
)
from rose.envs.retrying import patient
from rose.errors import ConfigError, RoseError

SESSION_HEADER = "X-Session-ID"
CLIENT, CLIENT_HINT = "openai", "pip install openai"
PATIENCE_S = 120.0  # with a gateway that is away: a restart takes seconds, a machine that boots a minute

Agent = Callable[[Any, "AgentTask"], Any]


class AgentFailed(EnvironmentFailed):
    """An agent raised, returned nonsense or did not come to an end."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where the agent's requests go: the gateway, an agent's token for it, and the model's name there.

    A request that fails is sent again for `patience_s`.
    """

    url: str
    token: str
    model: str
    patience_s: float = PATIENCE_S


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an episode went."""

    reward: float
    is_success: bool = False
    turns: int = 0
    invalid_turns: int = 0


class AgentTask:
    """What an agent is to do: a task in turns. Without an environment it is a seed, and the agent knows the rest.

    `temperature` is what the trainer counts on, `max_tokens` how long an answer of this task may need to be. `answers`
    counts what the client has got.
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
        self._environment = environment
        self._reward = 0.0
        self._turns = self._invalid_turns = 0
        self._is_success = False

    def begin(self) -> None:
        if self._environment is not None:
            self.observation = self._tried(lambda it: sensible_text(it.reset(self.seed)))

    def step(self, action: str) -> str:
        """What the agent sees next."""
        return self.act(action).observation

    def act(self, action: str) -> Outcome:
        """All that its action led to."""
        assert not self.is_over, "the episode is over"
        outcome = self._tried(lambda it: sensible_outcome(it.step(action)))
        self.observation, self.is_over = outcome.observation, outcome.is_done
        self._reward += outcome.reward
        self._turns += 1
        self._invalid_turns += not outcome.is_valid
        self._is_success = outcome.is_done and outcome.is_success
        return outcome

    def answered(self, reply: Any) -> None:
        """A reply has come to the client, of whatever kind."""
        self.answers += reply.status_code == 200

    @property
    def verdict(self) -> Verdict:
        return Verdict(self._reward, self._is_success, self._turns, self._invalid_turns)

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _tried(self, call: Callable[[Environment], Any]) -> Any:
        """An agent may swallow errors; one of the environment's ends the episode all the same."""
        assert self._environment is not None, "this task has no environment"
        try:
            return call(self._environment)
        except Exception as error:
            self.is_over = True
            self.failure = EnvironmentFailed(f"{type(self._environment).__name__} failed: {_shown(error)}")
            raise self.failure from error


async def run_agent(agent: Agent, door: Door, trajectory_id: str, task: AgentTask, seconds_max: float) -> Verdict:
    """One episode to its end. Raises EnvironmentFailed; the trajectory is begun and finished by the caller."""
    name = getattr(agent, "__name__", type(agent).__name__)
    try:
        returned = await ApartCall(task, lambda: _run(agent, door, trajectory_id, task)).answer(seconds_max)
    except TookTooLong as error:
        hint = "see what it waits for, or raise the time it may take"
        raise AgentFailed(f"agent {name} took over {seconds_max:g} s", hint=hint) from error
    except RoseError:
        raise
    except Exception as error:
        raise task.failure or AgentFailed(f"agent {name} failed: {_shown(error)}") from error
    if task.failure is not None:
        raise task.failure
    return _verdict(name, task, returned)


def _run(agent: Agent, door: Door, trajectory_id: str, task: AgentTask) -> Any:
    """In the agent's thread, with a loop of its own if it wants one."""
    try:
        task.begin()
        if inspect.iscoroutinefunction(agent):
            return asyncio.run(_awaited(agent, door, trajectory_id, task))
        with _client("", door, trajectory_id, task.answered) as client:
            return agent(client, task)
    finally:
        task.close()


async def _awaited(agent: Agent, door: Door, trajectory_id: str, task: AgentTask) -> Any:
    async with _client("Async", door, trajectory_id, task.answered) as client:
        return await agent(client, task)


def _client(kind: str, door: Door, trajectory_id: str, answered: Callable[[Any], None]) -> Any:
    """`kind` is "Async", or nothing."""
    try:
        openai = importlib.import_module(CLIENT)
    except ImportError as error:
        what = f"an agent written against the OpenAI client needs the package {CLIENT}"
        raise ConfigError(what, hint=CLIENT_HINT) from error
    http = patient(getattr(openai, f"Default{kind}HttpxClient"), door.patience_s, answered)
    return getattr(openai, f"{kind}OpenAI")(
        base_url=f"{door.url.rstrip('/')}/v1",
        api_key=door.token,
        default_headers={SESSION_HEADER: trajectory_id},
        max_retries=0,  # its own count of tries ends after half a minute
        http_client=http(verify=_certificates(), follow_redirects=True),
    )


@cache
def _certificates() -> ssl.SSLContext:
    """Reading them takes twenty times as long as all the rest of making a client."""
    return ssl.create_default_context()


def _verdict(name: str, task: AgentTask, returned: Any) -> Verdict:
    found = task.verdict if returned is None else returned
    if isinstance(found, numbers.Real) and not isinstance(found, bool):
        found = Verdict(float(found), task.verdict.is_success, task.verdict.turns, task.verdict.invalid_turns)
    if not isinstance(found, Verdict):
        what = f"agent {name} returned {returned!r:.80}"
        raise AgentFailed(what, hint="return a number, a Verdict, or nothing to take the environment's reward")
    if not isinstance(found.reward, numbers.Real) or not math.isfinite(found.reward):
        raise AgentFailed(f"agent {name} says its reward is {found.reward!r:.80}, which nothing can be learnt from")
    return found


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
