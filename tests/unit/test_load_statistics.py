"""Percentiles, minutes and the doubt about a difference, each against its plain definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.load.statistics import aa_spread, by_minute, mean, paired_difference, percentile

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)
verdicts = st.sampled_from([0.0, 1.0, math.nan])


@given(values, st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(found, percent):
    covering = [value for value in found if 100 * sum(other <= value for other in found) >= percent * len(found)]
    assert percentile(found, percent) == min(covering)


@given(values)
def test_percentiles_rise_to_the_largest(found):
    levels = [percentile(found, percent) for percent in (1, 50, 90, 95, 99, 100)]
    assert levels == sorted(levels) and levels[-1] == max(found)


def test_of_a_hundred_values_p99_is_the_second_largest():
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 1001), 99) == 990


def test_of_nothing_nothing_is_known():
    assert math.isnan(percentile([], 99)) and math.isnan(mean([]))
    assert list(by_minute([])) == []
    assert paired_difference([], [], []).pairs == 0


@given(st.lists(st.floats(0, 1e5), max_size=60))
def test_every_request_is_in_the_minute_it_belongs_to(at_s):
    found = dict(by_minute(at_s))
    assert sorted(place for places in found.values() for place in places) == list(range(len(at_s)))
    assert all(minute * 60 <= at_s[place] < (minute + 1) * 60 for minute, places in found.items() for place in places)
    assert list(found) == sorted(found)


@given(st.lists(st.tuples(verdicts, verdicts, st.floats(0, 600)), max_size=60))
def test_a_difference_is_the_mean_over_known_pairs_and_lies_in_its_interval(rows):
    first, second, at_s = ([row[column] for row in rows] for column in range(3))
    known = [row[1] - row[0] for row in rows if not math.isnan(row[0] + row[1])]
    found = paired_difference(first, second, at_s, resamples=200)
    assert found.pairs == len(known)
    if known:
        assert found.mean == pytest.approx(np.mean(known))
    if found.minutes > 1:
        assert -1 <= found.low <= found.high <= 1
        turned = paired_difference(second, first, at_s, resamples=200)
        assert (turned.mean, turned.low, turned.high) == pytest.approx((-found.mean, -found.high, -found.low))


@given(st.lists(verdicts, min_size=1, max_size=60))
def test_two_equal_runs_have_no_spread(run):
    assert aa_spread(run, run, list(range(0, 10 * len(run), 10))) in (0.0, pytest.approx(math.nan, nan_ok=True))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Two runs of one thing, 40 minutes of 50 requests at 97 %: they differ by 0, which 95 % of intervals hold."""
    rng = np.random.default_rng(7)
    at_s = np.arange(2000) * 1.2
    runs = [paired_difference(*rng.binomial(1, 0.97, (2, 2000)), at_s, resamples=400) for _ in range(200)]
    assert 0.90 <= np.mean([run.low <= 0 <= run.high for run in runs]) <= 0.99


def test_minutes_that_stand_or_fall_together_widen_the_interval():
    """Half the minutes lose everything: 20 witnesses, not 2000."""
    at_s = np.arange(2000) * 0.6
    alone, together = np.ones(2000), (at_s // 60 % 2).astype(np.float64)
    scattered = np.tile([0.0, 1.0], 1000)
    assert aa_spread(alone, together, at_s) == pytest.approx(1.96 * 0.5 / math.sqrt(20), rel=0.1)
    assert aa_spread(alone, scattered, at_s) < 0.001


def test_one_minute_alone_leaves_the_spread_unknown():
    assert math.isnan(aa_spread([1, 0, 1], [1, 1, 1], [0, 20, 40]))
    assert paired_difference([1, 0], [1, 1], [0, 20]).mean == 0.5


def test_a_seed_says_everything():
    at_s, second = np.arange(600.0), np.tile([1.0, 0.0, 1.0], 200)
    found = [paired_difference(np.ones(600), second, at_s, seed=seed) for seed in (1, 1)]
    assert found[0] == found[1]
