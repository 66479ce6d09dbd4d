"""Budgets, recent values and margins, and how soon serving alone would meet its deadlines."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.facts import RunningRequest, ServingView, WaitingRequest
from rose.core.latency import LatencyModel
from rose.core.slo import (
    AT_RISK_SHARE,
    LENGTH_CLASSES,
    NEWEST_KEPT,
    PROMPT_TOKENS_UNKNOWN,
    SEEDED_UNTIL,
    Budgets,
    OwnGaps,
    OwnTimes,
    RecentValues,
    credit_s,
    decode_slack_s,
    length_class,
    look_ahead,
    prefill_slack_s,
    waiting_ttfts_s,
)
from rose.engines.base import Budget, Request, Sampling
from rose.engines.profiles import load_profile
from rose.engines.simulated import SimulatedEngine
from rose.errors import ConfigError

STEP_TOKENS = 512
WIDE = Budget(STEP_TOKENS, 64)
PROFILE = load_profile("cpu")
NOW_S = 10.0

SAME_PACE = (0.1,) * LENGTH_CLASSES


def model() -> LatencyModel:
    return LatencyModel(
        (
            PROFILE.fixed_s,
            PROFILE.per_new_token_s,
            PROFILE.per_kv_read_token_s,
            PROFILE.per_new_by_context_s,
            PROFILE.per_sequence_s,
        )
    )


def view(waiting: list[int] | None = None, running: int = 0, context: int = 200, age_s: float = 0.0) -> ServingView:
    prompts = tuple(WaitingRequest(NOW_S - age_s, tokens) for tokens in waiting or [])
    return ServingView(1, prompts, tuple(RunningRequest(NOW_S - age_s, context) for _ in range(running)))


@pytest.mark.parametrize(
    "ttft_s, tpot_s, share", [(0, 0.1, 0.7), (0.5, -1, 0.7), (math.inf, 0.1, 0.7), (1, 1, 0), (1, 1, 2)]
)
def test_budgets_that_mean_nothing_are_refused(ttft_s: float, tpot_s: float, share: float) -> None:
    with pytest.raises(ConfigError, match="try:"):
        Budgets(ttft_s, tpot_s, share)


# The next prompt


def test_before_the_first_prompt_a_common_length_is_assumed() -> None:
    assert RecentValues(PROMPT_TOKENS_UNKNOWN).typical == PROMPT_TOKENS_UNKNOWN
    assert RecentValues(64).typical == 64


def test_a_few_prompts_count_by_the_longest() -> None:
    lengths = RecentValues(PROMPT_TOKENS_UNKNOWN)
    for tokens in (10, 700, 30):
        lengths.observe(tokens)
    assert lengths.typical == 700


def test_one_prompt_in_a_hundred_may_be_longer() -> None:
    lengths = RecentValues(PROMPT_TOKENS_UNKNOWN)
    for number in range(NEWEST_KEPT):
        lengths.observe(5000 if number % 125 == 0 else 100 + number % 7)
    assert lengths.typical == 106


def test_old_prompts_are_forgotten() -> None:
    lengths = RecentValues(PROMPT_TOKENS_UNKNOWN)
    for tokens in [3000] * NEWEST_KEPT + [20] * NEWEST_KEPT:
        lengths.observe(tokens)
    assert lengths.typical == 20


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=300), st.integers(1, 40))
def test_the_typical_length_is_the_p99_of_the_newest_thousand(tokens: list[int], repeats: int) -> None:
    lengths, seen = RecentValues(PROMPT_TOKENS_UNKNOWN), tokens * repeats
    for length in seen:
        lengths.observe(length)
    newest = sorted(seen[-NEWEST_KEPT:])
    assert lengths.typical == newest[math.ceil(0.99 * len(newest)) - 1]


# What serving itself needs


def own_times(values: list[float]) -> OwnTimes:
    times = OwnTimes()
    for seconds in values:
        times.observe(seconds)
    return times


@pytest.mark.parametrize(
    "story, values, margin_s",
    [
        ("nothing is known", [], 0.15),
        ("a few requests count by the slowest", [0.01, 0.1, 0.03], 0.05),
        ("one that missed the budget by itself cannot be lost", [0.01, 0.1, 0.2], 0.05),
        ("and if all did, there is none to lose", [0.2, 0.3], 0.15),
        ("two in a thousand may come nearer", [0.01] * 998 + [0.14] * 2, 0.14),
        ("but not three", [0.01] * 997 + [0.14] * 3, 0.01),
        ("and old ones are forgotten", [0.14] * 900 + [0.01] * NEWEST_KEPT, 0.14),
    ],
)
def test_the_margin_is_the_delay_that_hardly_any_request_misses_by(
    story: str, values: list[float], margin_s: float
) -> None:
    assert own_times(values).margin_s(0.15) == pytest.approx(margin_s), story


def test_the_worst_own_times_are_kept_for_another_engine() -> None:
    assert own_times([0.3, 0.1, 0.2]).largest(2) == (0.2, 0.3)
    assert own_times([0.3]).largest(2) == (0.3,) and own_times([]).largest(2) == ()


# Time to first token


def engine_with(running: int, context: int, prompts: list[int]) -> SimulatedEngine:
    """An engine that decodes `running` requests and has just been sent the prompts."""
    engine = SimulatedEngine(PROFILE)
    for number in range(running):
        sampling = Sampling(max_tokens=900, ignore_eos=True)
        engine.add(Request(f"running {number}", tuple(range(context)), sampling, tenant=str(number)))
    while engine.facts().prompt_tokens < running * context:
        plan = engine.plan(WIDE)
        assert plan is not None
        engine.step(plan)
    for number, tokens in enumerate(prompts):
        sampling = Sampling(max_tokens=100, ignore_eos=True)
        engine.add(Request(f"waiting {number}", tuple(range(tokens)), sampling, tenant=f"waiting {number}"))
    return engine


def ttfts_s(engine: SimulatedEngine, prompts: int) -> list[float]:
    found: dict[str, float] = {}
    now_s = 0.0
    while sum(name.startswith("waiting") for name in found) < prompts:
        plan = engine.plan(WIDE)
        assert plan is not None
        events = engine.step(plan)
        now_s += engine.last_step_s
        for event in events:
            found.setdefault(event.request_id, now_s)
    return [found[f"waiting {number}"] for number in range(prompts)]


@pytest.mark.parametrize("lengths", [(5, 40), (100, 300), (600, 1500)])
@pytest.mark.parametrize("running, context", [(0, 0), (8, 200), (40, 300)])
def test_predicted_first_tokens_are_not_early_and_not_far_off(
    lengths: tuple[int, int], running: int, context: int
) -> None:
    chance = random.Random(f"{lengths} {running}")
    prompts = [chance.randint(*lengths) for _ in range(10)]
    actual = ttfts_s(engine_with(running, context, prompts), len(prompts))
    now = view(prompts, running, context)
    predicted = waiting_ttfts_s(now, look_ahead(now, model(), STEP_TOKENS, 300), NOW_S)
    ratios = [ours / true for ours, true in zip(predicted, actual, strict=True)]
    assert min(ratios) >= 1.0, "slack must not be made up"
    assert max(ratios) <= 1.65, "an upper estimate, not a wild one"


def test_prompts_that_share_a_step_get_their_first_tokens_together() -> None:
    now = view([10, 20, 30])
    first, second, third = waiting_ttfts_s(now, look_ahead(now, model(), STEP_TOKENS, 100), NOW_S)
    assert first == second == third


def test_first_come_first_served() -> None:
    now = view([400, 400, 400, 20])
    found = waiting_ttfts_s(now, look_ahead(now, model(), STEP_TOKENS, 100), NOW_S)
    assert found == sorted(found) and found[0] < found[-1]


def test_a_request_keeps_the_time_it_has_waited_already() -> None:
    fresh, old = view([100]), view([100], age_s=0.2)
    outlook = look_ahead(fresh, model(), STEP_TOKENS, 100)
    gained_s = prefill_slack_s(fresh, outlook, 0.5, NOW_S) - prefill_slack_s(old, outlook, 0.5, NOW_S)
    assert gained_s == pytest.approx(0.2)
    assert prefill_slack_s(view(), outlook, 0.5, NOW_S) == math.inf


def test_the_next_request_waits_behind_all_others() -> None:
    alone, queue = view(), view([300, 300])
    ttft_alone_s = look_ahead(alone, model(), STEP_TOKENS, 200).next_ttft_s(200)
    outlook = look_ahead(queue, model(), STEP_TOKENS, 200)
    assert outlook.next_ttft_s(200) > max(waiting_ttfts_s(queue, outlook, NOW_S)) > 0
    assert outlook.next_ttft_s(200) > ttft_alone_s


def test_more_decodes_and_longer_queues_never_look_faster() -> None:
    ttfts = [look_ahead(view(running=r), model(), STEP_TOKENS, 200).next_ttft_s(200) for r in (0, 1, 8, 40, 63)]
    assert ttfts == sorted(ttfts)
    ttfts = [look_ahead(view([50] * n), model(), STEP_TOKENS, 200).next_ttft_s(200) for n in (0, 1, 8, 40, 63)]
    assert ttfts == sorted(ttfts)


# The next token


def test_decode_slack_is_set_by_the_token_that_is_oldest() -> None:
    now = ServingView(1, (), tuple(RunningRequest(NOW_S - age_s, 200) for age_s in (0.01, 0.04, 0.02)))
    assert decode_slack_s(now, 0.1, 0.005, NOW_S) == pytest.approx(0.06 - 0.005)
    assert decode_slack_s(view(), 0.1, 0.005, NOW_S) == math.inf


def test_credit_is_set_by_the_request_that_is_least_ahead() -> None:
    """Both newest tokens are just made: ten after 0.4 s at a pace of 0.1 are far ahead, five are not."""
    ahead, behind = (RunningRequest(NOW_S, 200, 0.0, NOW_S - 0.4, tokens) for tokens in (10, 5))
    assert credit_s(ServingView(1, (), (ahead,)), SAME_PACE, 0.005, NOW_S) == pytest.approx(0.6 - 0.005)
    assert credit_s(ServingView(1, (), (ahead, behind)), SAME_PACE, 0.005, NOW_S) == pytest.approx(0.1 - 0.005)
    assert credit_s(view(), SAME_PACE, 0.005, NOW_S) == math.inf
    assert credit_s(view(running=1), SAME_PACE, 0.005, NOW_S) == -math.inf, "no first token is known"


def test_each_request_has_the_pace_of_its_length() -> None:
    """Forty tokens in 0.4 s have a credit of 3.6 s at the pace of long answers, whatever the pace of short ones is."""
    long, short = (RunningRequest(NOW_S, 200, 0.0, NOW_S - age_s, tokens) for age_s, tokens in ((0.4, 40), (0.0, 1)))
    paces_s = (0.02, 0.02, 0.05, 0.1, 0.1)
    assert credit_s(ServingView(1, (), (long,)), paces_s, 0.005, NOW_S) == pytest.approx(3.6 - 0.005)
    assert credit_s(ServingView(1, (), (long, short)), paces_s, 0.005, NOW_S) == pytest.approx(0.02 - 0.005)


def test_the_next_decode_step_is_foretold_with_the_prompt_that_shares_it() -> None:
    alone = look_ahead(view(running=8), model(), STEP_TOKENS, 200)
    beside = look_ahead(view([300], running=8), model(), STEP_TOKENS, 200)
    assert beside.next_step_s > 2 * alone.next_step_s == 2 * alone.decode_step_s


def times(*values: float) -> OwnTimes:
    found = OwnTimes()
    for value in values:
        found.observe(value)
    return found


def test_the_margin_is_what_the_nearest_request_has_left():
    assert times(0.1, 0.3, 0.2).margin_s(0.5) == pytest.approx(0.2)


def test_requests_that_missed_by_themselves_cost_no_margin():
    assert times(0.1, 0.3, 0.7, 2.0).margin_s(0.5) == pytest.approx(0.2)


def test_without_a_request_within_the_budget_all_of_it_is_left():
    assert times().margin_s(0.5) == times(0.6, 0.7).margin_s(0.5) == 0.5


def test_hardly_any_of_a_thousand_requests_is_nearer_than_the_margin():
    own = times(*(0.001 * number for number in range(NEWEST_KEPT)))
    margin_s = own.margin_s(0.9995)
    at_risk = [number for number in range(NEWEST_KEPT) if 0.001 * number + margin_s > 0.9995 + 1e-9]
    assert len(at_risk) == int(AT_RISK_SHARE * NEWEST_KEPT) == 2


def test_a_seed_counts_until_enough_requests_have_ended():
    own = OwnTimes()
    own.seed_s = 0.4
    for _ in range(SEEDED_UNTIL - 1):
        own.observe(0.1)
    assert own.margin_s(0.5) == pytest.approx(0.1)
    own.observe(0.1)
    assert own.margin_s(0.5) == pytest.approx(0.4)


def test_a_seed_beyond_the_budget_costs_no_margin():
    own = OwnTimes()
    own.seed_s = 0.6
    assert own.margin_s(0.5) == 0.5


def test_a_short_answer_does_not_bound_the_pace_of_long_ones():
    gaps = OwnGaps()
    for _ in range(100):
        gaps.observe(0.01, 300)
    gaps.observe(0.09, 2)
    assert gaps.margins_s(0.1) == pytest.approx([0.01, 0.01, 0.09, 0.09, 0.09])


def test_a_long_answer_counts_for_all_lengths_up_to_its_own():
    gaps = OwnGaps()
    gaps.observe(0.09, 40)
    assert gaps.margins_s(0.1) == pytest.approx([0.01, 0.01, 0.01, 0.01, 0.1])


def test_classes_of_lengths_begin_at_four_times_the_last():
    assert [length_class(tokens) for tokens in (1, 2, 7, 8, 31, 32, 127, 128, 10**6)] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
