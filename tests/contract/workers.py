"""The workers that the contract suite runs on: each runs a story, a coroutine that is given a worker and its clock.

The simulated worker lives in virtual time and is new for every story. The embedded one is a process, so one is shared
by the stories that leave it whole; it is given back its gate, memory and weights before each of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from tests.contract.kinds import CONTEXT_TOKENS, MILLISECONDS, VOCABULARY, first_core

from rose.clock import Clock, RealClock, VirtualClock, run_virtual
from rose.engines.base import Worker
from rose.engines.simulated import SimulatedEngine, SimulatedWorker

Story = Callable[[Any, Clock], Coroutine[Any, Any, None]]
START_VERSION = "start"


class WorkerKind(Protocol):
    name: str
    weights: str
    bad_weights: str

    def tell(self, story: Story) -> None:
        """Run a story that leaves the worker usable."""

    def tell_once(self, story: Story) -> None:
        """Run a story that may leave the worker dead."""

    async def kill(self, worker: Any) -> None:
        """The engine behind the worker dies without a word."""


class SimulatedWorkers:
    name = "simulated"
    weights = "anywhere"
    bad_weights = ""

    def tell(self, story: Story) -> None:
        clock = VirtualClock()
        run_virtual(self._tell(story, clock), clock)

    tell_once = tell

    async def kill(self, worker: SimulatedWorker) -> None:
        await worker.fail("killed by a test")

    async def _tell(self, story: Story, clock: VirtualClock) -> None:
        engine = SimulatedEngine(MILLISECONDS, version=START_VERSION, vocabulary=VOCABULARY)
        worker = await SimulatedWorker.start(engine, clock)
        try:
            await story(worker, clock)
        finally:
            await worker.close()


class EmbeddedWorkers:
    name = "embedded"

    def __init__(self, folder: Path, other_folder: Path) -> None:
        self.weights = str(other_folder)
        self.bad_weights = str(folder / "nowhere")
        self._folder = folder
        self._runner = asyncio.Runner()
        self._shared: Worker | None = None

    def tell(self, story: Story) -> None:
        self._runner.run(self._tell(story))

    def tell_once(self, story: Story) -> None:
        self._runner.run(self._tell_once(story))

    async def kill(self, worker: Any) -> None:
        os.kill(worker.process_id, signal.SIGKILL)

    def close(self) -> None:
        if self._shared is not None:
            self._runner.run(self._shared.close())
        self._runner.close()

    async def _tell(self, story: Story) -> None:
        if self._shared is None:
            self._shared = await self._start()
        worker = self._shared
        await worker.grant(0, 0, 0.0)
        await worker.kv_budget(1 << 30)
        await worker.stage(START_VERSION, str(self._folder))
        await worker.commit(START_VERSION)
        async with asyncio.timeout(60):
            await story(worker, RealClock())

    async def _tell_once(self, story: Story) -> None:
        worker = await self._start()
        try:
            async with asyncio.timeout(60):
                await story(worker, RealClock())
        finally:
            await worker.close()

    async def _start(self) -> Worker:
        from rose.config.device import DeviceSettings, EngineSettings
        from rose.coserve.worker import EmbeddedWorker

        engine = EngineSettings(kv_memory_mb=16, max_context_tokens=CONTEXT_TOKENS)
        return await EmbeddedWorker.start(self._folder, settings=DeviceSettings(device=first_core(), engine=engine))
