"""The page of a plan: it shows the figures, and loads nothing."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from tests.unit.plan_world import result

from rose.cost.frontier import Frontier, HourSlack, PriceLine, WorstCase
from rose.plan.curve import CurvePoint
from rose.plan.economics import PlanEconomics, SpikeResult
from rose.plan.plan_page import page_of
from rose.plan.planning import AnswerCost, PlanReport
from rose.plan.windows import Estimate, HourResult

ECONOMICS = PlanEconomics(
    frontier=Frontier(0.8, (PriceLine("dedicated", 2.0, 0.01, 0.03, 0.6, "unknown"),
                            PriceLine("blend", 1.0, 0.006, 0.02, 0.4, "unknown")), None),
    gain_points=8.0, answer_usd=0.008, slack=(HourSlack(3, 0.02, 0.4, 0.015),), slack_gpu_hour_usd=0.015,
    slower_answer_s=0.025, waiting_gpu_hour_usd=0.001, worst=WorstCase(0.0, 1.5, 150.0, 100, 5),
    spikes=(SpikeResult(4.0, 900.0, 11.0, 12.0, 0.01),),
)  # fmt: skip
SHARE = Estimate(0.5, 0.4, 0.6, 48)
REPORT = PlanReport(
    traffic="<my> trace", fleet="2 x H800", job="grpo", mode="decode", windows=48, requests=100, requests_per_day=1e6,
    attainment_alone=Estimate(1.0, 0.99, 1.0, 100), attainment_lent=Estimate(math.nan, 0.0, 1.0, 0),
    lost_per_day=Estimate(3.0, 0.0, 9.0, 100), worst_minute=None, lent_share=SHARE, lent_share_idle=SHARE,
    hours=(HourResult(3, 1.0, SHARE, 500.0, 1.0, math.nan),), lent_gpu_hours=24.0, rollout_tokens_s=1000.0,
    held_back={"a prompt waits": 0.3}, peak_kv_share=0.2, breaker_trips=1,
    points=(CurvePoint(0, 0, Estimate(0.0, 0.0, 0.0, 1), math.inf, math.inf, 0.0),
            CurvePoint(2, 2, Estimate(900.0, 800.0, 1000.0, 3), 60.0, 96.0, 0.5)),
    train_s=30.0, sync_s=1.0, longest_trajectory_s=20.0,
    cost=AnswerCost(None, 0.01, 0.02, 0.03, None, 2.5, 2.5, 1000.0, 40.0),
    economics=ECONOMICS, advice="Borrow <all>.", assumptions=("One.",),
)  # fmt: skip


def test_the_page_shows_the_figures_and_escapes_what_users_wrote() -> None:
    page = page_of(REPORT)
    for words in ("&lt;my&gt; trace", "Borrow &lt;all&gt;.", "900.0", "a prompt waits", "no requests", "One."):
        assert words in page
    assert page.count("<svg") == 2 and "30.0%" in page


def test_the_page_loads_nothing() -> None:
    assert re.findall(r"(?:src|href)=\"(?!data:,)[^\"#]", page_of(REPORT)) == []
    assert "<script" not in page_of(REPORT) and "@import" not in page_of(REPORT)


@pytest.mark.parametrize("held", [{}, {"a": 0.0001}])
def test_without_a_reason_nothing_held_lending_back(held: dict[str, float]) -> None:
    assert "<td>nothing</td>" in page_of(replace(REPORT, held_back=held))


def test_the_windows_of_a_report_are_no_part_of_it() -> None:
    assert not any(isinstance(getattr(REPORT, name), type(result())) for name in PlanReport.__slots__)


def test_the_page_shows_the_next_dollar_and_the_risks() -> None:
    page = page_of(REPORT)
    for words in ("0.80 rollouts per answer", "<td>12</td>", "4 x the busiest window", "worst 5 of", "+25 ms"):
        assert words in page


def test_a_plan_without_answers_has_no_threshold() -> None:
    empty = replace(ECONOMICS, frontier=Frontier(0.0, (), None), gain_points=None, answer_usd=None, spikes=(), slack=())
    page = page_of(replace(REPORT, economics=empty))
    assert "there is no such threshold" in page and "none simulated" in page
