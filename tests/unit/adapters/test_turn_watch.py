"""Turns that wait: one look at the pool serves all, and what it finds is an error or a line of the log."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rose.adapters import turn_watch
from rose.adapters.turn_watch import TurnWatch
from rose.errors import RequestRefused, Unavailable

POOL = {"waiting_turns": 3, "members": []}


class Gateway:
    """Counts the looks; its pool is what `answer` returns or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.looks, self.error = 0, error
        self.looked = asyncio.Event()

    async def pool(self) -> dict[str, Any]:
        self.looks += 1
        self.looked.set()
        if self.error is not None:
            raise self.error
        return POOL


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_watch, "WATCH_S", 0.02)


async def endless() -> int:
    await asyncio.sleep(3600)
    return 0


def test_a_turn_that_ends_costs_no_look() -> None:
    async def run() -> None:
        gateway = Gateway()
        watch = TurnWatch(gateway.pool, 1.0)
        assert await watch(asyncio.sleep(0, 7)) == 7 and gateway.looks == 0

        async def refused() -> None:
            raise RequestRefused("no such model")

        with pytest.raises(RequestRefused, match="no such model"):
            await watch(refused())

    asyncio.run(run())


def test_of_many_turns_that_wait_one_looks_for_all() -> None:
    async def run() -> None:
        gateway = Gateway()
        watch, before_s = TurnWatch(gateway.pool, 3600.0), time.monotonic()
        turns = [asyncio.ensure_future(watch(endless())) for _ in range(50)]
        while gateway.looks < 3:
            gateway.looked.clear()
            await gateway.looked.wait()
        assert gateway.looks <= 1 + (time.monotonic() - before_s) / turn_watch.WATCH_S
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)

    asyncio.run(run())


def test_a_gateway_that_is_away_ends_all_turns_that_wait() -> None:
    async def run() -> None:
        gateway = Gateway(Unavailable("the gateway cannot be reached"))
        watch = TurnWatch(gateway.pool, 3600.0)
        ends = await asyncio.gather(*(watch(endless()) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(end, Unavailable) and "cannot be reached" in end.what for end in ends)
        gateway.error = None
        assert await watch(asyncio.sleep(0.05, 7)) == 7, "a look that failed is not used again"

    asyncio.run(run())


def test_a_pool_in_which_no_turn_ends_is_logged_once_and_then_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turn_watch, "QUIET_S", 0.03)

    async def run() -> None:
        gateway = Gateway()
        with pytest.raises(Unavailable, match=r"no turn has ended for 0 s: 3 turns wait .* there is none"):
            await TurnWatch(gateway.pool, 0.3)(endless())

    asyncio.run(run())
    assert len([record for record in caplog.records if "no turn has ended" in record.message]) == 1
