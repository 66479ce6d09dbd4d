"""Lending beside an engine that is only looked at: what is learnt, what is tried, who is accounted for."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.admission import Admission, LendingLimits
from rose.core.breaker import Breaker, BreakerLimits
from rose.core.facts import RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.latency import LatencyModel
from rose.core.observed_engine import (
    KIND_MIN,
    ONE_KIND_STEPS,
    STEPS_MIN,
    TRIAL_TOKENS,
    FinishedStep,
    Milestone,
    MilestoneKind,
    ObservedLending,
    StepLearner,
    StuckProbe,
    Trials,
)
from rose.core.slo import Budgets

BUDGETS = Budgets(0.5, 0.1)
IDLE = ServingView(1)
BUSY = ServingView(1, waiting=(WaitingRequest(0.0, 10),))
WORK = RolloutView(decoding=8, prompt_tokens=200, context_tokens=100)
DECODE = StepFeatures(4, 400, 400, 4)
PROMPT = StepFeatures(100, 100, 5050, 1)
ARRIVED, FIRST, ENDED, CANCELLED = MilestoneKind


def seconds_of(features: StepFeatures) -> float:
    return 1e-3 + 1e-4 * features.new_tokens + 1e-6 * features.kv_read_tokens


def teach(learner: StepLearner, prompts: int = 40, decodes: int = 40) -> None:
    chance = random.Random(1)
    shapes = [PROMPT] * prompts + [DECODE] * decodes
    for shape in shapes:
        tokens = shape.new_tokens + chance.randrange(3) * (shape is PROMPT)
        varied = dataclasses.replace(
            shape, new_tokens=tokens, kv_read_tokens=shape.kv_read_tokens + chance.randrange(50)
        )
        learner.observe(varied, seconds_of(varied) * chance.uniform(0.98, 1.02))


def new_lending(mode: str = "decode", breaker: Breaker | None = None) -> ObservedLending:
    limits = LendingLimits(rollout_step_tokens=256, rollout_sequences=16)
    admission = Admission(mode, BUDGETS, LatencyModel(), LatencyModel(), limits, breaker)  # type: ignore[arg-type]
    admission.history.bursts.restore(1e9, (), (), 0.0)
    return ObservedLending(admission)


def taught(mode: str = "decode", breaker: Breaker | None = None) -> ObservedLending:
    made = new_lending(mode, breaker)
    teach(made.serving)
    teach(made.rollout)
    return made


# Learning


def test_both_kinds_of_steps_must_have_been_seen() -> None:
    learner = StepLearner(LatencyModel())
    teach(learner, prompts=KIND_MIN - 1, decodes=2 * STEPS_MIN)
    assert f"{KIND_MIN - 1} with prompts" in learner.missing
    teach(learner, prompts=1, decodes=0)
    assert (learner.model.is_calibrated, learner.missing) == (True, "")
    assert learner.model.predict(DECODE) == pytest.approx(seconds_of(DECODE), rel=0.1)


@pytest.mark.parametrize("kind", ["prompts", "decodes"])
def test_an_engine_that_only_does_one_of_them_is_known_in_the_end(kind: str) -> None:
    learner = StepLearner(LatencyModel())
    nothing = {"prompts": 0, "decodes": 0}
    teach(learner, **{**nothing, kind: ONE_KIND_STEPS - 1})
    assert learner.missing
    teach(learner, **{**nothing, kind: 1})
    assert learner.model.is_calibrated


def test_empty_steps_teach_nothing() -> None:
    learner = StepLearner(LatencyModel())
    learner.observe(StepFeatures(), 0.1)
    learner.observe(DECODE, 0.0)
    assert learner.seen == 0


def test_serving_steps_beside_a_lent_one_teach_nothing() -> None:
    lending = new_lending()
    lending.on_lent_step(FinishedStep(1.0, 2.0, DECODE), upper_s=9.0)
    lending.on_steps([FinishedStep(0.5, 1.1, DECODE), FinishedStep(1.2, 1.4, DECODE), FinishedStep(1.9, 2.5, DECODE)])
    assert lending.serving.seen == 0
    lending.on_steps([FinishedStep(2.5, 2.6, DECODE), FinishedStep(0.1, 0.9, DECODE)])
    assert lending.serving.seen == 2
    lending.on_steps([FinishedStep(3.0, 3.3, DECODE)], lending_since_s=3.2)
    assert lending.serving.seen == 2, "a step that is not told of yet ran beside it"


def test_a_lent_step_is_not_charged_with_what_serving_took_beside_it() -> None:
    lending = taught()
    seen = lending.rollout.seen
    lending.on_steps([FinishedStep(1.2, 1.8, DECODE)])
    assert lending.on_lent_step(FinishedStep(1.0, 2.0, DECODE), upper_s=0.5) is None
    assert lending.on_lent_step(FinishedStep(3.0, 4.0, DECODE), upper_s=0.5, serving_since_s=3.4) is None
    assert lending.rollout.seen == seen, "nor does it teach"
    breach = lending.on_lent_step(FinishedStep(5.0, 6.0, DECODE), upper_s=0.5)
    assert breach is not None and breach.objective == "step"


def test_a_lent_step_is_charged_for_what_it_held_and_not_for_what_others_did() -> None:
    lending = taught()
    lending.on_lent_step(FinishedStep(1.0, 2.0, DECODE), upper_s=0.5, stalled_s=0.75)
    assert lending.accountant.total_lent_s == pytest.approx(0.25)
    lending.on_steps([FinishedStep(3.2, 3.8, DECODE)])
    lending.on_lent_step(FinishedStep(3.0, 4.0, DECODE), upper_s=0.5)
    assert lending.accountant.total_lent_s == pytest.approx(1.25), "a step beside it may have been held up by it"


def test_who_would_have_been_late_anyway_is_no_breach() -> None:
    lending = taught()
    lending.on_lent_step(FinishedStep(1.0, 1.7, DECODE), upper_s=0.5, stalled_s=0.69)
    late = [Milestone(ARRIVED, 1, 1.0, 5), Milestone(FIRST, 1, 1.9), Milestone(ENDED, 1, 1.9, 1)]
    assert lending.on_milestones(late) == []


# Trying


def test_nothing_is_lent_before_serving_is_known() -> None:
    lending = new_lending()
    teach(lending.rollout)
    grant = lending.decide(IDLE, WORK, 1.0)
    assert not grant.is_open(1.0)
    assert "learning how long serving's steps take" in grant.reason


def test_trials_begin_small_grow_while_short_and_run_only_on_an_idle_device() -> None:
    lending = new_lending()
    teach(lending.serving)
    assert not lending.decide(BUSY, WORK, 1.0).is_open(1.0)
    assert not lending.decide(IDLE, RolloutView(), 1.0).is_open(1.0)
    grant = lending.decide(IDLE, WORK, 1.0)
    assert (grant.tokens, grant.is_open(1.0), grant.is_open(2.0)) == (TRIAL_TOKENS, True, False)
    lending.on_lent_step(FinishedStep(1.0, 1.001, DECODE), upper_s=float("inf"))
    assert lending.decide(IDLE, WORK, 1.1).tokens == 2 * TRIAL_TOKENS
    lending.on_lent_step(FinishedStep(1.2, 1.4, DECODE), upper_s=float("inf"))
    assert lending.decide(IDLE, WORK, 1.5).tokens == TRIAL_TOKENS
    teach(lending.rollout)
    assert "serving has no work" in lending.decide(IDLE, WORK, 2.0).reason


@given(st.lists(st.floats(1e-6, 10)))
def test_a_trial_is_never_empty_nor_larger_than_a_step(durations: list[float]) -> None:
    trials = Trials(tokens_max=100, block_s=0.05)
    for seconds in durations:
        trials.observe(seconds)
        assert 1 <= trials.grant(IDLE, 0.0).tokens <= 100


def test_a_doubt_that_was_settled_begins_anew() -> None:
    doubt = StuckProbe(block_s=0.05)
    assert doubt.grant(0.0) is None
    assert doubt.grant(61.0) is not None and not doubt.judge(2.0)
    doubt.settle()
    assert doubt.grant(100.0) is None
    assert doubt.grant(161.0) is not None, "and not in two minutes only"


def test_a_tripped_breaker_ends_trials_too() -> None:
    breaker = Breaker(BreakerLimits(deadlines_lost_max=0))
    lending = new_lending(breaker=breaker)
    teach(lending.serving)
    breaker.on_deadline_lost(1.0)
    assert "circuit breaker" in lending.decide(IDLE, WORK, 1.0).reason


@pytest.mark.parametrize("view", [BUSY, ServingView(1, running=(RunningRequest(1.0, 100, 0.9, 1.0),))])
def test_beside_an_engine_of_one_kind_admission_decides_as_ever(view: ServingView) -> None:
    """A prefill-only engine shows prompts that wait and nobody who decodes; a decode-only one the reverse."""
    lending = taught("decode")
    grant = lending.decide(view, WORK, 1.0)
    assert grant.is_open(1.0) == (not view.waiting)
    assert lending.decide(IDLE, WORK, 1.0).is_open(1.0)
    assert not taught("idle").decide(view, WORK, 1.0).is_open(1.0)


# Accounting


def test_milestones_become_prompts_attainment_and_breaches() -> None:
    breaker = Breaker()
    lending = taught(breaker=breaker)
    lending.on_milestones([Milestone(ARRIVED, 1, 1.0, 77), Milestone(FIRST, 1, 1.2), Milestone(ENDED, 1, 1.25, 3)])
    assert (lending.requests, lending.attained) == (1, 1)
    assert lending.admission.history.prompts.typical == 77
    lending.on_lent_step(FinishedStep(2.0, 2.3, DECODE), upper_s=1.0)
    late = [Milestone(ARRIVED, 2, 2.0, 5), Milestone(FIRST, 2, 2.6), Milestone(ENDED, 2, 2.7, 2)]
    (breach,) = lending.on_milestones(late)
    assert (breach.objective, lending.requests, lending.attained) == ("ttft", 2, 1)


@pytest.mark.parametrize(
    "milestones, requests, attained",
    [
        pytest.param([Milestone(CANCELLED, 1, 9.0)], 1, 0, id="gave up waiting"),
        pytest.param([Milestone(CANCELLED, 1, 1.4)], 0, 0, id="left before a token was due"),
        pytest.param([Milestone(FIRST, 1, 1.2), Milestone(CANCELLED, 1, 1.4, 3)], 1, 1, id="ended by a stop string"),
        pytest.param([Milestone(FIRST, 1, 1.2), Milestone(CANCELLED, 1, 3.0, 3)], 1, 0, id="gave up between tokens"),
        pytest.param([Milestone(ENDED, 1, 9.0)], 0, 0, id="ended without a token"),
    ],
)
def test_who_is_gone_is_judged_as_if_its_next_token_had_come_just_then(
    milestones: list[Milestone], requests: int, attained: int
) -> None:
    breaker = Breaker(BreakerLimits(deadlines_lost_max=0))
    lending = taught(breaker=breaker)
    lending.on_milestones([Milestone(ARRIVED, 1, 1.0, 5), *milestones])
    assert (lending.requests, lending.attained, lending.accountant.open_accounts) == (requests, attained, 0)
    assert breaker.why_stopped(9.0) is None, "nothing was lent"


def test_who_gave_up_behind_a_lent_step_has_lost_its_deadline_to_it() -> None:
    breaker = Breaker(BreakerLimits(deadlines_lost_max=0))
    lending = taught(breaker=breaker)
    lending.on_lent_step(FinishedStep(2.0, 2.3, DECODE), upper_s=1.0)
    (breach,) = lending.on_milestones([Milestone(ARRIVED, 1, 2.0, 5), Milestone(CANCELLED, 1, 2.6)])
    assert breach.objective == "ttft" and "1 deadlines lost" in (breaker.why_stopped(2.6) or "")


def test_lost_records_close_every_account() -> None:
    lending = taught()
    lending.on_milestones([Milestone(ARRIVED, 1, 1.0, 5)])
    assert lending.on_milestones([Milestone(FIRST, 1, 99.0), Milestone(ENDED, 7, 99.0, 4)], lost=3) == []
    assert (lending.requests, lending.accountant.open_accounts) == (0, 0)


EVENTS = st.tuples(st.sampled_from(list(MilestoneKind)), st.integers(0, 4), st.floats(0, 3), st.integers(0, 50))


@given(st.lists(st.one_of(EVENTS, st.floats(0.001, 0.3))), st.integers(0, 1))
def test_no_order_of_events_confuses_the_account(events, lost) -> None:
    lending = taught(breaker=Breaker())
    now_s = 0.0
    for event in events:
        if isinstance(event, float):
            lending.on_lent_step(FinishedStep(now_s, now_s + event, DECODE), upper_s=1.0)
            now_s += event
        else:
            kind, key, passed_s, tokens = event
            now_s += passed_s
            lending.on_milestones([Milestone(kind, key, now_s, tokens)], lost)
        grant = lending.decide(IDLE, WORK, now_s)
        assert grant.reason
        assert lending.attained <= lending.requests
