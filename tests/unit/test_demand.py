"""Work, not time: what serving has to do as a share of what it could."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.demand import Demand
from rose.core.facts import StepFeatures
from rose.core.latency import LatencyModel

WINDOW_S = 0.5
SEQUENCES = 64
MODEL = LatencyModel((0.001, 0.0001, 0.0, 0.0, 0.00005))
PROMPT = StepFeatures(500, 500, 125_000, 1)


def decode(sequences: int) -> StepFeatures:
    return StepFeatures(sequences, 0, 0, sequences)


def level_after(features: StepFeatures, seconds: float, span_s: float = 10.0) -> float:
    """One such step after the other, for so long."""
    demand, now_s = Demand(MODEL, SEQUENCES, WINDOW_S), 0.0
    while now_s < span_s:
        now_s += seconds
        demand.served(features, seconds, now_s)
    return demand.level_s(0.0, now_s) / WINDOW_S


def test_prompts_without_a_pause_are_all_that_can_be_done():
    assert level_after(PROMPT, 0.05) == pytest.approx(1.0, rel=0.06)


def test_one_that_decodes_keeps_a_device_busy_and_is_little_work():
    one, full = decode(1), decode(SEQUENCES)
    assert level_after(one, MODEL.predict(one)) < 0.25
    assert level_after(full, MODEL.predict(full)) == pytest.approx(1.0, rel=0.06)


def test_what_waits_is_work_and_what_was_is_forgotten():
    demand = Demand(MODEL, SEQUENCES, WINDOW_S)
    assert demand.level_s(0.2, 0.0) == 0.2
    demand.served(PROMPT, 0.1, 1.0)
    assert demand.level_s(0.2, 1.0) == pytest.approx(0.3)
    assert demand.level_s(0.0, 1.0 + 10 * WINDOW_S) < 1e-5


def test_without_a_model_a_step_is_as_much_as_it_took():
    demand = Demand(LatencyModel(), SEQUENCES, WINDOW_S)
    demand.served(decode(1), 0.01, 0.0)
    assert demand.level_s(0.0, 0.0) == 0.01


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-5, 1.0), st.floats(-0.5, 2.0)), max_size=30))
def test_it_is_never_more_than_the_time_of_the_steps_even_if_a_clock_jumps_back(steps):
    demand, now_s, total_s = Demand(MODEL, SEQUENCES, WINDOW_S), 0.0, 0.0
    for sequences, seconds, pause_s in steps:
        now_s += pause_s
        total_s += seconds
        demand.served(decode(sequences), seconds, now_s)
        assert 0 <= demand.level_s(0.0, now_s) <= total_s * (1 + 1e-9)
