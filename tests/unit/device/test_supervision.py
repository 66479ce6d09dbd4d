"""Background tasks: a failure is logged and told, and ends what depends on the task."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

import rose
from rose.device.supervision import settle, supervise
from rose.errors import Unavailable

PACKAGE = Path(rose.__file__).parent
# Tasks that are awaited where they are made, or made by `supervise` itself.
AWAITED = {"device/supervision.py": 1, "openai/http_server.py": 1}


async def broken() -> None:
    raise KeyError("a defect")


def test_a_failure_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
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


def test_every_background_task_of_a_device_is_supervised() -> None:
    makers: dict[str, int] = {}
    for part in ("openai", "device"):
        for file in (PACKAGE / part).glob("*.py"):
            calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
            names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
            count = names.count("create_task") + names.count("ensure_future")
            if count:
                makers[str(file.relative_to(PACKAGE))] = count
    assert makers == AWAITED
