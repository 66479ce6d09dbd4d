"""The supervisor of a process on a node, without Ray: real processes, and calls as the driver makes them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.errors import RequestRefused, Unavailable
from rose.run import ray_supervisor
from rose.run.processes import Command, Died
from rose.run.ray_supervisor import Event, EventBuffer, NodeSupervisor, is_free, make_folder
from rose.run.sealed_secrets import SecretReceiver, seal

TELLS = (
    "import os, sys, time; print('{\"a\": 1}'); print(os.environ['ROSE_WORKER_TOKEN'][:3], open(sys.argv[1]).read());"
    "print('ready at http://here:1/', flush=True); time.sleep(600)"
)
SECRETS = {"ROSE_WORKER_TOKEN": "for-workers", "ROSE_AGENT_TOKEN": "for-agents"}
PATTERNS = {"url": r"ready at (http://[^/]+)"}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


async def news_until(supervisor: NodeSupervisor, found: Callable[[list[Event]], bool], seen: int = 0) -> list[Event]:
    events: list[Event] = []
    async with asyncio.timeout(60):
        while not found(events):
            told, _ = await supervisor.news(events[-1][0] if events else seen)
            events += told
    return events


def kinds(events: list[Event]) -> list[str]:
    return [kind for _, kind, _ in events]


def only(events: list[Event], kind: str) -> list[Any]:
    return [what for _, found, what in events if found == kind]


def test_a_process_gets_its_model_and_secrets_and_its_death_is_told(tmp_path: Path) -> None:
    model = tmp_path / "model"
    command = Command("worker", ("-c", TELLS, str(model)), 0, (0, 999), PATTERNS, True, None, frozenset(SECRETS))

    async def story() -> list[Event]:
        supervisor = NodeSupervisor("127.0.0.1")
        hello = await supervisor.hello()
        assert hello == await supervisor.hello() and hello.address == "127.0.0.1"
        for offset, part in ((0, b"one "), (4, b"two"), (4, b"two")):
            await supervisor.receive("models/0/model", offset, part)
        needed = seal({"ROSE_WORKER_TOKEN": "for-workers"}, hello.public)
        for _ in range(2):  # a driver that got no answer asks again
            await supervisor.begin(command, needed, {str(model): "models/0/model"})
        events = await news_until(supervisor, lambda events: "ready" in kinds(events))
        [process_id] = supervisor._processes.process_ids().values()  # type: ignore[union-attr]
        os.kill(process_id, signal.SIGKILL)
        seen = events[-1][0]
        events += await news_until(supervisor, lambda events: "died" in kinds(events), seen)
        await supervisor.stop(seen)
        assert not list(tmp_path.glob(f"{ray_supervisor.PREFIX}*"))
        return events

    events = asyncio.run(story())
    assert only(events, "ready") == [{"url": "http://here:1"}]
    assert b"for one two" in only(events, "line")
    assert only(events, "died") == [Died("worker", -9, True)]


def test_one_that_cannot_start_says_why() -> None:
    async def story() -> list[Event]:
        supervisor = NodeSupervisor("127.0.0.1")
        with pytest.raises(Unavailable):
            await supervisor.news(0)
        public = (await supervisor.hello()).public
        await supervisor.begin(
            Command("x", ("-c", "raise SystemExit('no core')"), 0, (), PATTERNS), seal({}, public), {}
        )
        events = await news_until(supervisor, lambda events: "failed" in kinds(events))
        await supervisor.stop(0)
        return events

    assert "x stopped while starting:\nno core" in only(asyncio.run(story()), "failed")[0]


def test_secrets_that_were_sealed_for_an_earlier_life_start_nothing() -> None:
    async def story() -> None:
        supervisor = NodeSupervisor("127.0.0.1")
        with pytest.raises(RequestRefused):
            await supervisor.begin(Command("x", ("-c", "")), seal({}, SecretReceiver().public), {})
        await supervisor.stop(0)

    asyncio.run(story())


def test_lines_that_are_not_fetched_take_bounded_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_supervisor, "LINES_BYTES_MAX", 100)

    async def story() -> None:
        events = EventBuffer()
        events.add("ready", {})
        for number in range(50):
            events.add("line", b"%9d " % number)
        found = events.since(0)
        assert kinds(found) == ["ready"] + ["line"] * 10 and found[-1][2] == b"       49 "
        assert events.since(found[-2][0]) == found[-1:]
        assert events.since(found[-1][0]) == []

    asyncio.run(story())


def test_folders_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    folder, lock = make_folder(tmp_path)
    gone = tmp_path / f"{ray_supervisor.PREFIX}gone"
    gone.mkdir()
    other, second = make_folder(tmp_path)
    assert folder.is_dir() and other.is_dir() and not gone.exists()
    assert folder.stat().st_mode & 0o077 == 0
    os.close(lock)
    _, third = make_folder(tmp_path)
    assert not folder.exists() and other.is_dir()
    os.close(second)
    os.close(third)


def test_a_port_that_is_taken_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free("127.0.0.1", server.getsockname()[1])
