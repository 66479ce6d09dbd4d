"""The clients of a simulated gateway: players that run episodes, and a trainer that learns from them.

A client repeats a request unchanged until it is answered. The trainer begins groups, takes batches and publishes
versions. Both report what they receive to the invariant checker.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from rose.engines.base import Sampling
from rose.errors import QueueFull, RequestRefused, Unavailable
from rose.sim.invariant_checker import EventLog, InvariantChecker
from rose.sim.network import ClientLine
from rose.sim.scenario import Scenario, SimulatedEpisode
from rose.sim.simulated_gateway import SimulatedGateway

Answer = TypeVar("Answer")

TURN_TIMEOUT_S, REQUEST_TIMEOUT_S = 12.0, 4.0
PAUSE_S = 0.5


class Client:
    """A client that repeats a request until it is answered."""

    def __init__(self, name: str, line: ClientLine, chance: random.Random, log: EventLog) -> None:
        self.name, self._line, self._chance, self._log = name, line, chance, log

    async def insist(self, do: Callable[[], Awaitable[Answer]], timeout_s: float) -> Answer:
        """Send a request until it is answered. Raises RequestRefused if it is refused."""
        while True:
            try:
                return await self._line.ask(do, timeout_s)
            except (QueueFull, Unavailable) as error:
                pause_s = error.retry_after_s
                self._log.record(self.name, f"must wait: {error.what}")
            except (OSError, TimeoutError) as error:
                pause_s = PAUSE_S
                self._log.record(self.name, f"gets no answer ({type(error).__name__})")
            await asyncio.sleep(pause_s * self._chance.uniform(0.5, 1.5))


class Player(Client):
    """The player of one episode."""

    def __init__(
        self,
        episode: SimulatedEpisode,
        gateway: SimulatedGateway,
        checker: InvariantChecker,
        scenario: Scenario,
        *client: Any,
    ) -> None:
        super().__init__(*client)
        self._episode, self._gateway, self._checker, self._scenario = episode, gateway, checker, scenario

    async def play(self) -> None:
        try:
            for _ in range(self._episode.turns):
                await self._take_turn()
                if self._episode.is_vanishing:
                    self._log.record(self.name, "vanishes")
                    return
            name, finish = self._episode.trajectory_id, self._episode.finish
            await self.insist(lambda: self._gateway.finish(name, finish), REQUEST_TIMEOUT_S)
            self._episode.is_over = True
            self._checker.finished(self._episode)
        except RequestRefused as error:
            self._checker.refused(self._episode, error)

    async def _take_turn(self) -> None:
        episode = self._episode
        prompt_ids = episode.prompt()
        answered = await self.insist(
            lambda: self._gateway.turn(
                episode.trajectory_id, prompt_ids, episode.sampling, whole=not episode.is_streaming
            ),
            TURN_TIMEOUT_S * self._scenario.coarseness,
        )
        self._checker.answered(episode, prompt_ids, answered)
        episode.asked.append(prompt_ids)
        episode.answers.append(answered.token_ids)
        await asyncio.sleep(self._scenario.think_s * self._chance.expovariate(1.0))


class SimulatedTrainer(Client):
    """A trainer that begins groups, takes batches and publishes versions until it is stopped."""

    def __init__(
        self,
        gateway: SimulatedGateway,
        checker: InvariantChecker,
        scenario: Scenario,
        play: Callable[[SimulatedEpisode], None],
        *client: Any,
    ) -> None:
        super().__init__(*client)
        self.is_stopping = False
        self.version = self.batches = 0
        self._gateway, self._checker, self._scenario, self._play = gateway, checker, scenario, play
        self._groups = self._numbers = self._to_begin = 0

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
        self._checker.publishing(str(self.version))
        await self.insist(lambda: self._gateway.publish(str(self.version)), REQUEST_TIMEOUT_S)
        self._checker.published(str(self.version))
        self._log.record(self.name, f"published version {self.version}")

    async def _begin_step(self) -> None:
        self._to_begin = self._scenario.groups
        await asyncio.gather(*(self._begin_groups() for _ in range(self._scenario.begun_at_once)))

    async def _begin_groups(self) -> None:
        """Begin one group after the other until the step has all."""
        while self._to_begin > 0:
            self._to_begin -= 1
            name = f"group-{self._groups}"
            self._groups += 1
            for _ in range(self._scenario.group_size):
                episode = self._episode(name)
                begin = partial(self._gateway.begin, episode, name, self._scenario.group_size)
                await self.insist(begin, REQUEST_TIMEOUT_S)
                self._checker.began(episode, name)
                self._play(episode)

    def _episode(self, group: str) -> SimulatedEpisode:
        """Return the next episode; it depends on its number alone."""
        number = self._numbers
        self._numbers += 1
        chance = random.Random(f"episode {self._scenario.seed} {number}")
        sampling = Sampling(max_tokens=chance.randint(2, self._scenario.tokens_max))
        turns = chance.randint(1, self._scenario.turns_max)
        is_vanishing = chance.random() < self._scenario.vanishing
        return SimulatedEpisode(
            f"t{number}", number, turns, chance.getrandbits(40), sampling, is_vanishing=is_vanishing
        )

    async def _learn(self) -> None:
        batch = None
        while batch is None:
            batch = await self.insist(
                lambda: self._gateway.batch(self._scenario.groups, self.batches, 2.0), REQUEST_TIMEOUT_S
            )
        self.batches = batch.batch
        self._checker.received(batch)
        self._log.record(self.name, f"trained on batch {batch.batch}")
        await self._publish()
