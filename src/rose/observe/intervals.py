"""95 % intervals for what is reported: shares, differences of shares, and percentiles.

A share has Wilson's score interval, which is meaningful at 100 % too: 1,000 of 1,000 is at least 99.6 %. A difference
of two shares has Newcombe's, made of theirs. A percentile's interval is between two order statistics, whatever the
distribution; where too few values were seen, an end is unknown. All of them take observations as independent, and
requests that queue behind one another are not quite that: read them as the least uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Z = 1.959964  # of the normal distribution, for 95 % on two sides


class Interval(NamedTuple):
    """The two ends of an interval; None where too little was observed to say."""

    low: float | None
    high: float | None


def share_interval(successes: int, count: int) -> tuple[float, float]:
    """Return Wilson's interval of a share; all of [0, 1] for nothing."""
    assert 0 <= successes <= count
    if count == 0:
        return 0.0, 1.0
    share, square = successes / count, Z * Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = Z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == count else min(1.0, middle + half)
    return low, high


def share_text(successes: int, count: int, what: str) -> str:
    """Return a share for people, with its interval: `1,000 of 1,000 requests (>= 99.6 % at 95 % confidence)`."""
    low, high = (end * 100 for end in share_interval(successes, count))
    whole = f"{successes:,} of {count:,} {what}"
    if count == 0:
        return whole
    if successes == count:
        return f"{whole} (>= {_rounded_down(low):.1f} % at 95 % confidence)"
    return f"{whole} ({_rounded_down(low):.1f} to {high:.1f} % at 95 % confidence)"


def _rounded_down(percent: float) -> float:
    return math.floor(percent * 10) / 10


def difference_interval(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, float, float]:
    """Return the first share less the second, and Newcombe's interval of it. Arguments are (successes, count)."""
    shares = [successes / count if count else 0.0 for successes, count in (first, second)]
    (low_1, high_1), (low_2, high_2) = share_interval(*first), share_interval(*second)
    difference = shares[0] - shares[1]
    below = math.hypot(shares[0] - low_1, high_2 - shares[1])
    above = math.hypot(high_1 - shares[0], shares[1] - low_2)
    return difference, max(-1.0, difference - below), min(1.0, difference + above)


def percentile_interval(values: Sequence[float], percent: int) -> Interval:
    """Return the interval of a percentile, from the binomial distribution of its rank in the normal approximation."""
    ordered, count, share = sorted(values), len(values), percent / 100
    half = Z * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - half), math.ceil(count * share + half) + 1  # ranks from 1
    return Interval(ordered[low - 1] if low >= 1 else None, ordered[high - 1] if high <= count else None)
