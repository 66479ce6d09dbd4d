"""Percentiles and minutes, each against its plain definition."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rose.load.statistics import by_minute, mean, percentile

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


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


def test_statistics_of_no_values_are_nan():
    assert math.isnan(percentile([], 99)) and math.isnan(mean([]))
    assert list(by_minute([])) == []


@given(st.lists(st.floats(0, 1e5), max_size=60))
def test_every_request_is_in_the_minute_it_belongs_to(at_s):
    found = dict(by_minute(at_s))
    assert sorted(place for places in found.values() for place in places) == list(range(len(at_s)))
    assert all(minute * 60 <= at_s[place] < (minute + 1) * 60 for minute, places in found.items() for place in places)
    assert list(found) == sorted(found)
