"""A run cut into equal bins of time: what the picture draws.

Latencies belong to the bin in which their request should have arrived, tokens to the bin in which they came. A bin is
as wide as it must be for at most `BINS_MAX` of them, and its width is a number people like. Its P99 is often simply
its slowest request; a bin without requests has no latency, which is not the same as a latency of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rose.load.harvest import Harvest
from rose.load.records import Outcome, Record
from rose.load.report import Budget, measure, seen
from rose.load.statistics import percentile
from rose.load.traces import Floats

BINS_MAX = 120  # seven pixels each: narrower ones are noise to the eye
WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
MISSES = (Outcome.REJECTED, Outcome.TIMED_OUT, Outcome.FAILED)


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One value per bin; NaN where there is nothing to show. Rates are per second."""

    bin_s: float
    ttft_p50_s: Floats
    ttft_p99_s: Floats
    tpot_p50_s: Floats
    tpot_p99_s: Floats
    misses: Floats  # requests without their answer
    requests: Floats
    output_tokens: Floats
    harvested_tokens: Floats | None
    judged: int
    attained: int

    @property
    def duration_s(self) -> float:
        return self.bin_s * len(self.requests)


def series_of(records: Sequence[Record], budget: Budget, harvest: Harvest) -> Series:
    """Everything that happened, from second 0 to the last token or arrival."""
    ended = [record for record in records if record.outcome is not None]
    measures = measure(ended, budget)
    stamps = np.concatenate([np.empty(0), *(np.asarray(record.token_s) for record in ended)])
    last_s = max(float(stamps.max(initial=0.0)), float(measures.at_s.max(initial=0.0)))
    bin_s = width_s(last_s)
    bins = math.floor(last_s / bin_s) + 1
    places = (measures.at_s // bin_s).astype(np.int64)
    verdicts = seen(measures.attained)
    is_miss = np.array([record.outcome in MISSES for record in ended], dtype=bool)

    def rate(at_s: Floats) -> Floats:
        return np.bincount((at_s // bin_s).astype(np.int64), minlength=bins) / bin_s

    def tails(values_s: Floats, percent: int) -> Floats:
        return np.array([percentile(seen(values_s[places == place]), percent) for place in range(bins)])

    return Series(
        bin_s=bin_s,
        ttft_p50_s=tails(measures.ttft_s, 50),
        ttft_p99_s=tails(measures.ttft_s, 99),
        tpot_p50_s=tails(measures.tpot_s, 50),
        tpot_p99_s=tails(measures.tpot_s, 99),
        misses=np.bincount(places[is_miss], minlength=bins).astype(np.float64),
        requests=rate(measures.at_s),
        output_tokens=rate(stamps),
        harvested_tokens=_harvested(harvest, bin_s, bins),
        judged=verdicts.size,
        attained=int(verdicts.sum()),
    )


def width_s(duration_s: float) -> float:
    """The narrowest bin of which not too many are needed."""
    return next((float(width) for width in WIDTHS_S if duration_s / width < BINS_MAX), duration_s / (BINS_MAX - 1))


def _harvested(harvest: Harvest, bin_s: float, bins: int) -> Floats | None:
    """Tokens per second between looks, spread evenly; bins before the first look and after the last are NaN."""
    if len(harvest.tokens) < 2:
        return None
    at_s = np.array(harvest.at_s)
    # A counter that fell began again with its process: what it shows then is not known to be new, and counts as none.
    gained = np.concatenate([[0.0], np.cumsum(np.maximum(0.0, np.diff(harvest.tokens)))])
    edges_s = np.arange(bins + 1) * bin_s
    begins_s, ends_s = np.clip(edges_s[:-1], at_s[0], at_s[-1]), np.clip(edges_s[1:], at_s[0], at_s[-1])
    looked_s = ends_s - begins_s
    tokens = np.interp(ends_s, at_s, gained) - np.interp(begins_s, at_s, gained)
    return np.divide(tokens, looked_s, out=np.full(bins, math.nan), where=looked_s > 0)
