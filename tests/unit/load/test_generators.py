"""Generators: one seed, one traffic; a longer run begins with the shorter; the shapes are as said."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.load.generators import GENERATORS, PROMPT_P99, generated, parse_spec
from rose.load.statistics import mean, percentile

SPECS = ["poisson:rate=5", "gamma:rate=5,cv=3", "spikes:rate=2,factor=6,every_s=20,for_s=5", "day:rate=5,day_s=100"]
seeds = st.integers(0, 2**32)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SPECS), seeds, st.floats(20, 200), st.floats(1, 4))
def test_a_longer_run_begins_with_the_shorter(spec, seed, duration_s, factor):
    short = generated(spec, seed=seed, duration_s=duration_s)
    long = generated(spec, seed=seed, duration_s=duration_s * factor)
    count = len(short)
    assert np.array_equal(long.arrival_s[:count], short.arrival_s)
    assert np.array_equal(long.prompt_tokens[:count], short.prompt_tokens)
    assert np.array_equal(long.output_tokens[:count], short.output_tokens)
    assert count == len(long) or long.arrival_s[count] >= duration_s


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([generator.example for generator in GENERATORS.values()]), seeds, st.integers(1, 400))
def test_the_number_of_requests_is_as_asked(spec, seed, requests):
    trace = generated(spec, seed=seed, requests=requests)
    assert len(trace) == requests
    assert trace.arrival_s[0] >= 0


def test_another_seed_makes_other_traffic():
    first, second = (generated("poisson:rate=5", seed=seed) for seed in (1, 2))
    assert not np.array_equal(first.arrival_s[:10], second.arrival_s[:10])


@pytest.mark.parametrize(
    "spec, cv", [("poisson:rate=5", 1.0), ("gamma:rate=5,cv=3", 3.0), ("gamma:rate=5,cv=0.5", 0.5)]
)
def test_rate_and_deviation_of_gaps_are_as_set(spec, cv):
    gaps = np.diff(generated(spec, seed=3, duration_s=10_000).arrival_s)
    assert mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert np.std(gaps) / mean(gaps) == pytest.approx(cv, rel=0.05)


def test_spikes_raise_the_load_for_a_while_in_every_period():
    counts = np.zeros(6)
    trace = generated("spikes:rate=10,factor=8,every_s=60,for_s=10", seed=5, duration_s=360)
    for number in range(6):
        inside = trace.arrival_s[(trace.arrival_s >= 60 * number) & (trace.arrival_s < 60 * number + 60)]
        per_second = np.bincount((inside - 60 * number).astype(int), minlength=60)
        spike = per_second > 40
        counts[number] = spike.sum()
        assert mean(per_second[~spike]) < 20
    assert counts.min() >= 8 and counts.max() <= 11


def test_a_day_is_quiet_at_its_start_and_busy_in_its_middle():
    trace = generated("day:rate=20,swing=8", seed=1, duration_s=2000)
    per_tenth = np.bincount((trace.arrival_s // 200).astype(int), minlength=10)
    assert len(trace) / 2000 == pytest.approx(20, rel=0.05)
    assert per_tenth[4:6].mean() / per_tenth[[0, 9]].mean() == pytest.approx(8, rel=0.25)


def test_lengths_are_shaped_like_the_published_statistics():
    trace = generated("poisson:rate=100", seed=0, duration_s=1000)
    prompt, output = trace.prompt_tokens, trace.output_tokens
    assert [mean(prompt), percentile(prompt, 50), percentile(prompt, 99)] == pytest.approx([1155, 1020, 4142], rel=0.06)
    assert [mean(output), percentile(output, 50), percentile(output, 99)] == pytest.approx([211, 129, 601], rel=0.17)
    assert (prompt.max() <= 14050, output.max() <= 1000) == (True, True)
    assert percentile(prompt, 99) == pytest.approx(PROMPT_P99, rel=0.02)


def test_a_short_run_is_scaled_as_a_long_one_is():
    assert generated("poisson:rate=1", seed=1, requests=2).prompt_p99_tokens == PROMPT_P99


@pytest.mark.parametrize(
    "spec, what, hint",
    [
        ("poison:rate=2", "no generator `poison`", "did you mean `poisson:rate=2`?"),
        ("xyzzy", "no generator `xyzzy`", "give a trace file or one of"),
        ("poisson", "needs rate", "poisson:rate=2"),
        ("poisson:rte=2", "no setting `rte`", "did you mean `rate`?"),
        ("poisson:zzz=2", "no setting `zzz`", "it has rate"),
        ("poisson:rate=fast", "not a number above 0: `fast`", None),
        ("poisson:rate=0", "not a number above 0: `0`", None),
        ("poisson:rate=inf", "not a number above 0: `inf`", None),
        ("poisson:rate=1e9", "requests or more", "stay below"),
        ("gamma:rate=1,cv=1e9", "requests or more", "stay below"),
        ("spikes:rate=1,for_s=90", "does not fit into 60 s", "lower for_s"),
        ("spikes:rate=1,every_s=1e-9,for_s=1e-9", "requests or more", "stay below"),
    ],
)
def test_a_wrong_spec_is_refused(spec, what, hint):
    with pytest.raises(ConfigError) as told:
        generated(spec)
    assert what in told.value.what
    assert hint is None or hint in (told.value.hint or "")


def test_no_traffic_at_all_is_refused():
    with pytest.raises(ConfigError, match="makes no request in 1 s"):
        generated("poisson:rate=1e-6", duration_s=1)


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
def test_every_example_can_be_generated(generator):
    found, values = parse_spec(generator.example)
    assert found is generator
    assert not any(math.isnan(value) for value in values.values())
