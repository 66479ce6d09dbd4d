"""Budgets, the length of the next prompt, and how soon serving would meet its deadlines by itself."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.facts import RunningRequest, ServingView, WaitingRequest
from rose.core.latency import LatencyModel
from rose.core.slo import (
    NEWEST_KEPT,
    PROMPT_TOKENS_UNKNOWN,
    Budgets,
    OwnGaps,
    PromptLengths,
    arrival_slack_s,
    decode_slack_s,
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
    assert PromptLengths().typical_tokens == PROMPT_TOKENS_UNKNOWN
    assert PromptLengths(64).typical_tokens == 64


def test_a_few_prompts_count_by_the_longest() -> None:
    lengths = PromptLengths()
    for tokens in (10, 700, 30):
        lengths.observe(tokens)
    assert lengths.typical_tokens == 700


def test_one_prompt_in_a_hundred_may_be_longer() -> None:
    lengths = PromptLengths()
    for number in range(NEWEST_KEPT):
        lengths.observe(5000 if number % 125 == 0 else 100 + number % 7)
    assert lengths.typical_tokens == 106


def test_old_prompts_are_forgotten() -> None:
    lengths = PromptLengths()
    for tokens in [3000] * NEWEST_KEPT + [20] * NEWEST_KEPT:
        lengths.observe(tokens)
    assert lengths.typical_tokens == 20


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=300), st.integers(1, 40))
def test_the_typical_length_is_the_p99_of_the_newest_thousand(tokens: list[int], repeats: int) -> None:
    lengths, seen = PromptLengths(), tokens * repeats
    for length in seen:
        lengths.observe(length)
    newest = sorted(seen[-NEWEST_KEPT:])
    assert lengths.typical_tokens == newest[math.ceil(0.99 * len(newest)) - 1]


def test_before_the_first_request_has_ended_serving_needs_nothing_between_tokens() -> None:
    gaps = OwnGaps()
    assert gaps.typical == 0.0
    for number in range(NEWEST_KEPT):
        gaps.observe(0.5 if number % 125 == 0 else 0.004)
    assert gaps.typical == 0.004


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
    running = tuple(RunningRequest(NOW_S - age_s, 200) for age_s in (0.01, 0.04, 0.02))
    now = ServingView(1, (), running)
    outlook = look_ahead(now, model(), STEP_TOKENS, 200)
    assert decode_slack_s(now, outlook, 0.1, NOW_S) == pytest.approx(0.06 - outlook.decode_step_s)
    assert decode_slack_s(view(), outlook, 0.1, NOW_S) == math.inf


def test_the_next_decode_step_is_foretold_with_the_prompt_that_shares_it() -> None:
    alone = look_ahead(view(running=8), model(), STEP_TOKENS, 200)
    beside = look_ahead(view([300], running=8), model(), STEP_TOKENS, 200)
    assert beside.next_step_s > 2 * alone.next_step_s == 2 * alone.decode_step_s


def test_a_prompt_that_comes_meanwhile_takes_from_the_gap_too() -> None:
    now = view(running=8)
    outlook = look_ahead(now, model(), STEP_TOKENS, 400)
    slack_s = arrival_slack_s(now, outlook, 0.15, 400, NOW_S)
    assert 0 < slack_s < decode_slack_s(now, outlook, 0.15, NOW_S)
    assert slack_s == pytest.approx(0.15 - outlook.prefill_s(400))


def test_a_gap_that_serving_alone_would_miss_protects_nobody() -> None:
    now = view(running=8)
    outlook = look_ahead(now, model(), STEP_TOKENS, 400)
    assert arrival_slack_s(now, outlook, 0.01, 400, NOW_S) == math.inf
    assert arrival_slack_s(view(), outlook, 0.15, 400, NOW_S) == math.inf
