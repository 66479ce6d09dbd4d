"""The whole loop in one process: an engine plays, the trainer learns, the engine takes the new weights.

There is no gateway and no device; only the episodes are asynchronous, and wait together for the engine's next step. It
is the reference that the distributed job is compared with, and a way to evaluate a checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.api.requests import TurnAnswer, TurnSampling, VersionSpan
from rose.core.groups import Draw, Drop, GroupRules, Keep, StepGroups
from rose.core.staleness import GroupStream, StalenessRules
from rose.core.trajectory import Trajectory
from rose.engines.base import Budget, Request, Sampling, StepEngine, TokenEvent
from rose.envs.environment import HELD_OUT_SEEDS, TRAINING_SEEDS, EnvironmentFailed, TimedEnvironment
from rose.envs.environment_registry import find_environment, make_environment
from rose.envs.play import ChatFrame, Episode, play_again
from rose.errors import Unavailable
from rose.models.model_folder import load_model_folder

BUDGET = Budget(512, 64)
IDLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Task:
    """What is played: an environment by name, and how long an answer may be."""

    environment: str = "frozenlake"
    temperature: float = 1.0

    def sampling(self, seed: int) -> TurnSampling:
        answer_tokens_max = find_environment(self.environment).answer_tokens_max
        return TurnSampling(self.temperature, answer_tokens_max, seed=seed)

    def make(self) -> TimedEnvironment:
        return TimedEnvironment(lambda: make_environment(self.environment))


def synchronous(rules: GroupRules, next_group: int = 0) -> GroupStream:
    """Return the groups of a synchronous job without an end."""
    return GroupStream(rules, StalenessRules(0, rules.groups, 1 << 30), next_group=next_group)


class LocalRollouts:
    """Plays episodes on one engine that nobody else steps."""

    def __init__(self, engine: StepEngine, model_folder: Path | str, task: Task) -> None:
        folder = load_model_folder(model_folder)
        self.engine = engine
        self.task = task
        self.frame = ChatFrame(folder.tokenizer, folder.spec.eos_token_ids)
        self._names = itertools.count()
        self._events: dict[str, list[TokenEvent]] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def play(self, episodes: Sequence[Episode]) -> list[Trajectory | None]:
        """All episodes to their ends, together, in the order given; None for one whose environment kept failing."""
        return asyncio.run(self._play(episodes))

    def play_groups(self, groups: GroupStream) -> tuple[list[list[Trajectory]], StepGroups]:
        """Play the groups of one synchronous step."""
        groups.on_reached(groups.taken)
        kept: dict[int, list[Trajectory]] = {}
        while (taken := groups.batch(0)) is None:
            draws = groups.to_draw()
            for draw, played in zip(draws, self._play_draws(draws)):
                fate = _report(groups, draw.group, played)
                if isinstance(fate, Keep):
                    members = [member for index in fate.members if (member := played[index]) is not None]
                    kept[draw.group] = members
                    groups.on_arrived(draw.group, members)
        groups.drop_surplus()
        return [kept[group] for group in taken], groups.take_counts()

    def success_rate(self, episodes: int) -> float:
        """Over held-out maps."""
        seeds = range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + episodes)
        played = self.play([Episode(f"held-out/{seed}", "", seed, self.task.sampling(seed)) for seed in seeds])
        return sum(trajectory is not None and trajectory.is_success for trajectory in played) / episodes

    def _play_draws(self, draws: Sequence[Draw]) -> list[list[Trajectory | None]]:
        played = iter(self.play([self._episode(draw.group, member) for draw in draws for member in range(draw.size)]))
        return [[next(played) for _ in range(draw.size)] for draw in draws]

    def _episode(self, group: int, member: int) -> Episode:
        """All members of a group play the same map, each with its own dice."""
        sampling = self.task.sampling(seed=(group << 20) + member)
        return Episode(f"{group}/{member}", str(group), TRAINING_SEEDS + group, sampling)

    async def _play(self, episodes: Sequence[Episode]) -> list[Trajectory | None]:
        stepping = asyncio.ensure_future(self._step_for_ever())
        playing = asyncio.gather(*(self._play_one(episode) for episode in episodes))
        either: set[asyncio.Future[Any]] = {stepping, playing}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if stepping.done():
            playing.cancel()
            stepping.result()  # it never ends but by an error of the engine
        stepping.cancel()
        return playing.result()

    async def _play_one(self, episode: Episode) -> Trajectory | None:
        environment = self.task.make()
        try:
            return await play_again(episode, environment, self.frame, self._generate)
        except EnvironmentFailed:
            return None
        finally:
            environment.close()

    async def _step_for_ever(self) -> None:
        """Let every episode that can go on queue its next turn, then run one step for all of them."""
        while True:
            await asyncio.sleep(0)
            plan = self.engine.plan(BUDGET)
            if plan is None:
                await asyncio.sleep(IDLE_S)  # every episode waits for a slow environment
                continue
            for event in self.engine.step(plan):
                self._events[event.request_id].append(event)
                if event.finish_reason is not None:
                    self._waiting.pop(event.request_id).set_result(None)

    async def _generate(self, token_ids: Sequence[int], sampling: TurnSampling) -> TurnAnswer:
        name = str(next(self._names))
        self._events[name] = []
        self._waiting[name] = done = asyncio.get_running_loop().create_future()
        self.engine.add(Request(name, tuple(token_ids), _engine_sampling(sampling)))
        await done
        return _answer(self._events.pop(name))


def _report(groups: GroupStream, group: int, played: Sequence[Trajectory | None]) -> Keep | Drop | None:
    """Tell the books of every member; what they say of the group comes with the last one."""
    fate: Keep | Drop | None = None
    for member, trajectory in enumerate(played):
        if trajectory is None:
            fate = groups.on_lost(group, member)
        else:
            fate = groups.on_finished(group, member, trajectory.reward)
    return fate


def _engine_sampling(sampling: TurnSampling) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        seed=sampling.seed,
    )


def _answer(events: Sequence[TokenEvent]) -> TurnAnswer:
    token_ids = tuple(itertools.chain.from_iterable(event.token_ids for event in events))
    logprobs = tuple(itertools.chain.from_iterable(event.logprobs for event in events))
    spans, start = [], 0
    for version, run in itertools.groupby(events, key=lambda event: event.version):
        count = sum(len(event.token_ids) for event in run)
        spans.append(VersionSpan(version, start, start + count))
        start += count
    reason = events[-1].finish_reason
    if reason not in ("stop", "length"):
        raise Unavailable(f"the engine ended a turn with {reason!r}")
    return TurnAnswer(token_ids, logprobs, tuple(spans), reason)
