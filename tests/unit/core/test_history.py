"""What is learnt of serving: a seed from the profile, bursts, the demand of prompts, a snapshot for the next engine."""

from __future__ import annotations

import msgspec
import pytest

from rose.core.admission import Admission, LendingLimits
from rose.core.facts import RolloutView, RunningRequest, ServingView, StepFeatures
from rose.core.history import WORST_KEPT, HistorySnapshot, PrefillDemand, ServingHistory
from rose.core.latency import LatencyModel
from rose.core.slo import (
    LENGTH_CLASSES,
    Budgets,
)
from rose.sim.models import calibrated_model


def test_a_seed_stands_for_the_first_requests_and_is_taken_once():
    history = ServingHistory(0.5, 64)
    history.seed(0.2, 0.03)
    history.seed(0.4, 0.09)
    assert history.first_tokens.margin_s(0.5) == pytest.approx(0.3)
    assert history.gaps.margins_s(0.1) == pytest.approx([0.07] * LENGTH_CLASSES)


def test_times_say_what_lending_adds():
    history = ServingHistory(0.5, 64)
    for _ in range(100):
        history.on_first_token(0.12, 0.1)
        history.on_answer(50, 0.03, 0.02, 1.0, 1)
    found = history.times
    assert found.requests == 100
    assert (found.ttft_p50_s, found.ttft_p99_s) == (0.12, 0.12)
    assert found.ttft_p99_added_s == pytest.approx(0.02)
    assert found.tpot_p50_added_s == pytest.approx(0.02)


def test_the_window_of_bursts_grows_with_serving_own_answers():
    history = ServingHistory(0.5, 64)
    history.on_arrival(10, 1.0)
    assert history.bursts.window_s == 0.5
    for _ in range(10):
        history.on_answer(50, 0.01, 0.0, 2.0, 1)
    history.on_arrival(10, 2.0)
    assert history.bursts.window_s == 2.0


def test_a_snapshot_keeps_the_worst_and_crosses_a_socket():
    history = ServingHistory(0.5, 64)
    history.decode_step_s, history.bursts.thresholds.pace_s = lambda count: 0.01, 0.1
    for number in range(200):
        history.bursts.learn(history.on_arrival(100 + number, 10 + 0.02 * number))
        history.on_first_token(0.1 + 0.001 * number, 0.1 + 0.001 * number)
        history.on_answer(2 + number, 0.01 + 0.0001 * number, 0.0, 1.0 + 0.01 * number, 1)
        history.lengths.observe(100)
    wire = msgspec.msgpack.encode(history.snapshot(20.0))
    after = ServingHistory(0.5, 64)
    after.restore(msgspec.msgpack.decode(wire, type=HistorySnapshot), 500.0)
    assert after.first_tokens.margin_s(0.5) == pytest.approx(history.first_tokens.margin_s(0.5))
    assert after.gaps.margins_s(0.1) == pytest.approx(history.gaps.margins_s(0.1))
    assert after.bursts.thresholds.best == history.bursts.thresholds.best < 64
    assert after.prompts.typical == history.prompts.typical
    assert after.bursts.observed_s(500.0) == pytest.approx(10.0)
    assert [len(worst) for worst in history.snapshot(20.0).gaps] == [WORST_KEPT] * LENGTH_CLASSES


def test_a_restored_history_takes_no_seed():
    before, after = ServingHistory(0.5, 64), ServingHistory(0.5, 64)
    after.restore(before.snapshot(0.0), 0.0)
    after.seed(0.4, 0.09)
    assert after.first_tokens.margin_s(0.5) == 0.5


def test_new_answers_are_as_long_as_those_that_ended_and_those_that_are_here():
    history = ServingHistory(0.5, 64)
    assert history._output_tokens([1.0]) is None
    for number in range(98):
        history.lengths.observe(100 + number)
        history.on_answer(50, 0.01, 0.0, 1.0, 1)
    drawn = [history._output_tokens([0.01, 30.0]) for _ in range(1000)]
    assert 8 <= sum(tokens == 6000 for tokens in drawn) <= 12  # one in a hundred, as half through
    assert 480 <= sum(tokens <= 148 for tokens in drawn) <= 520
    assert min(drawn) == 100
    assert max(history._output_tokens([0.01, 1.5]) for _ in range(1000)) == 197  # these say nothing new


def test_thresholds_learn_how_much_longer_tokens_take_than_decode_steps():
    """Others' prompts come in between: here they double the time of a token."""
    history = ServingHistory(0.5, 64)
    history.decode_step_s = lambda count: 0.01
    for _ in range(1000):
        history.on_answer(50, 0.02, 0.0, 1.0, 8)
    history.on_arrival(10, 1.0)
    assert history.bursts.thresholds._steps_s[8] == pytest.approx(0.02, rel=0.01)


WINDOW_S = 0.5
PROMPT, DECODE = StepFeatures(512, 512, 131_000, 1), StepFeatures(8, 8000, 8000, 8)


FLAT = calibrated_model(lambda features: 0.008 + 20e-6 * max(0, features.new_tokens - 64))


STEEP = calibrated_model(lambda features: 0.0001 + 80e-6 * features.new_tokens)


def after(model: LatencyModel, features: StepFeatures, step_s: float, seconds: float) -> PrefillDemand:
    demand = PrefillDemand(model, WINDOW_S)
    for number in range(int(seconds / step_s)):
        demand.on_step(features, step_s, (number + 1) * step_s)
    return demand


def test_steps_that_only_decode_are_no_demand():
    assert after(STEEP, DECODE, 0.001, 2.0).share(2.0) == 0.0


def test_prompts_count_as_long_as_they_took_where_steps_are_all_compute():
    assert after(STEEP, PROMPT, 0.041, 4.0).share(4.0) == pytest.approx(1.0, abs=0.1)


def test_prompts_count_what_they_add_where_steps_have_fixed_costs():
    assert after(FLAT, PROMPT, 0.017, 4.0).share(4.0) == pytest.approx(0.53, abs=0.1)


def test_demand_is_forgotten_within_a_few_windows():
    demand = after(STEEP, PROMPT, 0.041, 4.0)
    assert demand.share(4.0 + 5 * WINDOW_S) < 0.01


def test_prompts_that_take_most_of_the_time_stop_lending():
    """For a second after they have gone, beside decoding; an idle device is lent."""
    limits = LendingLimits(switch_s=0.0)
    admission = Admission("decode", Budgets(WINDOW_S, 0.15), STEEP, STEEP, limits)
    admission.history.bursts.restore(1e9, (), (), 0.0)
    rollouts = RolloutView(decoding=8, context_tokens=100)

    def view(now_s: float) -> ServingView:
        return ServingView(1, (), (RunningRequest(now_s, 100, now_s - 1, now_s - 0.5, 100),))

    assert admission.decide(view(0.0), rollouts, 0.0).tokens
    for number in range(50):
        admission.demand.on_step(PROMPT, 0.041, 0.041 * (number + 1))
    grant = admission.decide(view(2.1), rollouts, 2.1)
    assert not grant.tokens and "prompts take most" in grant.reason
    assert not admission.decide(view(3.0), rollouts, 3.0).tokens, "the queue may be back in a moment"
    assert admission.decide(ServingView(2), rollouts, 3.0).tokens
    assert admission.decide(view(4.5), rollouts, 4.5).tokens
