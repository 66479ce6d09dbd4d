"""A whole plan on a small fleet, and its cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.plan_world import shorten, small_fleet, small_job, steady

from rose.errors import ConfigError
from rose.plan import planning
from rose.plan.curve import CurvePoint
from rose.plan.planning import GPU_PRICES, answer_cost, make_plan, read_prices
from rose.plan.windows import Estimate


def point(workers: int, steps: float, borrowed_share: float = 0.0) -> CurvePoint:
    return CurvePoint(workers, workers, Estimate(steps, steps, steps, 1), 50.0, 86_400 / steps, borrowed_share)


NOTHING_LOST = Estimate(0.0, 0.0, 0.0, 100)


def test_a_plan_has_all_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    monkeypatch.setattr(planning, "phases_of", lambda *_: 2)
    fleet = small_fleet()
    report = make_plan(fleet, steady(), small_job(fleet), GPU_PRICES, "compare", 0, lambda *_: None)
    assert report.windows == 2 and report.lent_share_idle is not None
    assert report.lent_share_idle.value <= report.lent_share.value
    assert report.lent_gpu_hours == pytest.approx(48 * report.lent_share.value)
    assert report.gain is not None and report.gain >= 0.99
    assert report.advice and len(report.assumptions) > 8
    assert report.assumptions[0].startswith("Nothing was measured on a GPU")


def test_at_the_break_even_price_an_answer_costs_as_much_as_without() -> None:
    fleet = small_fleet()
    job = small_job(fleet)
    first, last = point(0, 500.0), point(2, 900.0, 0.5)
    cost = answer_cost(fleet, job, [first, last], NOTHING_LOST, 0.8, GPU_PRICES)
    assert cost.fixed is not None and cost.margin is not None and cost.break_even_usd_per_hour is not None
    assert cost.margin < cost.serving_price < cost.fixed  # type: ignore[operator]
    extra = cost.break_even_usd_per_hour * cost.borrowed_hours_per_day / cost.correct_per_day
    assert cost.margin + extra == pytest.approx(cost.fixed)
    assert cost.correct_per_day == pytest.approx(900 * 8 * 0.5)


def test_lost_requests_cost() -> None:
    fleet = small_fleet()
    job = small_job(fleet)
    points = [point(0, 500.0), point(2, 900.0, 0.5)]
    fine, lossy = (
        answer_cost(fleet, job, points, Estimate(lost, lost, lost, 1), 0.8, GPU_PRICES) for lost in (0.0, 10_000.0)
    )
    difference = (lossy.margin - fine.margin) * fine.correct_per_day  # type: ignore[operator]
    assert difference == pytest.approx(10_000 * GPU_PRICES.breach_usd)


def test_prices_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("dedicated_usd_per_hour: 4\n")
    assert read_prices(path).dedicated_usd_per_hour == 4
    assert read_prices(None) is GPU_PRICES
    path.write_text("dedicated_usd: 4\n")
    with pytest.raises(ConfigError, match="dedicated_usd"):
        read_prices(path)
