"""One HTTP server of a device, and the sidecar task beside it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, cast

import pytest

from rose.device import device_server
from rose.device.device_server import SidecarTask, sidecar_running
from rose.observe.metrics import Metrics

LIVES: list[str] = []


async def fails_twice(engine: Any, metrics: Any, arguments: Any) -> None:
    LIVES.append("life")
    if len(LIVES) < 3:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def test_a_sidecar_task_that_fails_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        monkeypatch.setattr(
            device_server, "SIDECAR_RESTARTS", replace(device_server.SIDECAR_RESTARTS, pause_first_s=0.0)
        )
        LIVES.clear()
        found = SidecarTask("tests.unit.device.test_device_server:fails_twice", {})
        async with sidecar_running(cast(Any, None), Metrics(process_facts=False), found):
            async with asyncio.timeout(10):
                while len(LIVES) < 3:
                    await asyncio.sleep(0.01)
        assert caplog.text.count("the device goes on") == 2

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
