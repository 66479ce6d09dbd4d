"""The difference between two runs, and its interval, against plain definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.coserving.pairing import paired_difference
from hypothesis import given
from hypothesis import strategies as st

verdicts = st.sampled_from([0.0, 1.0, math.nan])


def test_nothing_has_no_pairs():
    assert paired_difference([], [], []).pairs == 0


@given(st.lists(st.tuples(verdicts, verdicts, st.floats(0, 600)), max_size=60))
def test_a_difference_is_the_mean_of_known_pairs_inside_its_interval(rows):
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
    assert paired_difference(run, run, list(range(0, 10 * len(run), 10))).half_width in (
        0.0,
        pytest.approx(math.nan, nan_ok=True),
    )


def test_95_percent_of_intervals_hold_the_true_difference():
    """Two runs of one thing, 40 minutes of 50 requests at 97 %: they differ by 0, which 95 % of intervals hold."""
    rng = np.random.default_rng(7)
    at_s = np.arange(2000) * 1.2
    runs = [paired_difference(*rng.binomial(1, 0.97, (2, 2000)), at_s, resamples=400) for _ in range(200)]
    assert 0.90 <= np.mean([run.low <= 0 <= run.high for run in runs]) <= 0.99


def test_minutes_that_vary_together_widen_the_interval():
    """Half the minutes lose everything: 20 independent observations, not 2000."""
    at_s = np.arange(2000) * 0.6
    alone, together = np.ones(2000), (at_s // 60 % 2).astype(np.float64)
    scattered = np.tile([0.0, 1.0], 1000)
    assert paired_difference(alone, together, at_s).half_width == pytest.approx(1.96 * 0.5 / math.sqrt(20), rel=0.1)
    assert paired_difference(alone, scattered, at_s).half_width < 0.001


def test_one_minute_alone_has_no_interval():
    assert math.isnan(paired_difference([1, 0, 1], [1, 1, 1], [0, 20, 40]).half_width)
    assert paired_difference([1, 0], [1, 1], [0, 20]).mean == 0.5


def test_the_same_seed_gives_the_same_interval():
    at_s, second = np.arange(600.0), np.tile([1.0, 0.0, 1.0], 200)
    found = [paired_difference(np.ones(600), second, at_s, seed=seed) for seed in (1, 1)]
    assert found[0] == found[1]
