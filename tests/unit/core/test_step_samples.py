"""Samples of steps: the newest of every shape, and a uniform draw from all."""

from __future__ import annotations

import pytest

from rose.core.facts import StepFeatures
from rose.core.latency import REGIONS_MAX
from rose.core.step_samples import DRAWN_MAX, NEWEST_PER_REGION, StepSamples


def decode(sequences: int, context: int = 100) -> StepFeatures:
    return StepFeatures(sequences, sequences * context, sequences * context, sequences)


def test_rare_shapes_are_kept_beside_frequent_ones() -> None:
    samples = StepSamples()
    samples.add(StepFeatures(512, 512, 131_328, 1), 0.5)
    for number in range(5000):
        samples.add(decode(1), 0.001 + number * 1e-6)
    assert samples.seen == 5001 and len(samples.drawn) == DRAWN_MAX
    assert len(samples.shapes) == 1 + NEWEST_PER_REGION
    assert samples.shapes[-1] == (decode(1), pytest.approx(0.001 + 4999e-6)), "the newest"


def test_the_draw_is_uniform_over_all_steps() -> None:
    samples = StepSamples()
    for number in range(10 * DRAWN_MAX):
        samples.add(decode(1), 1.0 + number)
    mean = sum(seconds for _, seconds in samples.drawn) / DRAWN_MAX
    assert mean == pytest.approx(5 * DRAWN_MAX, rel=0.05)


def test_steps_of_a_start_up_profile_are_shapes_and_no_work() -> None:
    samples = StepSamples()
    assert samples.add_shape(decode(4), 0.002) and samples.seen == 0 and samples.drawn == []
    assert len(samples.shapes) == 1


@pytest.mark.parametrize("features, seconds", [(StepFeatures(), 0.1), (decode(1), 0.0)])
def test_a_step_of_nothing_is_not_kept(features: StepFeatures, seconds: float) -> None:
    samples = StepSamples()
    samples.add(features, seconds)
    assert (samples.seen, samples.shapes, samples.drawn) == (0, [], [])


def test_the_number_of_shapes_is_bounded() -> None:
    samples = StepSamples()
    for sequences in range(1, 40):
        for context in range(12):
            samples.add(StepFeatures(sequences, 0, sequences * 4**context, sequences), 0.001)
    assert len(samples.shapes) <= REGIONS_MAX * NEWEST_PER_REGION
