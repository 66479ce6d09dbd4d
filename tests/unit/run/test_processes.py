"""Processes of a run: ready by their words, started again when they die, gone with the run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rose.errors import Unavailable
from rose.run.monitor import cpu_s, family
from rose.run.processes import Command, Died, Processes

SLEEPER = "import time; print('ready at http://here:1/v1', flush=True); time.sleep(600)"
FAMILY = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print('ready at http://here:1/v1', flush=True); time.sleep(600)"
)


def sleeper(role: str = "sleeper", code: str = SLEEPER, *, is_kept: bool = True) -> Command:
    return Command(role, ("-c", code), 1, (), {"url": r"ready at (http://[^/]+)"}, is_kept)


def is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        await asyncio.sleep(0.02)


def test_ready_by_its_words_and_gone_with_all_it_started(tmp_path):
    async def story() -> list[int]:
        processes = Processes(tmp_path, {}, lambda died: None)
        running = await processes.start(sleeper(code=FAMILY))
        assert running.captured == {"url": "http://here:1"}
        members = family(running.process_id)
        assert len(members) == 2 and cpu_s(members[0]) >= 0
        await processes.close()
        await until(lambda: not any(map(is_alive, members)))
        return members

    assert asyncio.run(story())
    assert "ready at" in (tmp_path / "sleeper.log").read_text()


def test_a_kept_one_that_is_killed_is_started_again(tmp_path):
    deaths: list[Died] = []

    async def story() -> None:
        processes = Processes(tmp_path, {}, deaths.append)
        running = await processes.start(sleeper())
        os.kill(running.process_id, signal.SIGKILL)
        await until(lambda: processes.get("sleeper") is not running and bool(processes.process_ids()))
        assert not processes.failed.done()
        await processes.close()

    asyncio.run(story())
    assert deaths == [Died("sleeper", -9, True)]


def test_the_death_of_another_ends_the_run_with_its_last_words(tmp_path):
    code = "print('ready at http://here:1/', flush=True); print('I fell over', flush=True); raise SystemExit(3)"

    async def story() -> Unavailable:
        processes = Processes(tmp_path, {}, lambda died: None)
        await processes.start(sleeper("gateway", code, is_kept=False))
        found = await asyncio.wait_for(processes.failed, 30)
        await processes.close()
        return found

    error = asyncio.run(story())
    assert "gateway ended with code 3" in error.what and "I fell over" in error.what


def test_one_that_never_gets_ready_says_why(tmp_path):
    async def story() -> None:
        processes = Processes(tmp_path, {}, lambda died: None)
        try:
            await processes.start(sleeper("device", "raise SystemExit('no such core')"))
        finally:
            await processes.close()

    with pytest.raises(Unavailable, match="device stopped while starting:\nno such core"):
        asyncio.run(story())


def test_json_lines_go_to_whoever_listens(tmp_path):
    heard: list[bytes] = []

    async def story() -> None:
        processes = Processes(tmp_path, {}, lambda died: None)
        await processes.start(sleeper(code="print('{\"a\": 1}', flush=True); " + SLEEPER), heard.append)
        await processes.close()

    asyncio.run(story())
    assert heard == [b'{"a": 1}']


TELLS = (
    "import json, os, time; print(json.dumps(dict(os.environ)), 'ready at http://here:1', flush=True)\ntime.sleep(60)"
)


def test_a_process_gets_only_the_secrets_that_its_role_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("ROSE_TRAINER_TOKEN", "of-the-operator")
    monkeypatch.setenv("PLAIN", "for everybody")
    secrets = {"ROSE_WORKER_TOKEN": "for-workers", "ROSE_AGENT_TOKEN": "for-agents"}

    async def story() -> None:
        processes = Processes(tmp_path, secrets, lambda died: None)
        ready = {"url": "ready at (http)"}
        needed = frozenset({"ROSE_WORKER_TOKEN", "ROSE_RELAY_SECRET"})
        await processes.start(Command("worker", ("-c", TELLS), 0, (), ready, secrets=needed))
        await processes.close()

    asyncio.run(story())
    found = json.JSONDecoder().raw_decode((tmp_path / "worker.log").read_text())[0]
    assert found["ROSE_WORKER_TOKEN"] == "for-workers" and found["PLAIN"] == "for everybody"
    assert not found.keys() & {"ROSE_AGENT_TOKEN", "ROSE_TRAINER_TOKEN", "ROSE_RELAY_SECRET"}


def test_what_a_process_says_takes_bounded_space_also_without_a_newline(tmp_path, monkeypatch):
    monkeypatch.setattr("rose.run.processes.LOG_BYTES_MAX", 10_000)
    monkeypatch.setattr("rose.run.processes.LINE_BYTES_MAX", 1000)
    code = (
        "for n in range(5000): print(n)\nprint('x' * 3_000_000, end='')\nprint('\\nready at http://here:1', flush=True)"
    )

    async def story() -> None:
        processes = Processes(tmp_path, {}, lambda died: None)
        with suppress(Unavailable):  # it ends as soon as it has said so
            await processes.start(sleeper("talker", code, is_kept=False))
        await processes.close()

    asyncio.run(story())
    newest, older = tmp_path / "talker.log", tmp_path / "talker.1.log"
    assert newest.read_text().endswith("ready at http://here:1\n")
    assert newest.stat().st_size <= 10_000 and older.stat().st_size <= 100_000


def test_a_command_line_with_a_secret_is_not_started(tmp_path):
    async def story() -> None:
        processes = Processes(tmp_path, {"ROSE_AGENT_TOKEN": "for-agents", "ROSE_RELAY_SECRET_FILE": "-c"}, print)
        with pytest.raises(AssertionError, match="ROSE_AGENT_TOKEN"):
            await processes.start(Command("x", ("-c", "pass", "--token", "for-agents")))
        assert processes.process_ids() == {}
        await processes.close()

    asyncio.run(story())
