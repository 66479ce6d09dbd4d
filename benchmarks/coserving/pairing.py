"""How two runs of the same requests differ, with an interval.

Requests of one minute share its weather, so the interval of a difference is found by drawing whole minutes again (a
block bootstrap), never single requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rose.load.statistics import by_minute, mean

RESAMPLES = 10_000  # the ends of a 95 % interval then move by about one hundredth of its width from seed to seed
INTERVAL_PERCENT = 95


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The second less the first, paired per request, with a 95 % interval over one-minute blocks (NaN if under two)."""

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
) -> PairedDifference:
    """Compare two runs of the same requests, arriving `at_s`. Pairs with a NaN are left out."""
    gaps = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    known = ~np.isnan(gaps)
    gaps, known_at_s = gaps[known], np.asarray(at_s, dtype=np.float64)[known]
    blocks = [gaps[positions] for _, positions in by_minute(known_at_s)]
    if len(blocks) < 2:  # one minute says nothing about how minutes differ
        return PairedDifference(mean(gaps), float("nan"), float("nan"), gaps.size, len(blocks))
    sums, counts = np.array([block.sum() for block in blocks]), np.array([block.size for block in blocks])
    drawn = np.random.default_rng(seed).integers(len(blocks), size=(resamples, len(blocks)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    edge = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(means, [edge, 100 - edge])
    return PairedDifference(float(gaps.mean()), float(low), float(high), gaps.size, len(blocks))
