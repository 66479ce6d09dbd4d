"""The forecast of one lent device from its profiles."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from rose.core.slo import Budgets
from rose.engines.profiles import SPREAD_PLACES, StepSpread, load_profile, write_profile
from rose.errors import ConfigError
from rose.sim.device_forecast import DeviceForecast, forecast, quantile
from rose.sim.shapes import Arrival

BUDGETS = Budgets(0.5, 0.15, answer_s=60.0)
REQUESTS = [Arrival(0.5 * number, 100 + 10 * (number % 7), 10 + number % 5) for number in range(8)]


def of(serving: Path | str = "cpu", rollout: Path | str = "cpu-frozenlake-1m", **options: float) -> DeviceForecast:
    return forecast(serving, rollout, REQUESTS, BUDGETS, seconds=4.0, **options)  # type: ignore[arg-type]


def test_the_forecast_has_all_its_figures() -> None:
    found = of()
    assert found.requests == 8 and 0 < found.lent_share < 1 and found.rollout_tokens_s > 0
    assert 0 < found.ttft_p50_s <= found.ttft_p99_s and 0 < found.tpot_p50_s <= found.tpot_p99_s
    assert found.in_budget == 1.0
    assert of() == found, "one seed gives one answer"


def test_requests_of_the_warm_up_do_not_count() -> None:
    assert of(warm_s=2.0).requests == 4


def test_a_spread_of_stalls_makes_the_tail_longer(tmp_path: Path) -> None:
    calm = load_profile("cpu")
    stalls = tuple(1.0 if place < 0.9 else 6.0 for place in SPREAD_PLACES)
    write_profile(replace(calm, spread=(StepSpread(0.0, stalls),)), tmp_path / "stalls.json")
    write_profile(replace(calm, spread=(StepSpread(0.0, (1.0,) * len(SPREAD_PLACES)),)), tmp_path / "none.json")
    assert of(tmp_path / "stalls.json").ttft_p99_s > 1.2 * of(tmp_path / "none.json").ttft_p99_s


def test_without_requests_latencies_are_unknown() -> None:
    found = forecast("cpu", "cpu-frozenlake-1m", [Arrival(3.9, 10, 1)], BUDGETS, seconds=4.0, warm_s=3.95)
    assert found.requests == 0 and math.isnan(found.ttft_p99_s) and math.isnan(found.in_budget)
    assert math.isnan(quantile([], 0.5))


def test_a_request_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than the context"):
        forecast("cpu", "cpu-frozenlake-1m", [Arrival(0.0, 10**6, 1)], BUDGETS, seconds=4.0)
