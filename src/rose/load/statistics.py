"""The few statistics of a report, each with one definition.

A percentile is by nearest rank: the smallest value that at least so many per cent do not exceed. It is a value that
was really seen, and "P99 within budget" means exactly that 99 in 100 were. Requests of one minute share its weather,
so the doubt about a difference is found by drawing whole minutes again (a block bootstrap), never single requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MINUTE_S = 60.0
RESAMPLES = 10_000  # the ends of a 95 % interval then move by about one hundredth of its width from seed to seed
INTERVAL_PERCENT = 95


def percentile(values: npt.ArrayLike, percent: int) -> float:
    """By nearest rank; NaN of nothing."""
    found = np.asarray(values)
    if not found.size:
        return float("nan")
    assert 0 < percent <= 100
    rank = -(-found.size * percent // 100)
    return float(np.partition(found, rank - 1)[rank - 1])


def mean(values: npt.ArrayLike) -> float:
    """NaN of nothing, without a warning."""
    found = np.asarray(values)
    return float(found.mean()) if found.size else float("nan")


def by_minute(at_s: npt.ArrayLike) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """(minute, positions) of every minute that has any, in order."""
    minutes = (np.asarray(at_s) // MINUTE_S).astype(np.int64)
    order = np.argsort(minutes, kind="stable")
    starts = np.flatnonzero(np.diff(minutes[order], prepend=np.iinfo(np.int64).min))
    for positions in np.split(order, starts[1:]) if order.size else []:
        yield int(minutes[positions[0]]), positions


@dataclass(frozen=True, slots=True)
class Difference:
    """Second less first, paired per request, with its 95 % interval over one-minute blocks (NaN if under two)."""

    mean: float
    low: float
    high: float
    pairs: int
    minutes: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def paired_difference(
    first: Sequence[float] | npt.NDArray[np.float64],
    second: Sequence[float] | npt.NDArray[np.float64],
    at_s: Sequence[float] | npt.NDArray[np.float64],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Difference:
    """Of two runs of the same requests, arriving `at_s`. Pairs of which one is not known (NaN) are left out."""
    gaps = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    known = ~np.isnan(gaps)
    gaps, known_at_s = gaps[known], np.asarray(at_s, dtype=np.float64)[known]
    blocks = [gaps[positions] for _, positions in by_minute(known_at_s)]
    if len(blocks) < 2:  # one minute says nothing about how minutes differ
        return Difference(mean(gaps), float("nan"), float("nan"), gaps.size, len(blocks))
    sums, counts = np.array([block.sum() for block in blocks]), np.array([block.size for block in blocks])
    drawn = np.random.default_rng(seed).integers(len(blocks), size=(resamples, len(blocks)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    edge = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(means, [edge, 100 - edge])
    return Difference(float(gaps.mean()), float(low), float(high), gaps.size, len(blocks))


def aa_spread(
    first: Sequence[float] | npt.NDArray[np.float64],
    second: Sequence[float] | npt.NDArray[np.float64],
    at_s: Sequence[float] | npt.NDArray[np.float64],
    *,
    seed: int = 0,
) -> float:
    """How far apart two runs of the same thing are by chance: the half-width of the interval of their difference.

    For attainment: give 1 for a request that attained, 0 for a miss, NaN for one that is not known. Runs of under two
    minutes have no spread that could be known: NaN.
    """
    return paired_difference(first, second, at_s, seed=seed).half_width
