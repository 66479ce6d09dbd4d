"""The few statistics of a report, each with one definition.

A percentile is by nearest rank: the smallest value that at least so many per cent do not exceed. It is a value that
was really seen, and "P99 within budget" means exactly that 99 in 100 were.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

MINUTE_S = 60.0


def percentile(values: npt.ArrayLike, percent: int) -> float:
    """Return the percentile by nearest rank; NaN of nothing."""
    known = np.asarray(values)
    if not known.size:
        return float("nan")
    assert 0 < percent <= 100
    rank = -(-known.size * percent // 100)
    return float(np.partition(known, rank - 1)[rank - 1])


def mean(values: npt.ArrayLike) -> float:
    """Return the mean; NaN of nothing, without a warning."""
    known = np.asarray(values)
    return float(known.mean()) if known.size else float("nan")


def by_minute(at_s: npt.ArrayLike) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield (minute, positions) of every minute that has any, in order."""
    minutes = (np.asarray(at_s) // MINUTE_S).astype(np.int64)
    order = np.argsort(minutes, kind="stable")
    starts = np.flatnonzero(np.diff(minutes[order], prepend=np.iinfo(np.int64).min))
    for positions in np.split(order, starts[1:]) if order.size else []:
        yield int(minutes[positions[0]]), positions
