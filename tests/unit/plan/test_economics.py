"""The economics of a plan: what is counted in the traffic and in the simulated windows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.plan_world import result, shorten, small_fleet, small_job, steady

from rose.cost.bill import RunUsage
from rose.plan import economics
from rose.plan.economics import PlanEconomics, economics_of, minute_counts, simulate_spikes
from rose.plan.planning import GPU_PRICES
from rose.plan.windows import MinuteCount

FLEET = small_fleet()
JOB = small_job(FLEET)
USAGE = RunUsage(
    run_s=86_400.0, rollout_s=43_200.0, lent_s=86_400.0, lent_rollout_s=80_000.0, trajectories=7200, correct=3600,
    turns=100_000, generated_tokens=10_000_000, dedicated_turns=50_000, borrowed_turns=50_000, fixed_s=100_000.0,
    fixed_basis="estimated", pool_tokens=10_000_000, headroom_share=0.2, transfer_bytes=10**12,
)  # fmt: skip
MINUTES = {0: [[30] * 60]}


def economics_for(*results: object, usage: RunUsage = USAGE, rate: float = 1.0, **prices: float) -> PlanEconomics:
    terms = replace(GPU_PRICES, **prices)
    return economics_of(FLEET, steady(rate), JOB, list(results) or [result()], MINUTES, [], usage, terms)  # type: ignore[arg-type]


def test_the_three_prices_of_a_token_are_in_order_and_the_blend_between_them() -> None:
    found = economics_for()
    usd = {line.name: line.token_usd for line in found.frontier.lines}
    assert usd["borrowed"] < usd["serving"] and usd["borrowed"] < usd["blend"] < usd["dedicated"]
    assert found.gain_points is not None and found.gain_points > 0


def test_what_the_owner_charges_moves_the_blend_and_no_line() -> None:
    free, charged = economics_for(), economics_for(charged_share=1.0)
    lines = {line.name: line.token_usd for line in free.frontier.lines}
    others = {line.name: line.token_usd for line in charged.frontier.lines}
    assert others["blend"] > lines["blend"]
    assert {name: usd for name, usd in others.items() if name != "blend"} == pytest.approx(
        {name: usd for name, usd in lines.items() if name != "blend"}
    )


def test_lines_pay_for_all_that_the_job_holds() -> None:
    found = economics_for()
    dedicated = found.frontier.line("dedicated")
    assert dedicated is not None
    assert dedicated.token_usd * 5.0 == pytest.approx(24 * 2.5 * FLEET.dedicated * FLEET.degree)


def test_losses_and_slower_answers_raise_the_borrowed_price() -> None:
    def borrowed(found: PlanEconomics) -> float:
        line = found.frontier.line("borrowed")
        assert line is not None
        return line.token_usd

    lossy = result(lent=60, lost=40, minutes=(MinuteCount(100, 100, 60),))
    slow = result(slower_s=500.0)
    assert borrowed(economics_for(lossy)) > borrowed(economics_for())
    assert borrowed(economics_for(slow)) > borrowed(economics_for())
    assert economics_for(slow).slower_answer_s == pytest.approx(5.0)
    assert economics_for(result(slower_s=-500.0)).waiting_gpu_hour_usd == 0.0
    assert economics_for(lossy).worst.shortfall_requests == pytest.approx(40 * FLEET.replicas)


def test_slack_is_never_free_even_if_no_request_was_lost() -> None:
    found = economics_for()
    assert found.slack_gpu_hour_usd > 0 and found.worst.shortfall_usd == 0.0


@pytest.mark.parametrize("usage", [replace(USAGE, dedicated_turns=0, borrowed_turns=0, pool_tokens=0, turns=0), USAGE])
def test_without_answers_or_rollouts_a_plan_has_no_verdict(usage: RunUsage) -> None:
    none = result(requests=0, alone=0, lent=0, minutes=())
    found = economics_for(none, usage=usage, rate=0.0)
    assert found.gain_points is None and found.answer_usd is None and found.slower_answer_s == 0.0


def test_minutes_are_those_of_one_replica() -> None:
    counts = minute_counts(steady(4.0), FLEET, 0)
    [minutes] = counts[0]
    assert len(minutes) == 60
    assert sum(minutes) == pytest.approx(3600 * 4.0 / FLEET.replicas, rel=0.1)


def test_a_spike_multiplies_the_busiest_window(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    twice, four = simulate_spikes(FLEET, steady(8.0), 2000, "decode", 0)
    assert four.window.requests > 1.3 * twice.window.requests > 0
    assert four.window.lent <= four.window.requests


def test_a_replica_is_not_given_more_than_can_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    monkeypatch.setattr(economics, "SPIKE_ARRIVALS_MAX", 0)
    assert simulate_spikes(FLEET, steady(8.0), 2000, "decode", 0) == ()
