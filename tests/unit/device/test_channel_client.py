"""Counters go on over engines that come and go; nothing is counted twice while there is none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.device.test_supervision import broken

from rose.device.channel_client import EngineCounters, RemoteEngineConnector
from rose.engines.base import EngineFacts

FACTS = EngineFacts("0", 2, 1, 100, 40, 10, 16, 1024, 512, steps=5, generated_tokens=70)


def test_counters_survive_engines_and_levels_do_not():
    tally = EngineCounters()
    tally.on_start(replace(FACTS, steps=0, generated_tokens=0))
    assert tally.total(FACTS).generated_tokens == 70
    tally.on_gone(FACTS)
    between = tally.total(None)
    assert (between.generated_tokens, between.steps, between.running, between.kv_blocks_used) == (70, 5, 0, 0)
    tally.on_start(replace(FACTS, steps=1, generated_tokens=3))
    assert tally.total(replace(FACTS, generated_tokens=4)).generated_tokens == 74
    tally.on_gone(replace(FACTS, generated_tokens=4))
    assert tally.total(None).generated_tokens == 74


def test_a_connector_that_fails_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        found = RemoteEngineConnector("nowhere", 1)
        found.client.channel = cast(Any, SimpleNamespace())
        monkeypatch.setattr(found, "_keep", broken)
        await found.start()
        async with asyncio.timeout(10):
            assert "KeyError" in (await found.client.gave_up).what

    asyncio.run(story())
