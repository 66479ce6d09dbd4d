"""Sampled windows: real admission decides, and the figures add up."""

from __future__ import annotations

import math
import random

import pytest
from tests.unit.plan_world import result, shorten, small_fleet, steady

from rose.core.admission import Admission
from rose.core.facts import Grant
from rose.plan import windows
from rose.plan.windows import (
    MinuteCount,
    at_level,
    attainment,
    by_hour,
    held_back,
    lost_share,
    mean_estimate,
    phases_of,
    simulate,
    simulate_windows,
    worst_minute,
)
from rose.sim.shapes import Arrival

BUSY = [Arrival(0.1 * number, 2000, 30) for number in range(80)]


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def run(arrivals: list[Arrival], mode: str = "decode") -> windows.WindowResult:
    return simulate(small_fleet(), arrivals, 2000, mode, 0, None, 5)[0]  # type: ignore[arg-type]


def test_an_idle_device_lends_nearly_all_and_a_busy_one_less() -> None:
    idle, busy = run([]), run(BUSY)
    assert idle.lent_share > 0.95 > busy.lent_share and idle.requests == 0
    assert busy.requests == 60 and busy.alone == sum(minute.alone for minute in busy.minutes)
    assert busy.lent - busy.alone == busy.gained - busy.lost
    assert idle.rollout_tokens_s > busy.rollout_tokens_s
    assert 0 < busy.peak_kv_share < 1 and busy.hour == 5


def test_the_time_that_is_not_lent_has_reasons() -> None:
    busy = run(BUSY)
    assert sum(busy.unlent_s.values()) == pytest.approx(windows.WINDOW_S - busy.timeline.lent_s, abs=0.5)
    assert "a prompt waits" in busy.unlent_s
    assert "serving has work" in run(BUSY, "idle").unlent_s


def test_admission_decides_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan lends nothing if admission grants nothing, and its two runs are equal in every request."""
    asked = []

    def refuse(self: Admission, view: object, rollout: object, now_s: float) -> Grant:
        asked.append(now_s)
        return Grant(0, 0, now_s, "never")

    monkeypatch.setattr(Admission, "decide", refuse)
    closed = run(BUSY)
    assert asked and closed.lent_share == 0 and closed.rollout_tokens_s == 0
    assert (closed.lost, closed.gained) == (0, 0) and closed.alone == closed.lent
    assert list(closed.unlent_s) == ["never"]


def test_every_hour_is_sampled_and_the_busiest_minutes_too() -> None:
    seen: list[tuple[int, int, str]] = []
    results, busiest = simulate_windows(
        small_fleet(),
        steady(),
        2000,
        "decode",
        2,
        0,
        lambda *told: seen.append(told),  # names what it does
    )
    assert [one.hour for one in results] == [0, 0] and busiest.requests >= 0
    assert [done for done, _, _ in seen] == [0, 1] and seen[0][1] == 2
    [hour] = by_hour(steady(), results)
    assert hour.requests_s == 1.0 and 0 < hour.lent_share.value <= 1


def test_the_same_seed_gives_the_same_windows() -> None:
    one, other = (run([Arrival(random.Random(3).random(), 500, 20)]) for _ in range(2))
    assert one == other


def test_shorter_steps_get_fewer_windows() -> None:
    assert phases_of(24, small_fleet(), 1) >= phases_of(24, small_fleet(), 2) >= 1
    assert phases_of(1, small_fleet(), 1) > phases_of(24, small_fleet(), 1)


def test_attainment_without_a_loss_has_the_interval_of_its_number() -> None:
    estimate = attainment([result()] * 10, lent=True)
    assert estimate.value == estimate.high == 1.0 and 0.99 < estimate.low < 1.0 and estimate.n == 1000
    assert lost_share([result()] * 10).high == pytest.approx(1 - estimate.low)


def test_losses_in_one_window_have_a_wider_interval() -> None:
    clustered = lost_share([result(lent=90, lost=10), *[result()] * 9])
    spread = lost_share([result(lent=99, lost=1)] * 10)
    assert clustered.value == spread.value == 0.01
    assert clustered.high - clustered.low > 2 * (spread.high - spread.low)


def test_without_requests_nothing_is_claimed() -> None:
    nothing = [result(requests=0, alone=0, lent=0, minutes=())]
    assert math.isnan(attainment(nothing, lent=True).value)
    assert (lost_share(nothing).value, lost_share(nothing).high) == (0.0, 1.0)
    assert worst_minute(nothing) is None


def test_the_worst_minute_is_the_one_that_lending_hurt_most() -> None:
    hurt, poor = MinuteCount(50, 50, 45), MinuteCount(50, 10, 10)
    assert worst_minute([result(minutes=(poor,)), result(minutes=(hurt,))]) == hurt
    assert worst_minute([result(minutes=(poor, MinuteCount(50, 50, 50)))]) == poor


def test_reasons_are_shares_of_all_time() -> None:
    shares = held_back([result(unlent_s={"a": 2.0, "b": 4.0}), result(unlent_s={"b": 2.0})])
    assert list(shares) == ["b", "a"] and shares["a"] == pytest.approx(2 / 16)


def test_levels_and_means() -> None:
    results = [result(lent_share=share / 10) for share in range(11)]
    assert [one.lent_share for one in at_level(results, 0.9, 3)] == [0.8, 0.9, 1.0]
    assert mean_estimate([0.2, 0.4]).value == pytest.approx(0.3)
    assert mean_estimate([0.2], 0.0, 1.0).low == 0.0
