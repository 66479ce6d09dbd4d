"""Background tasks: a failure is logged and told, and ends what depends on the task."""

from __future__ import annotations

import ast
import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import rose
from rose.config.device import EngineSettings
from rose.coserve import messages
from rose.coserve.channel import Channel
from rose.coserve.supervision import settle, supervise
from rose.errors import Unavailable
from rose.front import companion, rollouts
from rose.front.companion import Companion, accompanied
from rose.front.rollouts import RolloutProcess
from rose.front.seat import Seat
from rose.front.supervisor import Supervisor
from rose.observe.metrics import Metrics

PACKAGE = Path(rose.__file__).parent
# Tasks that are awaited where they are made, or made by `supervise` itself.
AWAITED = {"coserve/supervision.py": 1, "front/listening.py": 1}


async def broken() -> None:
    raise KeyError("a defect")


def test_a_failure_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        told: list[Unavailable] = []
        task = supervise(broken(), "the keeper", told.append)
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert "the keeper failed: KeyError" in told[0].what
        assert [record.exc_info is not None for record in caplog.records if "the keeper failed" in record.message]

    asyncio.run(story())


def test_an_end_or_a_cancellation_is_no_failure() -> None:
    async def story() -> None:
        told: list[Unavailable] = []
        ended = supervise(asyncio.sleep(0), "a", told.append)  # type: ignore[arg-type]
        cancelled = supervise(asyncio.sleep(600), "b", told.append)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.wait([ended, cancelled])
        await asyncio.sleep(0)
        assert told == []

    asyncio.run(story())


def test_the_first_reason_counts() -> None:
    async def story() -> None:
        future: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        settle(future, Unavailable("first"))
        settle(future, Unavailable("second"))
        assert future.result().what == "first"

    asyncio.run(story())


def test_a_supervisor_that_fails_ends_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        command = messages.Start("m:f", "folder", "cpu:0", EngineSettings())
        found = Supervisor(command, on_progress=lambda what: None)
        monkeypatch.setattr(found, "_start_engine", lambda: asyncio.sleep(0))
        monkeypatch.setattr(found, "_keep", broken)
        await found.start()
        async with asyncio.timeout(10):
            assert "KeyError" in (await found.gave_up).what

    asyncio.run(story())


def test_a_seat_that_fails_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        found = Seat("nowhere", 1)
        found._channel = cast(Any, SimpleNamespace())
        monkeypatch.setattr(found, "_keep", broken)
        await found.start()
        async with asyncio.timeout(10):
            assert "KeyError" in (await found.gave_up).what

    asyncio.run(story())


def test_a_channel_whose_end_fails_still_tells_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(Channel, "_epitaph", lambda self: broken())
        found = Channel()
        found.connection_lost(None)
        async with asyncio.timeout(10):
            assert "KeyError" in (await found.gone).what
            with pytest.raises(Unavailable):
                await found._ready

    asyncio.run(story())


def test_rollouts_are_started_again_when_no_process_was_to_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        tries = []

        def start(self: RolloutProcess) -> Any:
            tries.append(1)
            raise OSError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(rollouts, "PAUSE_FIRST_S", 0.0)
        monkeypatch.setattr(RolloutProcess, "_start", start)
        found = RolloutProcess(cast(Any, None))
        async with asyncio.timeout(10):
            while len(tries) < 3:
                await asyncio.sleep(0.01)
        await found.close()
        assert "Resource temporarily unavailable" in caplog.text

    asyncio.run(story())


LIVES: list[str] = []


async def fails_twice(engine: Any, metrics: Any, arguments: Any) -> None:
    LIVES.append("life")
    if len(LIVES) < 3:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def test_a_companion_that_fails_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        monkeypatch.setattr(companion, "PAUSE_FIRST_S", 0.0)
        LIVES.clear()
        found = Companion("tests.unit.test_supervision:fails_twice", {})
        async with accompanied(cast(Any, None), Metrics(process_facts=False), found):
            async with asyncio.timeout(10):
                while len(LIVES) < 3:
                    await asyncio.sleep(0.01)
        assert caplog.text.count("the device goes on") == 2

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())


def test_no_task_of_a_device_is_left_to_itself() -> None:
    makers: dict[str, int] = {}
    for part in ("front", "coserve"):
        for file in (PACKAGE / part).glob("*.py"):
            calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
            names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
            count = names.count("create_task") + names.count("ensure_future")
            if count:
                makers[str(file.relative_to(PACKAGE))] = count
    assert makers == AWAITED


def test_an_unreadable_event_ends_the_engine_and_not_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        given_up: list[str] = []
        found = Channel()
        monkeypatch.setattr(found, "_give_up", lambda: given_up.append("given up"))
        body = b"\x82\xa4type\xa8Progress\xa4what\xa2\xff\xfe"  # a text that is not UTF-8
        found.data_received(len(body).to_bytes(4, "little") + body)
        assert given_up == ["given up"] and found._failure is not None
        found.connection_lost(None)
        await found.gone

    asyncio.run(story())
