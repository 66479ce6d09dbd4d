"""The engines that the contract suite of `EngineClient` runs on. Each runs a story, a coroutine that is given a client.

The simulated and the fake engine are new for every story, in virtual time. Those in processes are shared by the stories
that leave them whole, and get their weights back before each of them.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from tests.contract.kinds import CONTEXT_TOKENS, MILLISECONDS, VOCABULARY, first_core
from tests.fake_engine import FakeEngine

from rose.clock import VirtualClock, run_virtual
from rose.engines.base import EngineClient
from rose.engines.simulated import SimulatedEngine

Story = Callable[[EngineClient], Coroutine[Any, Any, None]]
START_VERSION = "start"
STORY_S = 120


class ClientKind(ABC):
    """An engine under contract. `is_pool`: its steps, weights and deaths are those of its workers.

    `splits_prompts`: a step may have room for a part of a prompt only, as when admission grants few tokens.
    """

    name: str
    weights = "arrived/7"
    bad_weights: str | None = None  # None where no folder is read
    is_pool: ClassVar[bool] = False
    splits_prompts = False

    @abstractmethod
    def tell(self, story: Story) -> None:
        """Run a story that leaves the engine usable."""

    def tell_once(self, story: Story) -> None:
        """Run a story that may leave the engine dead."""
        self.tell(story)

    def kill(self, client: Any) -> None:
        """End the engine behind the client, without a word."""
        raise AssertionError(f"the engine of `{self.name}` cannot be killed")

    def close(self) -> None:
        return


class FakeClients(ClientKind):
    name, bad_weights = "fake", ""

    def tell(self, story: Story) -> None:
        run_virtual(self._tell(story), VirtualClock())

    def kill(self, client: Any) -> None:
        from rose.errors import Unavailable

        client.trouble = Unavailable("killed by a test")
        client.die("killed by a test")

    async def _tell(self, story: Story) -> None:
        engine = SimulatedEngine(MILLISECONDS, version=START_VERSION, vocabulary=VOCABULARY)
        client = FakeEngine(engine, step_cost_s=engine.cost_s)
        try:
            await story(client)
        finally:
            await client.close()


class SimulatedClients(ClientKind):
    name = "simulated"

    def tell(self, story: Story) -> None:
        run_virtual(self._tell(story), VirtualClock())

    def kill(self, client: Any) -> None:
        client.die("killed by a test")

    async def _tell(self, story: Story) -> None:
        from rose.sim.network import NetworkGate
        from rose.sim.simulated_handle import DedicatedDevice

        device = DedicatedDevice(NetworkGate(), random.Random(0), kv_blocks=256)
        running = asyncio.create_task(device.run())
        try:
            await story(device)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


class ProcessClients(ClientKind):
    """An engine process behind a `ChannelClient`; `is_lent` takes the rollout side of a lent device."""

    def __init__(self, folder: Path, other_folder: Path, *, is_lent: bool) -> None:
        self.name, self.splits_prompts = "lent" if is_lent else "embedded", is_lent
        self.weights, self.bad_weights = str(other_folder), str(folder / "nowhere")
        self._folder, self._is_lent = folder, is_lent
        self._runner = asyncio.Runner()
        self._shared: tuple[Any, Any] | None = None  # the context manager and its client
        self._channels: dict[int, Any] = {}

    def tell(self, story: Story) -> None:
        self._runner.run(self._tell(story))

    def tell_once(self, story: Story) -> None:
        self._runner.run(self._tell_once(story))

    def kill(self, client: Any) -> None:
        self._channels[id(client)].kill()

    def close(self) -> None:
        if self._shared is not None:
            self._runner.run(self._shared[0].__aexit__(None, None, None))
        self._runner.close()

    async def _tell(self, story: Story) -> None:
        if self._shared is None:
            engine = self._engine()
            self._shared = engine, await engine.__aenter__()
        client = self._shared[1]
        await client.stage(START_VERSION, str(self._folder))
        await client.commit(START_VERSION)
        async with asyncio.timeout(STORY_S):
            await story(client)

    async def _tell_once(self, story: Story) -> None:
        async with self._engine() as client, asyncio.timeout(STORY_S):
            await story(client)

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[EngineClient]:
        from rose.config.server_settings import DeviceSettings, EngineSettings, LendSettings
        from rose.device.channel_client import RemoteEngineConnector
        from rose.device.engine_channel import EMBEDDED, start_command
        from rose.device.engine_supervisor import Supervisor
        from rose.device.transport import address_of, open_rollout_listener

        sizes = {"max_context_tokens": CONTEXT_TOKENS}
        lend = LendSettings(ttft_ms=500, tpot_ms=150, page_kb=64, **sizes)
        engine = EngineSettings(kv_memory_mb=64 if self._is_lent else 16, **sizes)
        settings = DeviceSettings(device=first_core(), engine=engine, lend=lend)
        with open_rollout_listener() as door:
            command = start_command(
                self._folder, settings, factory=EMBEDDED, lend=self._folder if self._is_lent else None
            )
            supervisor = Supervisor(command, on_progress=lambda what: None, listener=door if self._is_lent else None)
            connector = RemoteEngineConnector(address_of(door), 64)
            client = connector.client if self._is_lent else supervisor.client
            try:
                await supervisor.start()
                if self._is_lent:
                    await connector.start()
                    async with asyncio.timeout(STORY_S):
                        while client.lending_status is None or client.lending_status.model != "resident":
                            await client.query()
                self._channels[id(client)] = supervisor.client.channel
                yield client
            finally:
                await connector.client.close()
                await supervisor.client.close()


class PoolClients(ClientKind):
    """A gateway's pool with one worker."""

    name, is_pool = "pool", True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tell(self, story: Story) -> None:
        asyncio.run(self._tell(story))

    async def _tell(self, story: Story) -> None:
        from tests.unit.rollout_world import world

        from rose.models.model_folder import load_model_folder

        async with world(load_model_folder(self._folder)) as found, asyncio.timeout(STORY_S):
            await found.worker("a", step_s=0.001)
            await story(found.gateway.engine)
