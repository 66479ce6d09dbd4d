"""What one borrowed device lends over time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rose.core.slo import Budgets
from rose.engines.profiles import SPREAD_PLACES, StepSpread, load_profile
from rose.sim.lent_timeline import BIN_S, LentTimeline, SaturatedDevice, saturated_requests_per_s
from rose.sim.shapes import Arrival

SERVING, ROLLOUT = load_profile("h800-qwen2.5-7b"), load_profile("h800-qwen3-8b")
BUDGETS = Budgets(0.5, 0.15)
TIMELINE = LentTimeline(
    (1.0, 0.0, 0.5, 0.5), (10, 20, 30, 40), (None, 0.1, None, None), 1.0, 5, (0.0, 0.25, 0.25, 0.375, 0.5)
)


def device(arrivals: list[Arrival], *, lends: bool = True) -> LentTimeline:
    return SaturatedDevice(SERVING, ROLLOUT, BUDGETS, arrivals, 4.0, 0, lends=lends).run()


@pytest.mark.parametrize("now_s, lent_s", [(0.0, 0.0), (0.1, 0.1), (0.4, 0.25), (0.75, 0.375), (1.0, 0.5), (2.1, 1.1)])
def test_lent_time_adds_up_and_repeats(now_s: float, lent_s: float) -> None:
    assert TIMELINE.lent_by(now_s) == pytest.approx(lent_s)


@pytest.mark.parametrize("lent_s", [0.05, 0.3, 0.45, 0.7, 5.2])
def test_when_lent_is_the_inverse_of_lent_by(lent_s: float) -> None:
    assert TIMELINE.lent_by(TIMELINE.when_lent(lent_s)) == pytest.approx(lent_s)


def test_a_device_that_lends_nothing_is_never_done() -> None:
    assert LentTimeline((0.0,), (0,), (None,), 1.0, 0, (0.0, 0.0)).when_lent(0.1) == math.inf


def test_a_shifted_timeline_starts_later() -> None:
    later = TIMELINE.shifted(2 * BIN_S)
    assert later.shares == (0.5, 0.5, 1.0, 0.0) and later.kv_tokens == (30, 40, 10, 20)
    assert later.lent_s == TIMELINE.lent_s and later.lent_by(BIN_S) == pytest.approx(0.125)


def test_a_stall_is_reported_one_bin_later() -> None:
    assert TIMELINE.reported_block_s(0.3) is None and TIMELINE.reported_block_s(0.55) == 0.1


def test_an_idle_device_lends_and_a_busy_one_keeps_its_budgets() -> None:
    arrivals = [Arrival(0.2 * number, 500, 50) for number in range(15)]
    idle, busy, alone = device([]), device(arrivals), device(arrivals, lends=False)
    assert idle.lent_s > busy.lent_s > 0 == alone.lent_s
    assert busy.attainment == alone.attainment == 1.0 and busy.requests == 15


def test_saturated_throughput_falls_with_longer_prompts() -> None:
    short, long = ([Arrival(0.0, tokens, 20) for _ in range(50)] for tokens in (100, 4000))
    assert saturated_requests_per_s(SERVING, BUDGETS, short) > 2 * saturated_requests_per_s(SERVING, BUDGETS, long) > 0


def test_steps_scatter_as_a_recorded_profile_says() -> None:
    slow = replace(SERVING, spread=(StepSpread(0.0, (3.0,) * len(SPREAD_PLACES)),))
    arrivals = [Arrival(0.2 * number, 500, 20) for number in range(15)]
    ends_s = []
    for serving in (SERVING, slow):
        alone = SaturatedDevice(serving, ROLLOUT, BUDGETS, arrivals, 4.0, 0, lends=False)
        alone.run()
        ends_s.append(sum(one.last_token_s - one.arrival.at_s for one in alone.served))
    assert ends_s[1] > 2.5 * ends_s[0]
