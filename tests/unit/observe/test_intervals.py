"""Intervals are those of the text books, and never claim more than was observed."""

from __future__ import annotations

import random

import pytest

from rose.observe.intervals import difference_interval, percentile_interval, share_interval, share_text


@pytest.mark.parametrize(
    "successes, count, low, high",
    [
        (1000, 1000, 0.9962, 1.0),
        (0, 1000, 0.0, 0.0038),
        (990, 1000, 0.9817, 0.9946),
        (1, 2, 0.0945, 0.9055),
        (0, 0, 0, 1),
    ],
)
def test_share_interval_is_wilsons(successes, count, low, high):
    assert share_interval(successes, count) == pytest.approx((low, high), abs=5e-5)


def test_difference_interval_is_newcombes():
    """Newcombe 1998, table II, example (a): 56/70 less 48/80, method 10."""
    assert difference_interval((56, 70), (48, 80)) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_difference_of_equal_shares_has_zero_inside():
    difference, low, high = difference_interval((20, 20), (20, 20))
    assert difference == 0 and low < 0 < high and low == -high


@pytest.mark.parametrize("percent", [50, 95, 99])
def test_percentile_interval_covers_the_true_value_nineteen_times_of_twenty(percent):
    chance, hits = random.Random(percent), 0
    for _ in range(400):
        low, high = percentile_interval([chance.random() for _ in range(2000)], percent)
        hits += (low is None or low <= percent / 100) and (high is None or percent / 100 <= high)
    assert 0.92 <= hits / 400 <= 0.99


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_the_upper_end_of_a_tail_is_unknown_with_few_values(count):
    values = [float(value) for value in range(count)]
    assert percentile_interval(values, 99).high is None


def test_percentile_interval_does_not_depend_on_the_order():
    values = [5.0, 1.0, 4.0, 2.0, 3.0] * 20
    assert percentile_interval(values, 50) == percentile_interval(sorted(values), 50)


@pytest.mark.parametrize(
    "successes, count, text",
    [
        (1000, 1000, "1,000 of 1,000 requests (>= 99.6 % at 95 % confidence)"),
        (28, 28, "28 of 28 requests (>= 87.9 % at 95 % confidence)"),
        (297, 300, "297 of 300 requests (97.1 to 99.7 % at 95 % confidence)"),
        (0, 0, "0 of 0 requests"),
    ],
)
def test_a_share_for_people_has_its_count_and_its_interval(successes, count, text):
    assert share_text(successes, count, "requests") == text
