"""Plays a step's groups through the gateway, and takes the finished trajectories from it as any trainer would.

Every member of a group is an episode of its own, and all of them run at once: where their turns are computed is the
gateway's affair. When an episode ends its reward goes to the gateway and to the books of groups (core.groups), which
say what becomes of its group and whether more are drawn. The tokens to train on come back in the gateway's batches and
are compared with what was played here, id by id: a trajectory that is missing, comes twice or has changed is a fault
that the run shows. What somebody's own agent plays (`agent_episodes`) the gateway alone knows token by token, and it
may come back in several branches.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rose.core.groups import Draw, Drop, Groups, Keep, MemberEnded, StepGroups
from rose.core.trajectory import Trajectory
from rose.envs.base import HELD_OUT_SEEDS, TRAINING_SEEDS, EnvironmentFailed, Guarded, Patience
from rose.envs.play import ChatFrame, Episode, Generate, TurnSampling, play_again
from rose.envs.registry import find_environment, make_environment
from rose.envs.trouble import trouble_dice, troubled
from rose.errors import RequestRefused, Unavailable
from rose.launch.agent_episodes import AgentEpisodes
from rose.launch.ledger import Balance, Ledger
from rose.launch.settings import RunSettings
from rose.models.folder import ModelFolder
from rose.rollout.client import GatewayClient
from rose.rollout.trainer_routes import BeginBody, FinishBody
from rose.rollout.trajectories import FinishedGroup
from rose.train.advantages import member_of

Journalled = Callable[[object, list[object]], None]
MAPS_PER_SEED = 1 << 20
"""So many maps belong to one seed of a run: runs of other seeds play on other maps."""
HELD_OUT_QUICK = 1024  # held-out games at once, where the environment takes no time


@dataclass(slots=True)
class Played:
    """What one step's rollouts came to."""

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
        """The same to the last digit in whichever order the episodes ended, as in a run that was killed and went on."""
        return math.fsum(self.rewards) / max(1, len(self.rewards))


class Rollouts:
    """One per run. Steps and evaluations follow each other, never two at once. `agents` play instead, if there are."""

    def __init__(
        self,
        client: GatewayClient,
        model: ModelFolder,
        settings: RunSettings,
        run_name: str,
        journal: Journalled,
        agents: AgentEpisodes | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.groups = Groups(settings.groups.rules())
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

    def state(self, outstanding: Collection[int] = ()) -> dict[str, Any]:
        """Between two steps: what a run that goes on needs to draw the same groups as if never stopped.

        `outstanding` are groups that were drawn and that no step has learnt from. They are drawn again, and so they are
        not in the balance.
        """
        again = sorted(outstanding)
        members = (self.member_id(group, member) for group in again for member in range(self.groups.rules.size))
        balance = self.ledger.balance(without=members)
        return {"next_group": self.groups.next_group, "outstanding": again, "balance": asdict(balance)}

    def go_on(self, next_group: int, balance: Balance) -> None:
        """From there; before the first step."""
        self.groups.next_group, self.ledger = next_group, Ledger(balance)

    async def play_step(self) -> Played:
        """Raises Unavailable, RequestRefused when the gateway cannot be played through."""
        self.groups.begin_step()
        step = _Step(self)
        try:
            await step.run()
            await step.end()
        finally:
            await step.leave()
        kept = [group for group in step.kept.values() if group]
        step.played.kept, step.played.counts = kept, step.counts
        return step.played

    async def evaluate(self, episodes: int) -> float:
        """The success rate over held-out maps; nothing of it is trained on or counted.

        Episodes that could not be played are not won, and why is in `held_out_failures`.
        """
        self._evaluations += 1
        self.held_out_failures = []
        first = HELD_OUT_SEEDS + self._settings.seed * MAPS_PER_SEED
        names = (f"{self._name}/held-out-{self._evaluations}/{number}" for number in range(episodes))
        found = [self._episode(name, "", first + number, number) for number, name in enumerate(names)]
        room = asyncio.Semaphore(self._held_out_at_once())
        played = await asyncio.gather(*(self._play_held_out(episode, room) for episode in found))
        return sum(trajectory is not None and trajectory.is_success for trajectory in played) / episodes

    # Episodes

    def member_id(self, group: int, member: int) -> str:
        return f"{self._name}/{group}/{member}"

    def group_name(self, group: int) -> str:
        return f"{self._name}/{group}"

    async def play_member(self, group: int, member: int, priority: int = 0) -> Trajectory | str:
        """The trajectory, or why its environment could not be played in. All members of a group play the same map.

        Of turns that wait for a worker those with the lower priority go first.
        """
        name = self.member_id(group, member)
        episode = self._episode(name, self.group_name(group), self._map_seed(group), _dice(group, member))
        await self._begin(group, member)
        try:
            return await self._played(episode, self._client.trajectory(name, priority))
        except EnvironmentFailed as error:
            return error.what

    async def tell_end(self, group: int, member: int, outcome: Trajectory | str) -> None:
        """The reward goes to the gateway; a member that is lost is told too, so that its group can be complete."""
        if isinstance(outcome, str):
            await self._begin(group, member)  # it may have been stopped before it could
            body = FinishBody(is_lost=True)
        else:
            body = FinishBody(reward=outcome.reward, is_success=outcome.is_success, invalid_turns=outcome.invalid_turns)
        await self._client.finish(self.member_id(group, member), body)

    def note_end(self, group: int, member: int, outcome: Trajectory | str, fate: Keep | Drop | None) -> None:
        """In the journal: how a member ended, and what that means for its group."""
        fact = _fact(self.member_id(group, member), group, member, outcome)
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

    def _held_out_at_once(self) -> int:
        """As many as a step plays; an environment that computes for microseconds is never in anybody's way."""
        at_once = self._settings.groups.groups * self._settings.groups.size
        is_quick = self._agents is None and getattr(self._entry.make, "is_quick", False)
        is_hindered = self._settings.trouble.is_any
        return max(at_once, HELD_OUT_QUICK) if is_quick and not is_hindered else at_once

    async def _play_held_out(self, episode: Episode, room: asyncio.Semaphore) -> Trajectory | None:
        seed = episode.seed if self._agents is None else episode.sampling.seed
        async with room:
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
        settings, patience = self._settings, self._settings.patience
        limits = Patience(patience.reset_s_max, patience.step_s_max)
        name, options, trouble = settings.environment, settings.environment_options, settings.trouble
        dice = trouble_dice(trouble, episode.trajectory_id)
        environment = Guarded(lambda: troubled(make_environment(name, **options), trouble, dice), limits)
        try:
            return await play_again(episode, environment, self._frame, generate, patience.tries_max)
        finally:
            environment.close()

    def _episode(self, name: str, group: str, map_seed: int, dice: int) -> Episode:
        sampling = TurnSampling(self._settings.train.temperature, self._entry.answer_tokens_max, seed=dice)
        return Episode(name, group, map_seed, sampling, self._context_tokens)

    # What comes back

    async def take_batch(self, groups: int) -> list[Trajectory]:
        """So many finished groups, as the gateway hands them out."""
        return [trajectory for group in await self.take_groups(groups) for trajectory in group.trajectories]

    async def take_groups(self, groups: int) -> Sequence[FinishedGroup]:
        batch = await self._client.next_batch(groups, self._batch)
        self._batch = batch.batch
        return batch.groups

    def take_back(self, came: Iterable[Trajectory], played: Mapping[str, Trajectory]) -> dict[str, list[Trajectory]]:
        """By member, what may be learnt from; the books are told of every one. Only agents' have several branches."""
        found: dict[str, list[Trajectory]] = {}
        for trajectory in came:
            name = trajectory.trajectory_id
            member = member_of(name)
            if self._agents is not None and member != name and member in found:
                found[member].append(trajectory)
            elif self.ledger.returned(name, is_same=_is_as_played(played.get(name), trajectory)):
                found[name] = [trajectory]
        return found


class _Step:
    """One step under way."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.kept: dict[int, list[Trajectory]] = {}
        self.counts = StepGroups()
        self.played = Played([], self.counts)
        self._rollouts, self._groups, self._ledger = rollouts, rollouts.groups, rollouts.ledger
        self._tasks: dict[asyncio.Task[Trajectory | str], tuple[int, int]] = {}
        self._tellers: set[asyncio.Task[None]] = set()
        self._members: dict[str, Trajectory] = {}
        self._wanted: dict[int, tuple[int, ...]] = {}
        self._groups_due = 0  # that the gateway will hand out

    async def run(self) -> None:
        self._draw()
        while not self._groups.is_complete:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._ended(*self._tasks.pop(task), task.result())
            self._draw()

    async def end(self) -> None:
        """Surplus members are stopped, every end is told, and what was finished is fetched."""
        surplus, self.counts = self._groups.end_step()
        self._rollouts.journal(self.counts, list(surplus))
        stopped = list(self._tasks.values())
        await self.leave()
        for group, member in stopped:
            self._tell(group, member, "surplus")
        await _all(self._tellers)
        await self._fetch()
        self._ledger.close_step()

    async def leave(self) -> None:
        """Nothing of this step is under way any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _draw(self) -> None:
        for draw in self._groups.to_draw():
            self._rollouts.journal(draw, [])
            self._groups_due += 1
            for member in range(draw.size):
                self._begin(draw, member)

    def _begin(self, draw: Draw, member: int) -> None:
        self._ledger.begin(self._rollouts.member_id(draw.group, member))
        playing = self._rollouts.play_member(draw.group, member)
        self._tasks[asyncio.create_task(playing)] = (draw.group, member)

    def _ended(self, group: int, member: int, outcome: Trajectory | str) -> None:
        self._tell(group, member, outcome)
        if isinstance(outcome, str):
            self.played.failures.append(outcome)
            fate = self._groups.lost(group, member)
        else:
            self._members[outcome.trajectory_id] = outcome
            self.played.add(outcome)
            fate = self._groups.finished(group, member, outcome.reward)
        self._rollouts.note_end(group, member, outcome, fate)
        if isinstance(fate, Keep):
            self._wanted[group] = fate.members

    def _tell(self, group: int, member: int, outcome: Trajectory | str) -> None:
        if isinstance(outcome, str):
            self._ledger.write_off(self._rollouts.member_id(group, member))
        task = asyncio.create_task(self._rollouts.tell_end(group, member, outcome))
        self._tellers.add(task)

    async def _fetch(self) -> None:
        """Every group that was drawn comes back once, whatever became of it."""
        came = await self._rollouts.take_batch(self._groups_due)
        by_id = self._rollouts.take_back(came, self._members)
        self.played.generated_tokens += tokens_of_agents(by_id, self._members)
        for group, members in sorted(self._wanted.items()):  # not as they ended: that differs from time to time
            names = [self._rollouts.member_id(group, member) for member in members]
            self.kept[group] = [branch for name in names for branch in by_id.get(name, ())]


def tokens_of_agents(came: Mapping[str, Sequence[Trajectory]], played: Mapping[str, Trajectory]) -> int:
    """What the gateway alone knew until it came back: here an agent's trajectories end without tokens."""
    return sum(
        branch.generated_tokens for name, branches in came.items() for branch in branches if not played[name].token_ids
    )


def _dice(group: int, member: int) -> int:
    """The seed of what is drawn for a member."""
    return (group << 20) + member


def _is_as_played(mine: Trajectory | None, theirs: Trajectory) -> bool:
    """Of an agent's episode nothing is known here that could differ."""
    return mine is not None and mine.token_ids in ((), theirs.token_ids)


def _fact(name: str, group: int, member: int, outcome: Trajectory | str) -> MemberEnded:
    if isinstance(outcome, str):
        return MemberEnded(name, group, member, 0.0, False, 0, is_lost=True)
    return MemberEnded(name, group, member, outcome.reward, outcome.is_success, outcome.turns)


async def _all(tasks: Iterable[Awaitable[None]]) -> None:
    """Each must succeed; a trajectory that the gateway has forgotten is found by the ledger."""
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, RequestRefused):
            raise result if isinstance(result, Unavailable) else Unavailable(f"a trajectory cannot be ended: {result}")
