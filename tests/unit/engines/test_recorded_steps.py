"""The step profile of recorded steps: it finds the constants again, and has the spread of the machine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from rose.core.facts import StepFeatures
from rose.core.step_samples import StepSamples
from rose.engines.profiles import SPREAD_PLACES, StepSpread, load_profile, noise_of, write_profile
from rose.engines.recorded_steps import RecordedSide, RecordedSteps, profile_of, rows_of, spread_of
from rose.errors import ConfigError
from rose.sim.models import SHAPES

TRUE = load_profile("cpu")


def recorded(stalls: float = 0.0, noise: float = 0.02, steps: int = 4000) -> RecordedSide:
    chance, samples = random.Random(0), StepSamples()
    for _ in range(steps):
        features = chance.choice(SHAPES)
        factor = 8.0 if chance.random() < stalls else chance.lognormvariate(0, noise)
        samples.add(features, TRUE.step_s(features) * factor)
    return RecordedSide(
        "serving", samples.seen, rows_of(samples.shapes), rows_of(samples.drawn), 512, 1 << 20, 16, 4096
    )


def test_the_profile_predicts_the_steps_that_it_was_fitted_to() -> None:
    profile = profile_of(recorded(), "mine", "a made-up engine")
    for features in SHAPES:
        assert profile.step_s(features) == pytest.approx(TRUE.step_s(features), rel=0.08), features
    assert "4,000 live steps of a made-up engine" in profile.source["measured"]


def test_stalls_are_in_the_spread_and_not_in_the_constants() -> None:
    calm, stalled = (profile_of(recorded(stalls), "mine", "it") for stalls in (0.0, 0.03))
    step = StepFeatures(4, 400, 400, 4)
    assert stalled.step_s(step) == pytest.approx(calm.step_s(step), rel=0.05)
    assert max(one.ratios[-1] for one in calm.spread) < 1.4
    assert max(one.ratios[-1] for one in stalled.spread) == pytest.approx(8.0, rel=0.2)
    chance = random.Random(1)
    drawn = [noise_of(stalled, TRUE.step_s(step), chance, 0.0) for _ in range(20_000)]
    assert 1.05 < fmean(drawn) < 1.6, "about one in thirty-three takes eight times as long"


def test_short_steps_scatter_in_their_own_class() -> None:
    steps = [(0.001, 0.001 * (1 + n % 5)) for n in range(200)] + [(0.1, 0.1 + 0.001 * (n % 5)) for n in range(200)]
    short, long = spread_of([*steps, (0.5, 0.5)])
    assert (short.from_s, long.from_s) == (0.001, 0.1)
    assert short.ratios[-1] == 5.0 and long.ratios[-1] == pytest.approx(1.04)
    profile = replace(TRUE, spread=(short, long))
    chance = random.Random(0)
    assert max(noise_of(profile, 0.2, chance, 0.0) for _ in range(100)) < 1.05
    assert max(noise_of(profile, 0.0001, chance, 0.0) for _ in range(100)) > 3


@pytest.mark.parametrize("counts, classes", [((10, 60), 1), ((60, 10), 1), ((60, 60), 2), ((10, 10), 1)])
def test_a_class_with_few_steps_joins_another(counts: tuple[int, int], classes: int) -> None:
    steps = [(0.001, 0.001)] * counts[0] + [(0.1, 0.1)] * counts[1]
    spread = spread_of(steps)
    assert len(spread) == classes and spread[0].from_s == 0.001


def test_a_profile_with_a_spread_is_read_again(tmp_path: Path) -> None:
    profile = profile_of(recorded(), "mine", "it")
    write_profile(profile, tmp_path / "mine.json")
    assert load_profile(tmp_path / "mine.json") == profile


def test_without_a_spread_noise_is_log_normal() -> None:
    assert noise_of(TRUE, 0.01, random.Random(3), 0.1) == random.Random(3).lognormvariate(0, 0.1)


ONES = (1.0,) * len(SPREAD_PLACES)


@pytest.mark.parametrize(
    "spread",
    [
        (StepSpread(0.0, (1.0,)),),
        (StepSpread(0.0, (2.0, *ONES[1:])),),
        (StepSpread(0.1, ONES), StepSpread(0.0, ONES)),
    ],
)
def test_a_wrong_spread_is_refused(spread: tuple[StepSpread, ...]) -> None:
    with pytest.raises(ConfigError, match="spread is not in order"):
        replace(TRUE, spread=spread)


def test_too_few_steps_make_no_profile() -> None:
    with pytest.raises(ConfigError, match="too few for a profile"):
        profile_of(recorded(steps=100), "mine", "it")


def test_the_steps_travel() -> None:
    both = RecordedSteps(recorded(), recorded(steps=300))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(both), type=RecordedSteps) == both
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(both)), RecordedSteps) == both
