"""Cost per correct answer: a bill by hand, factors that multiply to it, and what borrowing saved."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.launch_lines import breaches_of, served, step, usage_of

from rose.config.loading import load_settings
from rose.cost.bill import Bill, CostSettings, RunUsage, cost_of, multiplies_to
from rose.errors import ConfigError

PRICES = CostSettings(
    dedicated_usd_per_hour=3.0,
    dedicated_devices=2,
    serving_usd_per_hour=2.0,
    energy_usd_per_hour=0.1,
    transfer_usd_per_gb=0.05,
    memory_price_share=0.5,
    breach_usd=0.01,
)
USAGE = RunUsage(
    run_s=7200,
    rollout_s=5400,
    lent_s=7200,
    lent_rollout_s=5400,
    trajectories=1000,
    correct=250,
    turns=8000,
    generated_tokens=400_000,
    dedicated_turns=4000,
    borrowed_turns=6000,
    fixed_s=10800,
    fixed_basis="estimated",
    pool_tokens=500_000,
    breaches=3,
    headroom_share=0.2,
    transfer_bytes=40_000_000_000,
    evaluation_s=360,
)


def test_a_bill_by_hand():
    found = cost_of(USAGE, PRICES)
    # Two devices at 3 USD for 1.5 h of rollouts and half an hour of training; a device lent for two hours.
    expected = Bill(
        dedicated_rollouts=9.0, dedicated_training=3.0, energy=0.15, transfer=2.0, headroom=0.4, slo_risk=0.03
    )  # fmt: skip
    assert asdict(found.bill) == pytest.approx(asdict(expected))
    assert (found.bill.dedicated, found.bill.borrowed) == (12.0, pytest.approx(2.58))
    assert found.total_usd == pytest.approx(14.58)
    assert found.cost_per_correct == pytest.approx(14.58 / 250)
    assert found.cost_per_correct_fixed == pytest.approx(3 * 2 * 3.0 / 250), "three hours of both devices"
    assert found.evaluation_usd == pytest.approx(0.1 * 6.0) and found.transfer_bytes == 40_000_000_000


def test_factors_by_hand():
    found = cost_of(USAGE, PRICES).factors
    # Half a million tokens, of which the judged trajectories have 400,000.
    assert found.rollout_ratio == pytest.approx(0.25)
    assert found.accept_ratio == 0.25
    assert found.reasoning_million_tokens == pytest.approx(0.0004)
    assert found.cpm_usd == pytest.approx(14.58 / 0.5)
    assert found.product() == pytest.approx(14.58 / 250)


def test_tokens_of_the_pool_are_those_that_the_gateway_counted():
    """Whatever the turns say: those of members that were cut off may be longer, or have no end."""
    found = cost_of(replace(USAGE, pool_tokens=600_000), PRICES)
    assert found.factors.cpm_usd == pytest.approx(14.58 / 0.6) and found.factors.rollout_ratio == pytest.approx(0.5)
    assert found.factors.reasoning_million_tokens == pytest.approx(0.0004), "of judged trajectories, as ever"
    assert found.prices.dedicated == pytest.approx(9.0 / 0.24) and found.is_consistent


def test_where_nobody_counted_them_other_turns_are_as_long_as_those_that_were_judged():
    uncounted = cost_of(replace(USAGE, pool_tokens=None), PRICES)
    assert uncounted == cost_of(USAGE, PRICES), "10,000 turns ended for 8,000 judged ones"


def test_three_prices_of_a_million_tokens():
    found = cost_of(USAGE, PRICES).prices
    assert found.dedicated == pytest.approx(9.0 / 0.2)
    assert found.serving == pytest.approx(1.5 * 2.0 / 0.3)
    assert found.borrowed == pytest.approx(2.58 / 0.3)


counts = st.integers(0, 100_000)
seconds = st.floats(0, 1e6)


@given(
    counts, counts, st.integers(1, 100_000), st.integers(1, 10**9), counts, counts, seconds, seconds,
    st.floats(0, 1000), st.integers(0, 10**12), st.none() | st.integers(0, 10**9),
)  # fmt: skip
def test_factors_multiply_to_the_total_whatever_a_run_was(
    trajectories, correct, turns, tokens, dedicated, borrowed, rollout_s, train_s, breaches, sent, others
):
    usage = replace(
        USAGE, run_s=rollout_s + train_s, rollout_s=rollout_s, trajectories=max(trajectories, correct),
        correct=correct, turns=turns, generated_tokens=tokens, dedicated_turns=turns + dedicated,
        borrowed_turns=borrowed, breaches=breaches, transfer_bytes=sent,
        pool_tokens=None if others is None else tokens + others,
    )  # fmt: skip
    found = cost_of(usage, PRICES)
    assert found.is_consistent
    assert (found.cost_per_correct is None) == (correct == 0)
    assert found.bill.total == pytest.approx(found.total_usd)


def test_a_factor_that_is_changed_alone_is_found():
    found = cost_of(USAGE, PRICES)
    assert found.is_consistent and multiplies_to(found.cost_per_correct, found.factors)
    assert not multiplies_to(found.cost_per_correct, replace(found.factors, accept_ratio=0.2))
    assert not multiplies_to(found.cost_per_correct, None) and not multiplies_to(None, found.factors)


@pytest.mark.parametrize(
    "story, change, expected",
    [
        ("judged trajectories are counted twice", {"turns": 16_000, "generated_tokens": 800_000}, ("turns", "tokens")),
        ("one pool is not counted", {"borrowed_turns": 0}, ("turns",)),
        ("the gateway has missed some", {"pool_tokens": 300_000}, ("tokens",)),
        ("more were right than were judged", {"correct": 2000}, ("trajectories",)),
        ("a worker died with its last count", {"dedicated_turns": 1900}, ()),
        ("nobody counted tokens of the pool", {"pool_tokens": None}, ()),
    ],
)
def test_counts_that_contradict_each_other_are_found(story, change, expected):
    found = cost_of(replace(USAGE, **change), PRICES)
    assert found.miscounted == expected and found.is_consistent == (not expected), story
    assert found.factors.product() == pytest.approx(found.cost_per_correct), "which no product could tell"


def test_without_a_correct_answer_there_is_a_bill_and_no_quotient():
    found = cost_of(replace(USAGE, correct=0), PRICES)
    assert found.total_usd > 0 and found.factors is None
    assert found.cost_per_correct is None and found.cost_per_correct_fixed is None
    assert found.is_consistent


# What a run used


def test_steps_with_and_without_the_device_measure_what_borrowing_saved():
    steps = [
        step(n, 10.0 * n, is_borrowed=n % 4 in (0, 1), rollout_s=2.0 if n % 4 in (0, 1) else 4.0) for n in range(8)
    ]
    found = usage_of(steps)
    assert found.fixed_basis == "measured"
    assert found.run_s == pytest.approx(4 * 3.1), "the bill is of the steps with the device"
    assert found.fixed_s == pytest.approx(4 * 5.1), "rollouts at the pace of those without"
    assert (found.dedicated_turns, found.borrowed_turns, found.turns) == (400, 800, 1200)
    assert found.trajectories == 256 and found.lent_rollout_s == pytest.approx(8.0)


def test_where_rollouts_never_stop_a_pace_is_of_all_tokens_that_were_played():
    in_step = {"trajectories": 40, "successes": 10, "turns": 180, "generated_tokens": 700}

    def line(n, is_borrowed):
        tokens = 2400 if is_borrowed else 1200
        return step(n, 10.0 * n, is_borrowed=is_borrowed, rollout_s=2.0, pool_tokens=tokens, in_step=in_step)

    found = usage_of([line(n, n % 4 in (0, 1)) for n in range(8)])
    assert found.fixed_s == pytest.approx(4 * (2 * 2.0 + 1.1)), "twice as many in the same time, as many of them judged"


def test_where_rollouts_never_stop_the_bill_is_for_what_ended_in_its_time():
    in_step = {"trajectories": 40, "successes": 10, "turns": 180, "generated_tokens": 700}
    found = usage_of([step(1, 0.0, pool_tokens=1300, in_step=in_step), step(2, 5.0, pool_tokens=1500, in_step=in_step)])
    assert (found.trajectories, found.correct, found.turns) == (80, 20, 360), "not those that an evaluation saw end"
    assert (found.generated_tokens, found.pool_tokens) == (1400, 2800)
    factors = cost_of(found, PRICES).factors
    assert factors.rollout_ratio == pytest.approx(1.0) and factors.reasoning_million_tokens == pytest.approx(17.5e-6)


def test_a_pool_whose_tokens_only_some_steps_know_is_estimated():
    assert usage_of([step(1, 0.0, pool_tokens=1300), step(2, 5.0)]).pool_tokens is None


def test_without_a_comparison_the_dedicated_worker_would_have_played_everything():
    found = usage_of([step(1, 0.0), step(2, 5.0)])
    assert found.fixed_basis == "estimated"
    assert found.fixed_s == pytest.approx(2 * 3.1 + 2 * 2.0 * 2), "it played a third of the turns"


def test_a_run_that_only_borrowed_would_have_had_to_rent():
    only = {"turns_by_pool": {"dedicated": 0, "borrowed": 300}}
    found = usage_of([step(1, 0.0, **only), step(2, 5.0, **only)])
    assert (found.fixed_basis, found.fixed_s) == ("rented", found.run_s)
    cost = cost_of(found, PRICES)
    assert cost.fixed_usd == pytest.approx(1.5 * cost.bill.dedicated), "a third device beside two"
    assert cost.prices.dedicated is None


def test_a_run_that_borrowed_nothing_costs_the_same_either_way():
    found = usage_of([step(1, 0.0, is_borrowed=False), step(2, 5.0, is_borrowed=False)], headroom_share=0.2)
    cost = cost_of(found, PRICES)
    assert found.fixed_basis == "same" and found.headroom_share == 0.0
    assert cost.cost_per_correct == pytest.approx(cost.cost_per_correct_fixed)
    assert cost.bill.borrowed == 0.0 and cost.prices.borrowed is None


def test_a_single_step_at_rest_is_no_comparison():
    found = usage_of([step(1, 0.0), step(2, 5.0), step(3, 9.0, is_borrowed=False)])
    assert found.fixed_basis == "estimated" and found.run_s == pytest.approx(3 * 3.1)


def test_a_run_without_steps_used_nothing():
    found = cost_of(usage_of([]), PRICES)
    assert found.total_usd == 0.0 and found.cost_per_correct is None and found.is_consistent


def test_bytes_sent_are_added_up_where_they_were_measured():
    assert usage_of([step(1, 0.0)]).transfer_bytes is None
    assert usage_of([step(1, 0.0, weights_bytes=5), step(2, 4.0, weights_bytes=7)]).transfer_bytes == 12


LATE, FINE = served(1.0, ttft_ms=900.0), served(1.0)


@pytest.mark.parametrize(
    "lent, alone, told, expected",
    [
        ([LATE, LATE, FINE, FINE], [], None, 2.0),
        ([LATE, LATE, FINE, FINE], [LATE, FINE, FINE, FINE], None, 1.0),
        ([LATE, FINE], [LATE, LATE], None, 0.0),
        ([LATE, LATE], [], {"step": 40, "ttft": 1, "tpot": 0, "ambiguous": 1}, 2.0),
        ([], [FINE], None, 0.0),
    ],
    ids=["all are lending's", "less what misses anyway", "never below none", "the device knows best", "no users"],
)
def test_breaches(lent, alone, told, expected):
    assert breaches_of(lent, alone, told) == pytest.approx(expected)


def test_prices_are_checked_like_any_setting():
    assert load_settings(CostSettings, overrides=["breach_usd=0.5"]).breach_usd == 0.5
    with pytest.raises(ConfigError, match="memory_price_share"):
        load_settings(CostSettings, overrides=["memory_price_share=2"])
