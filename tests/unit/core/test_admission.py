"""Admission, told as stories: what serving looks like, what rollouts want, what is granted and why."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rose.core.admission import START_GRACE_S, Admission, LendingLimits, Mode
from rose.core.breaker import Breaker
from rose.core.facts import Grant, RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.latency import LatencyModel
from rose.core.slo import LENGTH_CLASSES, Budgets
from rose.errors import ConfigError
from rose.sim.models import calibrated_model

NOW_S = 100.0
BUDGETS = Budgets(ttft_s=0.5, tpot_s=0.15)
ROLLOUT = RolloutView(decoding=32, prompt_tokens=400, context_tokens=100)
IDLE = ServingView(1)
LIMITS = LendingLimits(switch_s=0.0)


def serving_cost(features: StepFeatures) -> float:
    return 0.001 + 80e-6 * features.new_tokens


def rollout_cost(features: StepFeatures) -> float:
    return 0.0001 + 30e-6 * features.new_tokens + 8e-6 * features.sequences


SERVING, CHEAP = calibrated_model(serving_cost), calibrated_model(rollout_cost)
DEAR = calibrated_model(lambda features: 0.03 + 30e-6 * features.new_tokens)  # mostly fixed cost


def admission(mode: Mode, rollout: LatencyModel = CHEAP, budgets: Budgets = BUDGETS, **others: object) -> Admission:
    limits = dataclasses.replace(LIMITS, **others)  # type: ignore[arg-type]
    made = Admission(mode, budgets, SERVING, rollout, limits)
    made.history.bursts.restore(1e9, (), (), NOW_S)
    for _ in range(100):
        made.history.prompts.observe(100)
    return made


def request(last_token_s: float, arrival_s: float = math.inf, tokens: int = 1) -> RunningRequest:
    """Its tokens came all at once: with more of them it has more credit."""
    return RunningRequest(last_token_s, 100, arrival_s, last_token_s, tokens)


def decoding(*ages_s: float, tokens: int = 1) -> ServingView:
    return ServingView(1, (), tuple(request(NOW_S - age_s, tokens=tokens) for age_s in ages_s))


def waiting(*tokens: int, running: int = 0) -> ServingView:
    requests = tuple(WaitingRequest(NOW_S - 0.01, left) for left in tokens)
    return ServingView(1, requests, decoding(*[0.001] * running).running)


@pytest.mark.parametrize(
    "story, mode, view, is_open, reason",
    [
        ("idle lends an idle device", "idle", IDLE, True, "serving has no work"),
        ("idle keeps one that decodes", "idle", decoding(0.001), False, "serving has work"),
        ("idle keeps one with a prompt", "idle", waiting(100), False, "serving has work"),
        ("decode lends an idle device", "decode", IDLE, True, "serving has no work"),
        ("decode lends between tokens", "decode", decoding(0.001, 0.07), True, "slack between decode steps"),
        ("decode keeps off a prompt", "decode", waiting(10), False, "a prompt waits"),
        ("decode keeps off a prompt beside decodes", "decode", waiting(10, running=3), False, "a prompt waits"),
        ("decode waits for a late token", "decode", decoding(0.001, 0.104), False, "no step fits"),
        ("paper lends beside a prompt", "paper", waiting(100), True, "both slacks"),
        ("paper keeps off a full queue", "paper", waiting(*[500] * 12), False, "no slack for a whole step"),
        ("paper keeps off a late token", "paper", decoding(0.148), False, "no slack for a whole step"),
    ],
)
def test_who_may_run(story, mode, view, is_open, reason):
    grant = admission(mode).decide(view, ROLLOUT, NOW_S)
    assert grant.is_open(NOW_S) is is_open, story
    assert reason in grant.reason


@pytest.mark.parametrize("mode", ["idle", "decode", "paper"])
def test_without_rollouts_or_a_profile_the_gate_is_closed(mode):
    assert admission(mode).decide(IDLE, RolloutView(), NOW_S).reason == "rollouts have nothing to run"
    unprofiled = Admission(mode, BUDGETS, SERVING, LatencyModel())
    assert unprofiled.decide(IDLE, ROLLOUT, NOW_S).reason == "step times are not profiled yet"


def test_a_full_step_is_all_decodes_and_prompts_up_to_the_limit():
    grant = admission("idle").decide(IDLE, ROLLOUT, NOW_S)
    assert (grant.tokens, grant.sequences) == (432, 64)
    assert admission("idle", rollout_step_tokens=64).decide(IDLE, ROLLOUT, NOW_S).tokens == 64
    only_decodes = dataclasses.replace(ROLLOUT, prompt_tokens=0)
    assert admission("idle").decide(IDLE, only_decodes, NOW_S).sequences == 32
    crowd = dataclasses.replace(ROLLOUT, decoding=200)
    assert (g := admission("idle").decide(IDLE, crowd, NOW_S)).tokens == g.sequences == 64


@pytest.mark.parametrize("block_share", [0.002, 0.005, 0.01, 0.02, 0.1])
def test_who_arrives_is_blocked_for_a_bounded_time(block_share):
    """However short that is, the step that is granted fits by its upper estimate, and is not needlessly small."""
    lender = admission("idle", block_share=block_share)
    grant = lender.decide(IDLE, ROLLOUT, NOW_S)
    limit_s = block_share * BUDGETS.ttft_s
    assert lender.block_s == limit_s and grant.step_s_max == limit_s - START_GRACE_S
    if grant.tokens:
        assert lender.expected_s(grant, ROLLOUT) <= grant.step_s_max
        assert grant.tokens == 432 or lender.expected_s(grant, ROLLOUT) > 0.3 * grant.step_s_max


def test_the_block_limit_holds_beside_decoding_too():
    lender = admission("decode", budgets=Budgets(0.5, 5.0), block_share=0.01, efficiency_min=0.01)
    grant = lender.decide(decoding(0.001), ROLLOUT, NOW_S)
    assert grant.is_open(NOW_S) and grant.step_s_max <= lender.block_s == 0.005


def test_a_step_that_starts_last_still_ends_in_time():
    lender, view = admission("decode"), decoding(0.05, 0.09)
    grant = lender.decide(view, ROLLOUT, NOW_S)
    assert grant.until_s > NOW_S
    next_step_s = serving_cost(StepFeatures(2, 202, 202, 2))
    deadline_s = NOW_S - 0.09 + 0.7 * BUDGETS.tpot_s
    assert grant.until_s + lender.expected_s(grant, ROLLOUT) + next_step_s <= deadline_s


def test_the_share_is_of_the_budget_not_of_what_is_left():
    shares = (0.5, 0.7, 0.9)
    late = decoding(0.08)
    given = [admission("decode", budgets=Budgets(0.5, 0.15, share)).decide(late, ROLLOUT, NOW_S) for share in shares]
    assert [grant.is_open(NOW_S) for grant in given] == [False, True, True]


@pytest.mark.parametrize("own_s, margin_s", [(0.0, 0.15), (0.08, 0.07), (0.1, 0.05), (0.14, 0.01)])
def test_what_serving_itself_needs_between_tokens_is_not_lent(own_s, margin_s):
    """Others' prompts come between two tokens too, and nobody knows when: what they took of earlier requests counts."""
    lender = admission("decode")
    for number in range(100):
        lender.history.gaps.observe(own_s if number % 10 else 0.0, 500)
    step_s = SERVING.upper(StepFeatures(1, 101, 101, 1))
    pace_s = min(0.7 * BUDGETS.tpot_s, step_s + margin_s)
    assert lender.paces_s(step_s) == pytest.approx([pace_s] * LENGTH_CLASSES)
    grant = lender.decide(decoding(0.06), ROLLOUT, NOW_S)
    allowed_s = pace_s - step_s - 0.06 - START_GRACE_S
    assert grant.is_open(NOW_S) is (allowed_s > 0)
    assert not grant.tokens or grant.step_s_max == pytest.approx(allowed_s)
    assert lender.decide(IDLE, ROLLOUT, NOW_S).is_open(NOW_S), "without requests there is nobody to keep waiting"


def test_credit_of_earlier_tokens_pays_for_a_step_and_a_gap_does_not():
    """With tokens made ahead of their schedule the next one may be later than the budget for a token."""
    for tpot, is_open in (("mean", True), ("every_gap", False)):
        lender = admission("decode", budgets=Budgets(0.5, 0.15, tpot=tpot))
        assert lender.decide(decoding(0.12, tokens=3), ROLLOUT, NOW_S).is_open(NOW_S) is is_open
        assert not lender.decide(decoding(0.12), ROLLOUT, NOW_S).is_open(NOW_S)


def test_a_request_without_a_first_token_time_has_no_credit():
    view = ServingView(1, (), (RunningRequest(NOW_S - 0.001, 100),))
    assert "no step fits" in admission("decode").decide(view, ROLLOUT, NOW_S).reason
    every_gap = admission("decode", budgets=Budgets(0.5, 0.15, tpot="every_gap"))
    assert every_gap.decide(view, ROLLOUT, NOW_S).is_open(NOW_S)


@pytest.mark.parametrize("tpot", ["mean", "every_gap"])
@pytest.mark.parametrize("typical, is_open", [(100, True), (400, False), (3000, True)])
def test_a_prompt_that_comes_meanwhile_takes_from_the_gap_too(tpot, typical, is_open):
    """Unless its step alone takes longer than the budget: serving by itself would miss it too."""
    lender = admission("decode", budgets=Budgets(5.0, 0.04, 1.0, tpot=tpot), efficiency_min=0.01)
    for _ in range(1000):
        lender.history.prompts.observe(typical)
    assert lender.decide(decoding(0.02), ROLLOUT, NOW_S).is_open(NOW_S) is is_open


def answering(*ages_s: float) -> ServingView:
    """Requests that came so long ago, each with a new token."""
    return ServingView(1, (), tuple(request(NOW_S - 0.001, NOW_S - age_s) for age_s in ages_s))


@pytest.mark.parametrize(
    "story, ages_s, own_s, is_open",
    [
        ("young answers are slowed down", (1.0, 41.0), 2.0, True),
        ("one that has taken 0.7 of what users wait is left alone", (1.0, 42.5), 2.0, False),
        ("until users have given up, or are known to be patient", (1.0, 59.9), 2.0, False),
        ("and then no longer", (1.0, 60.5), 2.0, True),
        ("where serving needs long for an answer it has to begin earlier", (31.0,), 30.0, False),
        ("but not before", (29.0,), 30.0, True),
        ("answers that take serving itself longer are not for the impatient", (50.0,), 61.0, True),
    ],
)
def test_an_answer_that_has_taken_long_already_is_left_alone(story, ages_s, own_s, is_open):
    """Every token in time may still be an answer of a minute, on which proxies give up."""
    for mode, expected in (("decode", is_open), ("idle", False)):
        lender = admission(mode, budgets=dataclasses.replace(BUDGETS, answer_s=60.0))
        lender.history.answers.observe(own_s)
        grant = lender.decide(answering(*ages_s), ROLLOUT, NOW_S)
        assert grant.is_open(NOW_S) is expected, story
    assert admission("decode").decide(answering(50.0), ROLLOUT, NOW_S).is_open(NOW_S), "nobody said how long users wait"


def test_a_step_beside_an_answer_ends_before_the_answer_is_too_old():
    lender = admission("decode", budgets=dataclasses.replace(BUDGETS, answer_s=60.0))
    grant = lender.decide(answering(42.0 - 0.02), ROLLOUT, NOW_S)
    assert grant.is_open(NOW_S) and grant.until_s + lender.expected_s(grant, ROLLOUT) <= NOW_S + 0.02
    assert "no step fits" in lender.decide(answering(42.0 - 1e-4), ROLLOUT, NOW_S).reason
    assert "long already" in lender.decide(answering(42.0), ROLLOUT, NOW_S).reason


@pytest.mark.parametrize("view", [IDLE, decoding(0.001)])
def test_what_serving_itself_needs_for_a_first_token_is_not_lent(view):
    """A step is no longer than what the slowest of the usual first tokens could have been late by."""
    lender = admission("decode")
    assert lender.decide(view, ROLLOUT, NOW_S).step_s_max == pytest.approx(lender.block_s - START_GRACE_S)
    lender.history.first_tokens.observe(0.47)
    assert lender.decide(view, ROLLOUT, NOW_S).step_s_max == pytest.approx(0.03 - START_GRACE_S)
    lender.history.first_tokens.observe(0.4999)
    closed = lender.decide(view, ROLLOUT, NOW_S)
    assert not closed.tokens and not lender.is_stuck
    assert ("needs its TTFT budget itself" if view.is_idle else "before the next request") in closed.reason


def test_slots_for_the_next_burst_stay_free():
    lender = admission("decode")
    over_35 = [100] * 10  # arrivals that each of the thresholds costs
    lender.history.bursts.restore(1e9, (5000, 0, *[0] * 20, *over_35), (), NOW_S)
    assert lender.decide(decoding(*[0.001] * 35), ROLLOUT, NOW_S).is_open(NOW_S)
    closed = lender.decide(decoding(*[0.001] * 36), ROLLOUT, NOW_S)
    assert closed.reason == "slots are kept free for the next burst"
    assert lender.decide(IDLE, ROLLOUT, NOW_S).is_open(NOW_S)


def test_kv_memory_for_the_next_burst_stays_free():
    """Of 1,000 tokens of KV memory a burst needs 300; without a size per token nothing is kept free."""
    for per_token, used, is_open in ((10.0, 700, True), (10.0, 701, False), (0.0, 1000, True)):
        lender = admission("decode", kv_bytes_per_token=per_token)
        lender.history.bursts.restore(1e9, (), (300,), NOW_S)
        view = dataclasses.replace(decoding(0.001), kv_used_bytes=10 * used, kv_total_bytes=10_000)
        grant = lender.decide(view, ROLLOUT, NOW_S)
        assert grant.is_open(NOW_S) is is_open
        assert is_open or grant.reason == "pages of KV memory are kept free for the next burst"


def test_a_device_that_was_hardly_observed_lends_only_while_idle():
    lender = Admission("decode", BUDGETS, SERVING, CHEAP, LIMITS)
    for observed_s, is_open in ((0.0, False), (29.0, False), (60.0, True)):
        lender.history.bursts.restore(observed_s, (), (), NOW_S)
        grant = lender.decide(decoding(*[0.001] * 8), ROLLOUT, NOW_S)
        assert grant.is_open(NOW_S) is is_open and (is_open or "next burst" in grant.reason)
        assert lender.decide(IDLE, ROLLOUT, NOW_S).is_open(NOW_S)


def test_a_small_step_must_be_nearly_as_efficient_as_a_full_one():
    """30 ms of fixed cost: in 36 ms a part of a step fits, but beside serving it is not worth its time."""
    view = decoding(0.068)
    closed = admission("decode", DEAR).decide(view, ROLLOUT, NOW_S)
    assert "inefficient" in closed.reason and not closed.is_open(NOW_S)
    assert admission("decode", DEAR, efficiency_min=0.01).decide(view, ROLLOUT, NOW_S).is_open(NOW_S)
    assert admission("idle", DEAR, block_share=0.075).decide(IDLE, ROLLOUT, NOW_S).is_open(NOW_S), "nobody loses"


def test_a_tripped_breaker_closes_the_gate():
    lender = admission("idle")
    lender.breaker = Breaker()
    lender.breaker.pause("paused by the owner")
    assert lender.decide(IDLE, ROLLOUT, NOW_S) == Grant(0, 0, NOW_S, "paused by the owner", 0.0)
    lender.breaker.resume()
    assert lender.decide(IDLE, ROLLOUT, NOW_S).is_open(NOW_S)


def test_alternate_gives_every_second_step_and_all_of_them_when_serving_has_no_work():
    lender, decodes = admission("alternate"), ServingView(2, (), (request(NOW_S),))
    grants = [lender.decide(decodes, ROLLOUT, NOW_S).is_open(NOW_S) for _ in range(4)]
    assert grants == [True, False, True, False]
    assert all(lender.decide(IDLE, ROLLOUT, NOW_S).is_open(NOW_S) for _ in range(3))


def test_fcfs_serves_the_side_whose_oldest_request_came_first():
    lender, rollout = admission("fcfs"), dataclasses.replace(ROLLOUT, oldest_arrival_s=NOW_S - 2)
    came = [ServingView(1, (), (request(NOW_S, NOW_S - age_s),)) for age_s in (1.0, 3.0)]
    assert [lender.decide(view, rollout, NOW_S).is_open(NOW_S) for view in came] == [True, False]
    assert lender.decide(IDLE, rollout, NOW_S).is_open(NOW_S)


@pytest.mark.parametrize(
    "wrong",
    [{"block_share": 0.0}, {"efficiency_min": 2.0}, {"rollout_sequences": 0}, {"switch_s": -1.0}]
    + [{"kv_bytes_per_token": -1.0}, {"prefill_share_max": 1.1}, {"latch_s": -1.0}],
)
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        LendingLimits(**wrong)
    with pytest.raises(ConfigError, match="choose one of"):
        Admission("always", BUDGETS, SERVING, CHEAP)  # type: ignore[arg-type]


def test_a_device_that_stalled_early_is_not_shut_for_ever():
    """After a few stalls no step fits by its upper estimate, and while none runs nothing better can be learnt."""
    model = calibrated_model(rollout_cost)
    shape = StepFeatures(8, 800, 800, 8)
    for _ in range(4):
        model.observe(shape, 3.0)
    lent = admission("decode", rollout=model)
    view = RolloutView(decoding=8, prompt_tokens=0, context_tokens=100)
    assert lent.decide(ServingView(1), view, 0.0).reason.startswith("no step fits")
    opened_s = next(now_s for now_s in range(120) if lent.decide(ServingView(1), view, float(now_s)).tokens)
    assert opened_s > 5
    for _ in range(50):
        model.observe(shape, 3.0)
    assert not lent.decide(ServingView(1), view, 200.0).tokens, "it is as slow as it was"


def test_one_request_near_its_budget_does_not_shut_an_idle_device_for_ever():
    made = admission("idle")
    for own_s in (*[0.05] * 400, 0.4995):
        made.history.on_first_token(own_s, own_s)
    assert not made.decide(IDLE, ROLLOUT, NOW_S).tokens
    assert made.decide(IDLE, ROLLOUT, NOW_S + 6.0).tokens, "what was near its budget had company that is gone"
    made.decide(decoding(0.001), ROLLOUT, NOW_S + 7.0)
    assert not made.decide(IDLE, ROLLOUT, NOW_S + 8.0).tokens
