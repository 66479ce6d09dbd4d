"""Engines of one device that die at a word, for tests of its supervisor and its admin controls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.rollout_world import LENDING

from rose.config.server_settings import EngineSettings, LendSettings
from rose.device import engine_messages
from rose.device import engine_supervisor as supervisor
from rose.device.admin_routes import LendingControls
from rose.device.engine_messages import AdminCommand
from rose.device.engine_supervisor import Supervisor
from rose.engines.base import EngineFacts
from rose.errors import ModelError, RequestRefused, Unavailable
from rose.observe.metrics import Metrics

FACTS = EngineFacts("0", 0, 0, 100, 0, 0, 16, 1024, 512)


LENT = engine_messages.StartEngine(
    "m:f", "folder", "cpu:0", EngineSettings(), lend=engine_messages.Lend("rollouts", LendSettings())
)


class FakeChannel:
    """One engine process, as its supervisor sees it."""

    def __init__(self) -> None:
        self.facts, self.lending_status, self.process_id = FACTS, LENDING, 1
        self.gone: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.refuses = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def call(self, command: Any) -> engine_messages.Reply:
        await self.may_answer.wait()
        if self.refuses:
            raise RequestRefused("the rollout model was removed after a failure")
        return engine_messages.Reply(1, FACTS, lending=LENDING)

    async def close(self) -> None:
        return


class Engines:
    """Every engine of one device, the start command of each, and the admin controls."""

    def __init__(self, command: engine_messages.StartEngine) -> None:
        self.starts: list[engine_messages.StartEngine] = []
        self.unable: Callable[[engine_messages.StartEngine], bool] = lambda command: False
        self.supervisor = Supervisor(command, on_progress=lambda what: None)
        self.controls = LendingControls(self.supervisor, "token", Metrics(process_facts=False))
        self.newest: FakeChannel

    async def start(self, command: engine_messages.StartEngine, **_: Any) -> FakeChannel:
        self.starts.append(command)
        if self.unable(command):
            raise ModelError("there is no such folder")
        self.newest = FakeChannel()
        return self.newest

    @property
    def lend(self) -> engine_messages.Lend:
        """On what terms the newest engine was started."""
        assert self.starts[-1].lend is not None
        return self.starts[-1].lend

    @property
    def has_given_up(self) -> bool:
        return self.supervisor.client.gave_up.done()

    async def die(self) -> None:
        """Until there is another engine, or there will be none."""
        known = len(self.starts)
        self.newest.gone.set_result(Unavailable("killed"))
        async with asyncio.timeout(30):
            while not self.has_given_up and (len(self.starts) == known or self.supervisor.client.trouble is not None):
                await asyncio.sleep(0)

    async def send(self, *commands: AdminCommand) -> None:
        for command in commands:
            await self.controls.ask(command)


Story = Callable[[Engines], Awaitable[None]]


@pytest.fixture
def run_story(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(story: Story, command: engine_messages.StartEngine = LENT) -> None:
        async def whole() -> None:
            engines = Engines(command)
            monkeypatch.setattr(supervisor, "DeviceChannel", SimpleNamespace(start=engines.start))
            await engines.supervisor.start()
            await story(engines)
            await engines.supervisor.client.close()

        asyncio.run(whole())

    monkeypatch.setattr(supervisor, "RESTARTS", replace(supervisor.RESTARTS, pause_first_s=0.0))
    return run


PAUSE, DRAIN, REMOVE, DRY_RUN, RESUME = map(
    AdminCommand, cast(list[Any], ["pause", "drain", "remove", "dry_run", "resume"])
)
