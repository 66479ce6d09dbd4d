"""Whatever steps a latency model meets, in whatever order, its estimates stay usable and its memory bounded."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rose.core.facts import StepFeatures
from rose.core.latency import (
    BIAS_LOG_MAX,
    CLIP_LOG,
    DRIFT_LOG_MAX,
    DRIFT_RATE_MAX,
    MARGIN_LOG_MAX,
    MARGIN_LOG_MIN,
    REGIONS_MAX,
    STRETCH_MIN,
    LatencyModel,
)

STEPS = st.builds(
    lambda new, context, sequences: StepFeatures(
        new * sequences, (new + context) * sequences, (new * context + new * (new + 1) // 2) * sequences, sequences
    ),
    st.integers(1, 600),
    st.integers(0, 5000),
    st.integers(0, 70),
)
SECONDS = st.floats(1e-6, 100.0) | st.sampled_from([0.0, -1.0, math.inf])
PROBES = [StepFeatures(1, 10, 10, 1), StepFeatures(64, 64_000, 64_000, 64), StepFeatures(512, 2000, 10**6, 1)]


class LatencyHolds(RuleBasedStateMachine):
    """Bad profiles, absurd durations and refits at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LatencyModel()

    @rule(step=STEPS, seconds=SECONDS)
    def observe(self, step: StepFeatures, seconds: float) -> None:
        before, drift_log = self.model.observed, self.model.drift_log
        is_news = step.sequences > 0 and 0 < seconds < math.inf
        self.model.observe(step, seconds)
        assert self.model.observed - before == (is_news and self.model.is_calibrated)
        assert abs(self.model.drift_log - drift_log) <= CLIP_LOG * DRIFT_RATE_MAX + 1e-12, "one step taught too much"

    @rule(step=STEPS, seconds=st.floats(1e-5, 1.0), times=st.integers(2, 60))
    def repeat(self, step: StepFeatures, seconds: float, times: int) -> None:
        for _ in range(times):
            self.observe(step, seconds)

    @rule(profile=st.lists(st.tuples(STEPS, SECONDS), max_size=40))
    def fit(self, profile: list[tuple[StepFeatures, float]]) -> None:
        was_calibrated = self.model.is_calibrated
        assert self.model.fit(profile) <= self.model.is_calibrated
        assert self.model.is_calibrated >= was_calibrated, "a bad profile must not take away a good one"

    @rule()
    def refit(self) -> None:
        assert self.model.refit() <= self.model.is_calibrated

    @invariant()
    def estimates_are_usable(self) -> None:
        for probe in PROBES:
            predicted_s, upper_s = self.model.predict(probe), self.model.upper(probe)
            assert 0 <= predicted_s <= upper_s <= predicted_s * math.exp(MARGIN_LOG_MAX) * (1 + 1e-9)
            assert math.isfinite(upper_s) == self.model.is_calibrated

    @invariant()
    def everything_is_bounded(self) -> None:
        model = self.model
        assert all(0 <= constant < math.inf for constant in model.constants)
        assert abs(model.drift_log) <= DRIFT_LOG_MAX
        assert 0 <= model.missed <= model.observed
        assert len(model._regions) <= REGIONS_MAX
        for found in model._classes.values():
            assert abs(found.bias_log) <= BIAS_LOG_MAX
            assert MARGIN_LOG_MIN * STRETCH_MIN <= found.margin_log <= MARGIN_LOG_MAX
            assert abs(sum(found.counts) - found.total) <= 1e-6 * found.total, "a step was counted twice or not at all"


def test_whatever_a_model_meets_it_stays_usable() -> None:
    run_state_machine_as_test(LatencyHolds)
