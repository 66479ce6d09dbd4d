"""Plays the members of one group through the gateway, for trainers of other frameworks.

`PromptPlayer` asks for one answer to a prompt of a dataset, and scores the answers of a group with the trainer's reward
functions. `EnvironmentPlayer` plays an environment of ROSE. The caller begins the trajectories and finishes them.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rose.api.requests import TurnAnswer, TurnSampling
from rose.client import GatewayClient
from rose.core.trajectory import Trajectory
from rose.envs.environment import TRAINING_SEEDS, EnvironmentFailed, TimedEnvironment
from rose.envs.environment_registry import find_environment, make_environment
from rose.envs.play import ChatFrame, Episode, play_again
from rose.errors import ConfigError
from rose.models.model_folder import ModelFolder
from rose.models.tokenizer import Tokenizer

SEED_BITS, GROUP_BITS, MEMBER_BITS = 15, 32, 16  # 63 bits, the most that a seed on the wire may have
PLAYED_COLUMNS = ("prompt", "completion", "completion_ids")  # of a dataset: reward functions get what was played
MAPS_PER_SEED = 1 << 20  # tasks of one seed of the trainer; trainers with other seeds play other tasks

Prompt = str | Sequence[Mapping[str, Any]]
RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PlayedMember:
    """One member of a group. `reward` is None if it has none: its environment failed, or it cannot be scored."""

    trajectory_id: str
    token_ids: tuple[int, ...] = ()
    prompt: Prompt = ()
    completion: Prompt = ()
    reward: float | None = None
    rewards: Mapping[str, float] | None = None  # by source, as the trainer logs them
    turns: int = 0


class GroupPlayer(Protocol):
    """A source of groups. Groups are numbered from 0."""

    def tasks(self) -> Iterator[Any]:
        """Yield the tasks of the groups, for ever."""

    async def play(self, client: GatewayClient, task: Any, group: int, names: Sequence[str]) -> list[PlayedMember]:
        """Return the members of a group, one per trajectory name. The trajectories have begun."""


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt, variables: Mapping[str, Any] | None = None) -> list[int]:
    """Return the tokens of a text, or of a conversation by the model's chat template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode(tokenizer.render_chat(prompt, variables=variables), add_special_tokens=False)


def answer_text(tokenizer: Tokenizer, prompt: Prompt, answer: TurnAnswer) -> Prompt:
    """Return an answer in the form of its prompt: a text, or one message."""
    text = tokenizer.decode(answer.token_ids)
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def sampling_seed(seed: int, group: int, member: int) -> int:
    """Return the seed of one member; it is unique within a trainer's seed."""
    parts = ((seed, SEED_BITS), (group, GROUP_BITS), (member, MEMBER_BITS))
    packed = 0
    for value, bits in parts:
        packed = packed << bits | value & (1 << bits) - 1
    return packed


class PromptPlayer:
    """Asks for one answer per member. Reward functions have TRL's signature, and may be asynchronous."""

    def __init__(
        self,
        folder: ModelFolder,
        dataset: Any,
        reward_functions: Sequence[RewardFunction],
        sampling: TurnSampling,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        if not reward_functions:
            raise ConfigError("there is nothing to score rollouts with", hint="give reward_funcs, or an environment")
        self._tokenizer, self._sampling, self._variables = folder.tokenizer, sampling, variables
        self._functions = {_name_of(function): function for function in reward_functions}
        self._dataset = dataset

    def tasks(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows again and again. Raises ConfigError for a dataset without rows."""
        row = None
        while True:
            for row in self._dataset:
                yield row
            if row is None:
                raise ConfigError("the dataset has no rows", hint="give a dataset with a column `prompt`")

    async def play(
        self, client: GatewayClient, task: Mapping[str, Any], group: int, names: Sequence[str]
    ) -> list[PlayedMember]:
        prompt, sampling = task["prompt"], self._sampling
        token_ids = tuple(prompt_ids(self._tokenizer, prompt, self._variables))
        seeds = [sampling_seed(sampling.seed, group, member) for member in range(len(names))]
        answers = await asyncio.gather(
            *(client.trajectory(name)(token_ids, replace(sampling, seed=seed)) for name, seed in zip(names, seeds))
        )
        completions = [answer_text(self._tokenizer, prompt, answer) for answer in answers]
        columns = {key: [value] * len(names) for key, value in task.items() if key not in PLAYED_COLUMNS}
        rewards = await self._scored(
            prompts=[prompt] * len(names),
            completions=completions,
            completion_ids=[list(answer.token_ids) for answer in answers],
            **columns,
        )
        return [
            PlayedMember(name, (*token_ids, *answer.token_ids), prompt, completion, _sum_of(found), found, turns=1)
            for name, answer, completion, found in zip(names, answers, completions, rewards)
        ]

    async def _scored(self, **columns: Any) -> list[dict[str, float]]:
        """Return the rewards of each member by the name of their function; NaN where a function gave none."""
        rewards: list[dict[str, float]] = [{} for _ in columns["prompts"]]
        for name, function in self._functions.items():
            if inspect.iscoroutinefunction(function):
                values = await function(**columns)
            else:
                values = await asyncio.to_thread(function, **columns)
            if len(values) != len(rewards):
                hint = "a reward function returns one number or None per completion"
                raise ConfigError(f"{name} returned {len(values)} rewards for {len(rewards)} completions", hint=hint)
            for found, value in zip(rewards, values):
                found[name] = math.nan if value is None else float(value)
        return rewards


class EnvironmentPlayer:
    """Plays one of ROSE's environments; every member of a group gets the same task."""

    def __init__(
        self,
        folder: ModelFolder,
        environment: str,
        options: Mapping[str, Any],
        sampling: TurnSampling,
        context_tokens_max: int = 0,
    ) -> None:
        find_environment(environment)
        self._name, self._options, self._sampling = environment, options, sampling
        self._frame = ChatFrame(folder.tokenizer, folder.spec.eos_token_ids)
        limits = (folder.spec.max_context_tokens, context_tokens_max)
        self._context_tokens = min(limit for limit in limits if limit > 0)

    def tasks(self) -> Iterator[int]:
        return itertools.count(TRAINING_SEEDS + self._sampling.seed * MAPS_PER_SEED)

    async def play(self, client: GatewayClient, task: int, group: int, names: Sequence[str]) -> list[PlayedMember]:
        seeds = [sampling_seed(self._sampling.seed, group, member) for member in range(len(names))]
        return await asyncio.gather(*(self._member(client, name, task, seed) for name, seed in zip(names, seeds)))

    async def _member(self, client: GatewayClient, name: str, task: int, seed: int) -> PlayedMember:
        episode = Episode(name, "", task, replace(self._sampling, seed=seed), self._context_tokens)
        environment = TimedEnvironment(lambda: make_environment(self._name, **self._options))
        try:
            played = await play_again(episode, environment, self._frame, client.trajectory(name))
        except EnvironmentFailed:
            return PlayedMember(name)
        finally:
            environment.close()
        prompt, completion = self._texts(played)
        rewards = {self._name: played.reward, "success": float(played.is_success)}
        return PlayedMember(name, played.token_ids, prompt, completion, played.reward, rewards, played.turns)

    def _texts(self, played: Trajectory) -> tuple[str, str]:
        """Return what precedes the first generated token, and the rest."""
        first, decode = played.loss_mask.index(True), self._frame.tokenizer.decode
        return decode(played.token_ids[:first]), decode(played.token_ids[first:])


def _sum_of(rewards: Mapping[str, float]) -> float | None:
    """Return the sum of the rewards that are numbers, or None if none is."""
    known = [value for value in rewards.values() if not math.isnan(value)]
    return sum(known) if known else None


def _name_of(function: RewardFunction) -> str:
    function = getattr(function, "func", function)  # of functools.partial
    return str(getattr(function, "__name__", type(function).__name__))
