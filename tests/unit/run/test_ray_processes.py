"""Processes over the lives of their supervisors: real supervisors in this process, and a stand-in for Ray's calls."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose.errors import Unavailable
from rose.run.process_site import ProcessEvents
from rose.run.process_specs import BORROWED, GATEWAY, TRAFFIC
from rose.run.processes import Command, Died
from rose.run.ray_processes import RayProcesses
from rose.run.ray_supervisor import NodeSupervisor
from rose.run.serving_traffic import TrafficPlan

# Its address has its own process id, as a device on another node has another address.
DEVICE = "import os, time; print(f'ready at http://here:{os.getpid()}', flush=True); time.sleep(600)"
USERS = (
    "import json, sys, time; plan = json.load(sys.stdin);"
    "print(json.dumps({'url': plan['url']})); print('traffic is on', flush=True); time.sleep(600)"
)
PATTERNS = {"url": r"ready at (http://\S+)"}

RANK_THAT_ENDS = "import sys, time; print('in place', flush=True); time.sleep(0.5); sys.exit(3)"


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class ActorDiedError(RayError):
    pass


class Actor:
    """An actor whose node can be lost, and which is then made again, or not."""

    def __init__(self, *, is_made_again: bool) -> None:
        self.supervisor: NodeSupervisor | None = NodeSupervisor("127.0.0.1")
        self.is_made_again, self.is_lost = is_made_again, False

    def __getattr__(self, method: str) -> Any:
        async def remote(*arguments: Any) -> Any:
            if self.is_lost or self.supervisor is None:
                raise RayError("unavailable") if self.is_made_again else ActorDiedError("dead")
            life = self.supervisor
            result = await getattr(life, method)(*arguments)
            if self.supervisor is not life:
                raise RayError("it was lost meanwhile")
            return result

        return types.SimpleNamespace(remote=remote)

    async def lose(self) -> None:
        self.is_lost = True
        assert self.supervisor is not None
        old, self.supervisor = self.supervisor, None
        await old.stop(0)

    def make_again(self) -> None:
        self.supervisor, self.is_lost = NodeSupervisor("127.0.0.1"), False


class OnStandIn(RayProcesses):
    def __init__(self, logs: Path, events: ProcessEvents) -> None:
        super().__init__(None, (), logs, {"ROSE_WORKER_TOKEN": "for-workers"}, events)
        self.actors: dict[str, Actor] = {}

    def _make_actor(self, command: Command) -> Actor:
        self.actors[command.role] = Actor(is_made_again=command.role != GATEWAY)
        return self.actors[command.role]


@pytest.fixture(autouse=True)
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exceptions = types.ModuleType("ray.exceptions")
    vars(exceptions).update(RayError=RayError, RayTaskError=RayTaskError, ActorDiedError=ActorDiedError)
    module = types.ModuleType("ray")
    vars(module).update(exceptions=exceptions, kill=lambda actor, no_restart=True: None)
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        await asyncio.sleep(0.02)


def test_users_follow_their_device_to_another_node(tmp_path: Path) -> None:
    deaths: list[Died] = []
    moves: list[str] = []
    said: list[str] = []
    aims: list[bytes] = []

    async def story() -> tuple[str, str]:
        processes = OnStandIn(tmp_path / "logs", ProcessEvents(deaths.append, moves.append, said.append))
        device = await processes.start(Command(BORROWED, ("-c", DEVICE), patterns=PATTERNS, is_kept=True))
        before = device.captured["url"]
        plan = msgspec.json.encode(TrafficPlan(before, "gamma", 0, 1.0, 1.0, 1.0))
        users = Command(TRAFFIC, ("-c", USERS), patterns={"on": "(traffic is on)"}, is_kept=True, input=plan)
        await processes.start(users, aims.append)
        await asyncio.gather(*(actor.lose() for actor in processes.actors.values()))
        processes.actors[TRAFFIC].make_again()
        await until(lambda: sum("does not answer" in line for line in said) == 2)
        assert len(aims) == 1, "users wait for their device"
        processes.actors[BORROWED].make_again()
        await until(lambda: len(aims) == 2)
        after = device.captured["url"]
        assert not processes.failed.done() and processes.cpu_s()
        await processes.close()
        return before, after

    before, after = asyncio.run(story())
    assert before != after and [json.loads(line)["url"] for line in aims] == [before, after]
    assert moves == [BORROWED] and {died.role for died in deaths} == {BORROWED, TRAFFIC}
    log = (tmp_path / "logs" / "borrowed.log").read_text()
    assert before in log and after in log


def test_a_run_ends_with_its_gateway(tmp_path: Path) -> None:
    async def story() -> Unavailable:
        processes = OnStandIn(tmp_path / "logs", ProcessEvents(print, print, print))
        await processes.start(Command(GATEWAY, ("-c", DEVICE), patterns=PATTERNS, is_kept=True))
        await processes.actors[GATEWAY].lose()
        async with asyncio.timeout(60):
            error = await processes.failed
        await processes.close()
        return error

    error = asyncio.run(story())
    assert "gateway on 127.0.0.1 is lost with its ledger" in error.what
    assert f"rose run --resume {tmp_path}` goes on from its newest checkpoint" in str(error)


def test_ranks_of_the_trainer_run_beside_the_run_and_end_it(tmp_path: Path) -> None:
    async def story() -> Unavailable:
        processes = OnStandIn(tmp_path / "logs", ProcessEvents(lambda died: None, print, print))
        await processes.start(Command("rank-1", ("-c", RANK_THAT_ENDS), patterns={"up": "(in place)"}))
        assert processes.actors == {}, "no node of the cluster has it"
        async with asyncio.timeout(60):
            error = await processes.failed
        await processes.close()
        return error

    assert "rank-1" in asyncio.run(story()).what


def test_what_cannot_start_on_a_node_ends_the_run_with_its_words(tmp_path: Path) -> None:
    async def story() -> None:
        processes = OnStandIn(tmp_path / "logs", ProcessEvents(print, print, print))
        try:
            await processes.start(Command(BORROWED, ("-c", "raise SystemExit('no such core')"), patterns=PATTERNS))
        finally:
            await processes.close()

    with pytest.raises(Unavailable, match="no such core"):
        asyncio.run(story())


def test_a_command_line_with_a_secret_reaches_no_node(tmp_path: Path) -> None:
    async def story() -> None:
        processes = OnStandIn(tmp_path / "logs", ProcessEvents(print, print, print))
        with pytest.raises(AssertionError, match="ROSE_WORKER_TOKEN"):
            await processes.start(Command(BORROWED, ("-c", "pass", "for-workers")))
        assert processes.actors == {}

    asyncio.run(story())
