"""One step of any adapter: the desired state, the compute quota, dry runs, and the account of what was lent."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rose.core.accountant import Breach
from rose.core.admission import Admission, LendingLimits, Mode
from rose.core.breaker import Breaker, BreakerLimits
from rose.core.facts import Grant, RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.latency import LatencyModel
from rose.core.lending_controller import ComputeQuota, DryRun, LendingController
from rose.core.lending_state import PAUSED, DesiredLending, Stop, StopCause
from rose.core.slo import Budgets
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


def test_a_dry_run_grants_nothing_and_adds_up_what_it_would_have():
    dry, free = DryRun(admission("decode"), NOW_S), ComputeQuota()
    sequences = LendingLimits().rollout_sequences
    assert not dry.decide(IDLE, free, NOW_S).is_open(NOW_S)
    assert dry.tokens == 0
    decodes = ServingView(2, (), (request(NOW_S + 0.999),))
    dry.settle(NOW_S + 0.5)
    half = dry.tokens
    dry.settle(NOW_S + 1)  # a second without serving work: full of steps
    step_s = rollout_cost(StepFeatures(sequences, sequences * 257, sequences * 257, sequences))
    assert dry.tokens == pytest.approx(sequences / step_s, rel=0.2) and half == pytest.approx(dry.tokens / 2, rel=0.2)
    before = dry.tokens
    dry.decide(decodes, free, NOW_S + 1)
    dry.decide(waiting(10), free, NOW_S + 2)  # one step beside decoding, however long the view lasted
    assert dry.tokens == before + sequences
    dry.decide(IDLE, free, NOW_S + 3)
    assert dry.tokens == before + sequences


def beside_decoding(dry: DryRun, quota: ComputeQuota, since_s: float, seconds: int) -> None:
    """Decode steps of a millisecond, with a decision before each."""
    for number in range(1000 * seconds):
        now_s = since_s + number / 1000
        dry.decide(ServingView(1, (), (request(now_s - 0.0005),)), quota, now_s)


def test_a_dry_run_counts_no_second_twice():
    """A rollout step longer than serving's was counted at every one of them: seconds per second."""
    dry = DryRun(admission("decode"), NOW_S)
    beside_decoding(dry, ComputeQuota(), NOW_S, 1)
    assert 0.8 < dry.lent_s < 1.01
    dry.decide(IDLE, ComputeQuota(), NOW_S + 1)
    dry.settle(NOW_S + 2)
    assert 1.8 < dry.lent_s < 2.01


def test_a_dry_run_ends_its_quiet_time_when_a_prompt_comes():
    dry = DryRun(admission("decode"), NOW_S)
    dry.decide(IDLE, ComputeQuota(), NOW_S)
    dry.decide(waiting(10), ComputeQuota(), NOW_S + 1)
    dry.decide(waiting(10), ComputeQuota(), NOW_S + 5)
    assert dry.lent_s == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_a_dry_run_keeps_the_owners_limit_on_time(share):
    quota = ComputeQuota(share)
    dry = DryRun(admission("decode"), NOW_S)
    dry.decide(IDLE, quota, NOW_S)
    dry.settle(NOW_S + 30)
    dry.settle(NOW_S + 40)
    assert dry.lent_s == pytest.approx(40 * share, abs=0.3)
    before_s = dry.lent_s
    beside_decoding(dry, quota, NOW_S + 40, 10)
    assert dry.lent_s - before_s == pytest.approx(10 * share, abs=0.3)


def test_the_compute_quota_holds_lent_time_to_its_share():
    quota, lent_s, now_s = ComputeQuota(0.25), 0.0, 0.0
    while now_s < 20.0:
        if quota.is_spent(now_s):
            now_s += 0.001
            continue
        quota.spend(0.01, now_s := now_s + 0.01)
        lent_s += 0.01
    assert lent_s == pytest.approx(5.0, abs=0.3)
    assert ComputeQuota(0.0).is_spent(1.0) and not ComputeQuota(1.0).is_spent(1.0)


# The controller

STEP = StepFeatures(8, 80, 80, 8)


def new_controller(breaker: Breaker | None = None) -> LendingController:
    made = admission("decode")
    made.breaker = breaker
    return LendingController(made)


def granted(controller: LendingController, blocked: str = "", view: ServingView | str = IDLE) -> Grant:
    def admit(seen: ServingView) -> Grant:
        return controller.admission.decide(seen, ROLLOUT, NOW_S)

    return controller.step_grant(NOW_S, lambda: view, admit, blocked=blocked)


@pytest.mark.parametrize(
    "desired, blocked, view, reason",
    [
        (DesiredLending(), "", IDLE, "serving has no work"),
        (DesiredLending(stop=PAUSED), "pages are missing", IDLE, PAUSED.text),
        (DesiredLending(), "pages are missing", IDLE, "pages are missing"),
        (DesiredLending(), "", "the status is too old", "the status is too old"),
        (DesiredLending(compute_share=0.0), "", IDLE, "rollouts have had their 0% of the time, the owner's limit"),
        (DesiredLending(is_dry_run=True, stop=PAUSED), "", IDLE, "dry run: serving has no work"),
    ],
)
def test_a_step_is_refused_with_the_first_reason(desired, blocked, view, reason):
    controller = new_controller()
    controller.adopt(desired, NOW_S)
    grant = granted(controller, blocked, view)
    assert grant.reason == reason
    assert grant.is_open(NOW_S) is (desired == DesiredLending() and not blocked and view is IDLE)


def test_adopting_the_same_state_keeps_the_dry_run_and_leaving_it_ends_it():
    controller = new_controller()
    controller.adopt(DesiredLending(is_dry_run=True), NOW_S)
    dry_run = controller.dry_run
    controller.adopt(DesiredLending(is_dry_run=True, memory_share=0.5), NOW_S + 1)
    assert controller.dry_run is dry_run is not None
    controller.adopt(DesiredLending(), NOW_S + 2)
    assert controller.dry_run is None


def test_a_resume_restarts_the_breaker_and_a_failure_ends_a_dry_run():
    controller = new_controller(Breaker(BreakerLimits(deadlines_lost_max=0)))
    lost = Breach("ttft", "late", NOW_S, 0.5, 0.6, 0.2, "a")
    assert controller.count_lost([lost, None]) == [lost]
    assert "circuit breaker" in controller.why_resting(NOW_S)
    controller.adopt(DesiredLending(resumes=1, is_dry_run=True), NOW_S)
    assert controller.why_resting(NOW_S) == ""
    failure = Stop(StopCause.FAILURE, "the rollout model failed")
    controller.stop(failure)
    assert controller.stopped == failure and controller.dry_run is None


def test_steps_and_requests_are_counted_once():
    controller = new_controller(Breaker())
    assert controller.count_step(STEP, NOW_S, NOW_S + 0.01, 0.02) is None
    assert controller.count_step(STEP, NOW_S + 0.1, NOW_S + 0.2, 0.02) is not None, "longer than its estimate"
    assert (controller.lent_steps, controller.lent_tokens) == (2, 16)
    for name, first_token_s in (("in time", 0.1), ("late", 2.0)):
        controller.accountant.on_arrival(name, NOW_S + 1)
        controller.accountant.on_first_token(name, NOW_S + 1 + first_token_s)
        controller.count_finished(name, 1, NOW_S + 1 + first_token_s)
    controller.accountant.on_arrival("cancelled in time", NOW_S + 5)
    controller.count_left("cancelled in time", 0, NOW_S + 5.1)
    assert (controller.requests, controller.attained) == (2, 1)
