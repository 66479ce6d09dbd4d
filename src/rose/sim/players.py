"""Who uses the gateway in a simulated world: environments that play episodes, and a trainer that learns from them.

A player is a scripted agent: what it asks next is a function of its number and of what it was answered, so an episode
is the same whatever happened on the way. It asks again, with the same words, for as long as it gets no answer. The
trainer begins groups, takes batches and publishes versions, each until it is heard; both tell the judge what they got.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from rose.engines.base import Sampling
from rose.errors import QueueFull, RequestRefused, Unavailable
from rose.rollout.sessions import Finish
from rose.rollout.trajectories import Batch
from rose.sim.episodes import Answered, Episode
from rose.sim.judge import Judge
from rose.sim.scenario import Scenario
from rose.sim.story import Story
from rose.sim.wire import Line

Answer = TypeVar("Answer")

TURN_TIMEOUT_S, WORD_TIMEOUT_S = 12.0, 4.0
PAUSE_S = 0.5


class Client:
    """Asks until it is answered."""

    def __init__(self, name: str, line: Line, chance: random.Random, story: Story) -> None:
        self.name, self._line, self._chance, self._story = name, line, chance, story

    async def insist(self, do: Callable[[], Awaitable[Answer]], timeout_s: float) -> Answer:
        """Raises RequestRefused if that is the answer."""
        while True:
            try:
                return await self._line.ask(do, timeout_s)
            except (QueueFull, Unavailable) as error:
                pause_s = error.retry_after_s
                self._story.tell(self.name, f"must wait: {error.what}")
            except (OSError, TimeoutError) as error:
                pause_s = PAUSE_S
                self._story.tell(self.name, f"hears nothing ({type(error).__name__})")
            await asyncio.sleep(pause_s * self._chance.uniform(0.5, 1.5))


class Desk(Protocol):
    """What clients may ask of a gateway."""

    async def begin(self, episode: Episode, group: str, group_size: int) -> None: ...

    async def turn(
        self, trajectory_id: str, prompt_ids: tuple[int, ...], sampling: Sampling, *, whole: bool
    ) -> Answered: ...

    async def finish(self, trajectory_id: str, finish: Finish) -> None: ...

    async def batch(self, groups: int, after: int, wait_s: float) -> Batch | None: ...

    async def publish(self, version: str) -> None: ...


class Player(Client):
    """Plays one episode."""

    def __init__(self, episode: Episode, desk: Desk, judge: Judge, scenario: Scenario, *client: Any) -> None:
        super().__init__(*client)
        self._episode, self._desk, self._judge, self._scenario = episode, desk, judge, scenario

    async def play(self) -> None:
        try:
            for _ in range(self._episode.turns):
                await self._take_turn()
                if self._episode.is_vanishing:
                    self._story.tell(self.name, "vanishes")
                    return
            await self.insist(self._finish, WORD_TIMEOUT_S)
            self._episode.is_over = True
            self._judge.finished(self._episode)
        except RequestRefused as error:
            self._judge.refused(self._episode, error)

    async def _take_turn(self) -> None:
        episode = self._episode
        prompt_ids = episode.prompt()
        answered = await self.insist(
            lambda: self._desk.turn(
                episode.trajectory_id, prompt_ids, episode.sampling, whole=not episode.is_streaming
            ),
            TURN_TIMEOUT_S,
        )
        self._judge.answered(episode, prompt_ids, answered)
        episode.asked.append(prompt_ids)
        episode.answers.append(answered.token_ids)
        await asyncio.sleep(self._scenario.think_s * self._chance.expovariate(1.0))

    async def _finish(self) -> None:
        await self._desk.finish(self._episode.trajectory_id, self._episode.finish)


class Trainer(Client):
    """Begins groups, takes batches, publishes versions, until it is told to stop."""

    def __init__(
        self, desk: Desk, judge: Judge, scenario: Scenario, play: Callable[[Episode], None], *client: Any
    ) -> None:
        super().__init__(*client)
        self.is_stopping = False
        self.version = self.batches = 0
        self._desk, self._judge, self._scenario, self._play = desk, judge, scenario, play
        self._groups = self._numbers = 0

    async def train(self) -> None:
        await self._publish()
        for _ in range(self._scenario.ahead):
            await self._begin_step()
        while not self.is_stopping:
            await self._begin_step()
            await self._learn()
        for _ in range(self._scenario.ahead):
            await self._learn()

    async def _publish(self) -> None:
        self.version += 1
        self._judge.publishing(str(self.version))
        await self.insist(lambda: self._desk.publish(str(self.version)), WORD_TIMEOUT_S)
        self._judge.published(str(self.version))
        self._story.tell(self.name, f"published version {self.version}")

    async def _begin_step(self) -> None:
        for _ in range(self._scenario.groups):
            name = f"group-{self._groups}"
            self._groups += 1
            for _ in range(self._scenario.group_size):
                episode = self._episode(name)
                await self.insist(lambda: self._desk.begin(episode, name, self._scenario.group_size), WORD_TIMEOUT_S)  # noqa: B023
                self._judge.began(episode, name)
                self._play(episode)

    def _episode(self, group: str) -> Episode:
        """By its number alone, whatever happened so far."""
        number = self._numbers
        self._numbers += 1
        chance = random.Random(f"episode {self._scenario.seed} {number}")
        sampling = Sampling(max_tokens=chance.randint(2, self._scenario.tokens_max))
        turns = chance.randint(1, self._scenario.turns_max)
        is_vanishing = chance.random() < self._scenario.vanishing
        return Episode(f"t{number}", number, turns, chance.getrandbits(40), sampling, is_vanishing=is_vanishing)

    async def _learn(self) -> None:
        batch = None
        while batch is None:
            batch = await self.insist(
                lambda: self._desk.batch(self._scenario.groups, self.batches, 2.0), WORD_TIMEOUT_S
            )
        self.batches = batch.batch
        self._judge.handed(batch)
        self._story.tell(self.name, f"learnt from batch {batch.batch}")
        await self._publish()
