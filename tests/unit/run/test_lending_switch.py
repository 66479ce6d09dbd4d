"""When the borrowed device is given a rest, an owner who comes and goes, and a device that is started again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from aiohttp import web

from rose.errors import ConfigError, Unavailable
from rose.run import lending_switch
from rose.run.lending_switch import STALL_S, BreachCount, LendingSwitch, Stall
from rose.run.run_settings import load_run_settings


@pytest.mark.parametrize(
    "story, samples",
    [
        ("turns end", [(0, 8, 0.0, False), (1, 8, STALL_S + 1, False), (2, 8, 2 * STALL_S + 2, False)]),
        ("nothing to do", [(5, 0, 0.0, False), (5, 0, 99.0, False), (5, 3, 99.5, False)]),
        ("stuck", [(5, 3, 0.0, False), (5, 3, STALL_S, False), (5, 3, STALL_S + 1, True)]),
        ("stuck, then not", [(5, 3, 0.0, False), (5, 3, STALL_S + 1, True), (6, 3, STALL_S + 2, False)]),
    ],
)
def test_a_device_that_ends_nothing_is_found(story, samples):
    stall = Stall()
    assert [stall.observe(*sample[:3]) for sample in samples] == [sample[3] for sample in samples], story


class Owner(LendingSwitch):
    """Whose device answers at once, and notes what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.lines: list[bool] = []
        self.enough = asyncio.Event()
        super().__init__("http://device", "token", lambda record: self.lines.append(record.is_lent))

    async def _ask(self, method: str, action: str, patience_s: float = 0.0) -> dict[str, Any]:
        self.told.append(action)
        if len(self.told) == 5:
            self.enough.set()
        if len(self.told) == 3:
            raise Unavailable("it is away for the moment")
        return {}


def test_a_restless_owner_takes_the_device_back_and_offers_it_again():
    async def story() -> Owner:
        owner = Owner()
        restless = asyncio.create_task(owner.switch_forever(0.001, 0.001))
        await asyncio.wait_for(owner.enough.wait(), 20)
        restless.cancel()
        return owner

    owner = asyncio.run(story())
    assert owner.told[:5] == ["/drain", "/resume", "/drain", "/drain", "/resume"], "one that failed is asked again"
    assert owner.lines[:5] == [False, True, False, False, True]


class Device(LendingSwitch):
    """Notes what it is asked, does not answer as often as it is told to, and else answers with its status."""

    def __init__(self) -> None:
        super().__init__("http://device", "token")
        self.asked: list[str] = []
        self.silences = 0
        self.status: dict[str, Any] = {}

    async def _ask(self, method: str, action: str, patience_s: float = 0.0) -> dict[str, Any]:
        self.asked.append(action)
        await asyncio.sleep(0)
        if self.silences:
            self.silences -= 1
            raise Unavailable("it is away for the moment")
        return self.status

    async def until_asked(self, *actions: str) -> None:
        async with asyncio.timeout(20):
            while self.asked != list(actions):
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lending_switch, "AGAIN_S", 0.01)


def test_a_device_that_was_held_back_is_held_back_again_after_a_restart():
    async def story() -> None:
        device = Device()
        await device.hold_back()
        device.silences = 2
        device.restarted()
        device.restarted()
        await device.until_asked("/drain", "/drain", "/drain", "/drain")
        await device.hold_back()
        assert len(device.asked) == 4, "it was told"
        device.restarted()
        await device.until_asked(*["/drain"] * 5)

    asyncio.run(story())


def test_a_device_that_is_lent_needs_no_word_after_a_restart():
    async def story() -> None:
        device = Device()
        device.restarted()
        assert await device.lend() and device.asked == []

    asyncio.run(story())


def test_a_device_that_is_wanted_again_before_it_could_be_held_back_again_stays_lent():
    async def story() -> None:
        device = Device()
        await device.hold_back()
        device.restarted()
        assert await device.lend(settle_s=0.0)
        assert device._again is not None
        await device._again
        assert device.asked[-1] == "/resume"

    asyncio.run(story())


def test_an_engine_that_came_back_lending_is_noticed_with_the_next_look():
    async def story() -> None:
        device = Device()
        await device.hold_back()
        device.status = {"state": "drained", "breaches": {"ttft": 1}}
        await device.breaches()
        device.status = {"state": "lending", "breaches": {"ttft": 0}}
        assert await device.breaches() == {"ttft": 1}
        await device.until_asked("/drain", "", "", "/drain")

    asyncio.run(story())


def test_a_device_that_could_not_be_told_to_rest_is_not_at_rest():
    async def story() -> None:
        device = Device()
        device.silences = 1
        with contextlib.suppress(Unavailable):
            await device.rest()
        assert await device.lend(), "it is lent as before"
        device.status = {"why": "nothing ends"}
        assert await device.rest() == "nothing ends"
        assert not await device.lend() and device.asked == ["", "", "/drain"]

    asyncio.run(story())


@pytest.mark.parametrize(
    "story, told, expected",
    [
        ("grows", [(1, 0), (4, 2)], (4, 2)),
        ("restarted", [(30, 5), (0, 0), (2, 1)], (32, 6)),
        ("one count has caught up already", [(30, 5), (1, 7)], (31, 12)),
        ("twice", [(3, 0), (1, 0), (0, 0), (4, 0)], (8, 0)),
    ],
)
def test_breaches_are_counted_over_restarts(story, told, expected):
    count = BreachCount()
    for ttft, step in told:
        found = count.observe({"ttft": ttft, "step": step})
    assert (found["ttft"], found["step"]) == expected, story


def test_a_device_that_is_being_started_again_is_asked_until_it_answers():
    async def story() -> list[int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        answers, statuses = [], [503, 503, 200]

        async def drain(request: web.Request) -> web.Response:
            answers.append(statuses[len(answers)])
            return web.json_response({"state": "drained"}, status=answers[-1])

        app = web.Application()
        app.router.add_post("/rose/lending/drain", drain)
        holding = asyncio.create_task(LendingSwitch(f"http://127.0.0.1:{port}", "token").hold_back())
        await asyncio.sleep(0.1)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.wait_for(holding, 20)
        await runner.cleanup()
        return answers

    assert asyncio.run(story()) == [503, 503, 200]


def test_a_device_that_stays_away_is_told_with_the_reason():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        away = LendingSwitch(f"http://127.0.0.1:{probe.getsockname()[1]}", "token")
        with pytest.raises(Unavailable, match=r"does not answer admin commands .*Cannot connect"):
            asyncio.run(away._ask("GET", "", patience_s=1.0))


@pytest.mark.parametrize("overrides", [["compare=true", "steps=4"], ["serving.is_borrowed=false"]])
def test_an_owner_cannot_come_and_go_where_steps_are_compared_or_nothing_is_lent(overrides):
    with pytest.raises(ConfigError, match="owner_lends_s needs a device"):
        load_run_settings(None, ["serving.owner_lends_s=4", *overrides])
    assert load_run_settings(None, ["serving.owner_lends_s=4"]).serving.owner_keeps_s == 2.0


def test_what_a_device_lent_is_counted_over_restarts():
    async def story() -> None:
        device = Device()
        device.status = {"breaches": {}}
        await device.breaches()
        assert device.lent == {}, "a device of an earlier version does not count"
        for tokens in (500, 900, 40):
            device.status = {"breaches": {}, "lent_steps": tokens // 10, "lent_tokens": tokens, "lent_s": tokens / 1000}
            await device.breaches()
        assert device.lent == {"steps": 94, "tokens": 940, "milliseconds": 940, "evicted_tokens": 0}

    asyncio.run(story())
