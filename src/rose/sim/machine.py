"""One device of a simulated world: an engine's process, the agent's process beside it, and what may befall them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rose.sim.agent import SimulatedAgent
from rose.sim.handle import SimulatedHandle
from rose.sim.story import Story

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class Machine:
    """On a dedicated device the engine dies with the agent's process; on a borrowed one it goes on serving."""

    def __init__(
        self,
        name: str,
        handle: SimulatedHandle,
        agent: SimulatedAgent,
        spawn: Spawn,
        story: Story,
        *,
        is_borrowed: bool,
    ) -> None:
        self.name, self.handle, self.agent, self.is_borrowed = name, handle, agent, is_borrowed
        self._spawn, self._story = spawn, story
        self._agent_task: asyncio.Task[None] | None = None
        self._engine_task: asyncio.Task[None] | None = None

    @property
    def is_whole(self) -> bool:
        return self._agent_task is not None and self._engine_task is not None

    @property
    def was_sent_away(self) -> bool:
        """Its agent has left by itself, for good."""
        return self._agent_task is not None and self._agent_task.done()

    def start(self) -> None:
        """Whatever of it does not run."""
        is_agent_gone = self._agent_task is None or self._agent_task.done()
        if self._engine_task is None:
            self.handle.restart()
            self._engine_task = self._spawn(self.handle.run(), f"engine of {self.name}")
        if is_agent_gone:
            self.agent.has_no_power = False
            self._agent_task = self._spawn(self.agent.run(), f"agent of {self.name}")
        self._story.tell(self.name, "runs")

    def kill_agent(self) -> None:
        self._story.tell(self.name, "agent is killed")
        self._end_agent()
        if not self.is_borrowed:
            self._end_engine("its front was killed")

    def kill_engine(self) -> None:
        self._story.tell(self.name, "engine is killed")
        self._end_engine("the engine process was killed")

    def lose_power(self) -> None:
        """Nobody is told."""
        self._story.tell(self.name, "loses its power")
        self.agent.has_no_power = True
        self._end_agent()
        self._end_engine("there is no power")

    def _end_agent(self) -> None:
        if self._agent_task is not None:
            self.agent.gate.clear()
            self._agent_task.cancel()
            self._agent_task = None

    def _end_engine(self, why: str) -> None:
        if self._engine_task is not None:
            self._engine_task.cancel()
            self._engine_task = None
            self.handle.die(why)
