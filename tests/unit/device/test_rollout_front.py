"""The rollout front is kept running by the serving front."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from rose.device import rollout_front as rollouts
from rose.device.rollout_front import RolloutProcess


def test_the_rollout_front_is_started_again_after_an_os_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        tries = []

        def start(self: RolloutProcess) -> Any:
            tries.append(1)
            raise OSError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(rollouts, "RESTARTS", replace(rollouts.RESTARTS, pause_first_s=0.0))
        monkeypatch.setattr(RolloutProcess, "_start", start)
        found = RolloutProcess(cast(Any, None))
        async with asyncio.timeout(10):
            while len(tries) < 3:
                await asyncio.sleep(0.01)
        await found.close()
        assert "Resource temporarily unavailable" in caplog.text

    asyncio.run(story())
