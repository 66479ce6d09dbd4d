"""Plays episodes through the gateway, and takes finished groups from it as any trainer would.

Every member of a group is an episode of its own. The gateway decides where its turns are computed. When an episode
ends, its reward goes to the gateway. The tokens to train on come back in the gateway's batches and are compared with
what was played here, id by id: a trajectory that is missing, comes twice or has changed is a fault that the run
reports.

With the setting `agent`, the user's own agent plays through the gateway's OpenAI routes. Then only the gateway knows
the tokens, so the trajectory of an episode has none until its batch comes, and there is nothing to compare. An agent
that edits its conversation, or thinks in several requests, leaves several lines of tokens (branches). All of them come
back under the name of the member, and the trainer learns from all, with the advantage of that member.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rose.api.requests import TurnSampling
from rose.api.trajectories import BeginBody, FinishBody, FinishedGroup
from rose.client import GatewayClient
from rose.core.groups import Drop, Keep, MemberEnded, StepGroups
from rose.core.trajectory import Trajectory
from rose.envs.environment import (
    HELD_OUT_SEEDS,
    TRAINING_SEEDS,
    EnvironmentFailed,
    EnvironmentTimeouts,
    TimedEnvironment,
)
from rose.envs.environment_registry import find_environment, make_environment
from rose.envs.openai_agent import AgentEndpoint, AgentFailed, AgentTask, find_agent, run_agent
from rose.envs.play import ChatFrame, Episode, Generate, play_again
from rose.envs.trouble import trouble_dice, troubled
from rose.models.model_folder import ModelFolder
from rose.run.run_settings import RunSettings
from rose.run.trajectory_ledger import Balance, TrajectoryLedger
from rose.train.advantages import member_of

Journalled = Callable[[object, list[object]], None]
MAPS_PER_SEED = 1 << 20
"""Maps of one run seed; runs with other seeds play on other maps."""
HELD_OUT_QUICK = 1024  # held-out games at once, where the environment computes for microseconds only


@dataclass(slots=True)
class Played:
    """Results of the rollouts of one step."""

    kept: list[list[Trajectory]]
    counts: StepGroups
    trajectories: int = 0
    successes: int = 0
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    invalid_turns: int = 0
    generated_tokens: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, trajectory: Trajectory) -> None:
        self.trajectories += 1
        self.successes += trajectory.is_success
        self.rewards.append(trajectory.reward)
        self.turns += trajectory.turns
        self.invalid_turns += trajectory.invalid_turns
        self.generated_tokens += trajectory.generated_tokens

    @property
    def reward_mean(self) -> float:
        """Return the same mean to the last digit for every order of episodes, so that a resumed run repeats it."""
        return math.fsum(self.rewards) / max(1, len(self.rewards))


class Rollouts:
    """The episodes of one run, one trajectory each. With `agents` an agent plays them; `balance` is a resumed run's."""

    def __init__(
        self,
        client: GatewayClient,
        model: ModelFolder,
        settings: RunSettings,
        run_name: str,
        journal: Journalled,
        agents: AgentEpisodes | None = None,
        balance: Balance | None = None,
    ) -> None:
        self.ledger = TrajectoryLedger(balance)
        self.under_way = 0
        self.ended = 0
        self.journal = journal
        self._client, self._settings, self._name, self._agents = client, settings, run_name, agents
        self._frame = ChatFrame(model.tokenizer, model.spec.eos_token_ids)
        self._context_tokens = model.spec.max_context_tokens
        self._entry = find_environment(settings.environment)
        self._batch = 0
        self._evaluations = 0
        self.held_out_failures: list[str] = []

    async def evaluate(self, episodes: int) -> float:
        """Return the success rate over held-out maps; none of them is trained on or counted.

        An episode that cannot be played counts as not won; `held_out_failures` has the reasons.
        """
        self._evaluations += 1
        self.held_out_failures = []
        first = HELD_OUT_SEEDS + self._settings.seed * MAPS_PER_SEED
        names = (f"{self._name}/held-out-{self._evaluations}/{number}" for number in range(episodes))
        found = [self._episode(name, "", first + number, number) for number, name in enumerate(names)]
        at_once = self._settings.groups.groups * self._settings.groups.size
        is_quick = self._agents is None and getattr(self._entry.make, "is_quick", False)
        if is_quick and not self._settings.trouble.is_any:
            at_once = max(at_once, HELD_OUT_QUICK)
        places = asyncio.Semaphore(at_once)
        played = await asyncio.gather(*(self._play_held_out(episode, places) for episode in found))
        return sum(trajectory is not None and trajectory.is_success for trajectory in played) / episodes

    # Episodes

    def member_id(self, group: int, member: int) -> str:
        return f"{self._name}/{group}/{member}"

    def group_name(self, group: int) -> str:
        return f"{self._name}/{group}"

    async def play_member(self, group: int, member: int, priority: int = 0) -> Trajectory | str:
        """Return the trajectory, or why its environment failed. All members of a group play the same map.

        Waiting turns with a lower priority go to a worker first.
        """
        name = self.member_id(group, member)
        episode = self._episode(name, self.group_name(group), self._map_seed(group), _dice(group, member))
        await self._begin(group, member)
        try:
            return await self._played(episode, self._client.trajectory(name, priority))
        except EnvironmentFailed as error:
            return error.what

    async def report_end(self, group: int, member: int, outcome: Trajectory | str) -> None:
        """Send the reward to the gateway, or that the member is lost, so that its group can be complete."""
        if isinstance(outcome, str):
            await self._begin(group, member)  # it may have been stopped before it could
            body = FinishBody(is_lost=True)
        else:
            body = FinishBody(reward=outcome.reward, is_success=outcome.is_success, invalid_turns=outcome.invalid_turns)
        await self._client.finish(self.member_id(group, member), body)

    def note_end(self, group: int, member: int, outcome: Trajectory | str, fate: Keep | Drop | None) -> None:
        """Write to the journal how a member ended, and what that means for its group."""
        name = self.member_id(group, member)
        if isinstance(outcome, str):
            fact = MemberEnded(name, group, member, 0.0, False, 0, is_lost=True)
        else:
            fact = MemberEnded(name, group, member, outcome.reward, outcome.is_success, outcome.turns)
        self.journal(fact, [] if fate is None else [fate])

    async def _begin(self, group: int, member: int) -> None:
        body = BeginBody(
            id=self.member_id(group, member),
            group=self.group_name(group),
            group_size=self._settings.groups.size,
            task=self._settings.environment,
            seed=self._map_seed(group) if self._agents is None else _dice(group, member),
        )
        await self._client.begin(body)

    def _map_seed(self, group: int) -> int:
        return TRAINING_SEEDS + self._settings.seed * MAPS_PER_SEED + group

    async def _play_held_out(self, episode: Episode, places: asyncio.Semaphore) -> Trajectory | None:
        seed = episode.seed if self._agents is None else episode.sampling.seed
        async with places:
            await self._client.begin(BeginBody(id=episode.trajectory_id, seed=seed))
            try:
                return await self._played(episode, self._client.trajectory(episode.trajectory_id))
            except EnvironmentFailed as error:
                self.held_out_failures.append(error.what)
                return None
            finally:
                await self._client.finish(episode.trajectory_id, FinishBody(is_lost=True))

    async def _played(self, episode: Episode, generate: Generate) -> Trajectory:
        self.under_way += 1
        try:
            if self._agents is None:
                return await self._play(episode, generate)
            return await self._agents.play(episode, self._client.session(episode.trajectory_id))
        finally:
            self.under_way -= 1
            self.ended += 1

    async def _play(self, episode: Episode, generate: Generate) -> Trajectory:
        settings, patience, trouble = self._settings, self._settings.patience, self._settings.trouble
        limits = EnvironmentTimeouts(patience.reset_s_max, patience.step_s_max)
        name, options = settings.environment, settings.environment_options
        dice = trouble_dice(trouble, episode.trajectory_id)
        environment = TimedEnvironment(lambda: troubled(make_environment(name, **options), trouble, dice), limits)
        try:
            return await play_again(episode, environment, self._frame, generate, patience.tries_max)
        finally:
            environment.close()

    def _episode(self, name: str, group: str, map_seed: int, dice: int) -> Episode:
        sampling = TurnSampling(self._settings.train.temperature, self._entry.answer_tokens_max, seed=dice)
        return Episode(name, group, map_seed, sampling, self._context_tokens)

    # What comes back

    async def take_groups(self, groups: int) -> Sequence[FinishedGroup]:
        batch = await self._client.next_batch(groups, self._batch)
        self._batch = batch.batch
        return batch.groups

    def take_back(self, came: Iterable[Trajectory], played: Mapping[str, Trajectory]) -> dict[str, list[Trajectory]]:
        """Return the usable trajectories by member, and enter all in the ledger. Only agents have several branches."""
        branches: dict[str, list[Trajectory]] = {}
        for trajectory in came:
            name = trajectory.trajectory_id
            member = member_of(name)
            if self._agents is not None and member != name and member in branches:
                branches[member].append(trajectory)
                continue
            own = played.get(name)
            is_same = own is not None and own.token_ids in ((), trajectory.token_ids)
            if self.ledger.returned(name, is_same=is_same):
                branches[name] = [trajectory]
        return branches


def tokens_of_agents(came: Mapping[str, Sequence[Trajectory]], played: Mapping[str, Trajectory]) -> int:
    """Return the tokens that only the gateway knew so far: an agent's trajectories end here without tokens."""
    return sum(
        branch.generated_tokens for name, branches in came.items() for branch in branches if not played[name].token_ids
    )


def _dice(group: int, member: int) -> int:
    return (group << 20) + member


class AgentEpisodes:
    """The agents of one run. Episodes may be played at once: each agent has a thread and a client of its own."""

    def __init__(self, settings: RunSettings, endpoint: AgentEndpoint) -> None:
        assert settings.agent is not None
        self._settings, self._endpoint = settings, endpoint
        self._agent = find_agent(settings.agent)

    async def play(self, episode: Episode, session: str) -> Trajectory:
        """Play an episode whose trajectory the caller begins and finishes; `session` names it to the gateway.

        Raises EnvironmentFailed.
        """
        settings, sampling = self._settings, episode.sampling
        dice = trouble_dice(settings.trouble, episode.trajectory_id)
        environment = make_environment(settings.environment, **settings.environment_options)
        task = AgentTask(
            episode.seed,
            self._endpoint.model,
            troubled(environment, settings.trouble, dice),
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
        )
        seconds_max = settings.patience.agent_s_max
        verdict = await run_agent(self._agent, self._endpoint, session, task, seconds_max)
        if not task.answers:
            hint = "it must ask through the client that it is given"
            raise AgentFailed(f"agent {settings.agent} asked the model nothing", hint=hint)
        return Trajectory(
            trajectory_id=episode.trajectory_id,
            group_id=episode.group_id,
            token_ids=(),
            loss_mask=(),
            logprobs=(),
            versions=(),
            reward=float(verdict.reward),
            is_success=verdict.is_success,
            turns=task.answers,
            invalid_turns=verdict.invalid_turns,
        )
