"""Computes the figures of a run from its records. Every term has one meaning:

TTFT is from the *scheduled* arrival to the first token; TPOT is a request's mean gap after it; ITL is every gap.
A request *attains* when TTFT and TPOT are both in budget (an answer of one token has no TPOT). Rejected, timed out and
failed ones are misses. A request under way when the run was stopped is left out, unless its first token was late.
A request belongs to the minute in which it should have arrived. A *violation minute* is one in which fewer than 99 %
of the requests attained. The P99 of one minute is often simply its slowest request.

Percentiles are over what was answered. A time-out counts with the time it waited, which is less than what the answer
would have taken: a server that hangs must not look better than a slow one. Under 1,000 requests there is no P99, since
it would hang on fewer than ten of them; P95 is given instead, and `tail` says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rose.load.driver import Record, RequestOutcome
from rose.load.statistics import by_minute, mean, percentile
from rose.load.traces import Floats

P99_REQUESTS_MIN = 1000
MINUTE_ATTAINMENT = 0.99
PERCENTS = (50, 90, 95, 99)
UNKNOWN = math.nan


@dataclass(frozen=True, slots=True)
class LatencyBudget:
    """The latencies that serving promises its users."""

    ttft_s: float = 0.5
    tpot_s: float = 0.15


@dataclass(frozen=True, slots=True, eq=False)
class Measures:
    """One row per request, in order of arrival; NaN where there is nothing to measure. `gap_s` is one per gap."""

    at_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    attained: Floats  # 1, 0 or NaN
    gap_s: Floats

    @property
    def tail_percent(self) -> int:
        return tail_percent(seen(self.attained).size)


def measure(records: Sequence[Record], budget: LatencyBudget) -> Measures:
    """Return the measures of the records that have ended, in whatever way."""
    ended = _ended(records)
    rows = np.array([(record.scheduled_s, *judged(record, budget)) for record in ended], dtype=np.float64)
    at_s, ttft_s, tpot_s, attained = rows.reshape(-1, 4).T
    gap_s = _gaps_s([ended[place] for place in np.flatnonzero(~np.isnan(attained))])
    return Measures(at_s, ttft_s, tpot_s, attained, gap_s)


def judged(record: Record, budget: LatencyBudget) -> tuple[float, float, float]:
    """Return TTFT and TPOT in seconds, and 1 if the request attained, 0 if it missed; NaN if not measured."""
    ttft_s = tpot_s = UNKNOWN
    if record.token_s:
        ttft_s = record.token_s[0] - record.scheduled_s
    elif record.outcome is RequestOutcome.TIMED_OUT:
        ttft_s = record.ended_s - record.scheduled_s
    if record.outcome is RequestOutcome.DONE and record.tokens > 1:
        tpot_s = (record.token_s[-1] - record.token_s[0]) / (record.tokens - 1)
    elif record.outcome is RequestOutcome.TIMED_OUT and record.token_s:
        tpot_s = (record.ended_s - record.token_s[0]) / record.tokens

    if record.outcome is RequestOutcome.DONE:
        return ttft_s, tpot_s, float(ttft_s <= budget.ttft_s and not tpot_s > budget.tpot_s)
    if record.outcome is RequestOutcome.CUT:
        waited_s = record.ended_s - record.scheduled_s if math.isnan(ttft_s) else ttft_s
        if waited_s <= budget.ttft_s:
            return UNKNOWN, UNKNOWN, UNKNOWN
    return ttft_s, tpot_s, 0.0


def tail_percent(requests: int) -> int:
    """Return the percentile that so many requests can support."""
    return 99 if requests >= P99_REQUESTS_MIN else 95


def report_of(records: Sequence[Record], budget: LatencyBudget, duration_s: float) -> dict[str, Any]:
    """Return the figures of one run under flat keys; None for what was not measured."""
    measures = measure(records, budget)
    minutes = per_minute(records, measures)
    tail = measures.tail_percent
    return {
        "duration_s": round(duration_s, 3),
        **_counts(records, measures),
        "tail": f"p{tail}",
        "p99_missing_because": None if tail == 99 else f"P99 needs {P99_REQUESTS_MIN} requests",
        **_percentiles("ttft", measures.ttft_s, tail),
        **_percentiles("tpot", measures.tpot_s, tail),
        **_percentiles("itl", measures.gap_s, tail),
        "worst_minute_ttft_p99_ms": _worst(minutes, "ttft_p99_ms"),
        "worst_minute_tpot_p99_ms": _worst(minutes, "tpot_p99_ms"),
        "worst_minute_itl_p99_ms": _worst(minutes, "itl_p99_ms"),
        "budget_used_ttft": _known(percentile(seen(measures.ttft_s), tail) / budget.ttft_s, 4),
        "budget_used_tpot": _known(percentile(seen(measures.tpot_s), tail) / budget.tpot_s, 4),
        "minutes": len(minutes),
        "violation_minutes": sum(minute["is_violation"] for minute in minutes),
        **_throughput(records, duration_s),
        **_lateness(records),
        "per_minute": minutes,
    }


def per_minute(records: Sequence[Record], measures: Measures) -> list[dict[str, Any]]:
    """Return one row for every minute in which a judged request should have arrived."""
    ended = _ended(records)
    rows = []
    for minute, places in by_minute(measures.at_s):
        judged_places = places[~np.isnan(measures.attained[places])]
        verdicts = measures.attained[judged_places]
        if not verdicts.size:
            continue
        rows.append(
            {
                "minute": minute,
                "requests": int(verdicts.size),
                "attainment": round(mean(verdicts), 6),
                "is_violation": bool(mean(verdicts) < MINUTE_ATTAINMENT),
                "ttft_p99_ms": _ms(percentile(seen(measures.ttft_s[places]), 99)),
                "tpot_p99_ms": _ms(percentile(seen(measures.tpot_s[places]), 99)),
                "itl_p99_ms": _ms(percentile(_gaps_s([ended[place] for place in judged_places]), 99)),
                "prompt_tokens": sum(ended[place].prompt_tokens for place in places),
                "output_tokens": sum(ended[place].tokens for place in places),
            }
        )
    return rows


def request_columns(records: Sequence[Record], measures: Measures) -> dict[str, list[Any]]:
    """Return everything per request: what a paired comparison with another run needs."""
    ended = _ended(records)
    return {
        "index": [record.index for record in ended],
        "scheduled_s": [round(record.scheduled_s, 6) for record in ended],
        "outcome": [str(record.outcome) for record in ended],
        "prompt_tokens": [record.prompt_tokens for record in ended],
        "output_tokens": [record.tokens for record in ended],
        "ttft_ms": [_ms(value) for value in measures.ttft_s.tolist()],
        "tpot_ms": [_ms(value) for value in measures.tpot_s.tolist()],
        "attained": [None if math.isnan(value) else int(value) for value in measures.attained.tolist()],
    }


def _ended(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.outcome is not None]


def _gaps_s(records: Sequence[Record]) -> Floats:
    """Return the gaps between tokens; a time-out's last gap ends with the time-out."""
    gaps = [np.empty(0)]
    for record in records:
        stamps = list(record.token_s)
        if stamps and record.outcome is RequestOutcome.TIMED_OUT:
            stamps.append(record.ended_s)
        gaps.append(np.diff(np.array(stamps, dtype=np.float64)))
    return np.concatenate(gaps)


def _counts(records: Sequence[Record], measures: Measures) -> dict[str, Any]:
    outcomes = Counter(record.outcome for record in records)
    verdicts = seen(measures.attained)
    failures = Counter(record.detail for record in records if record.outcome is RequestOutcome.FAILED)
    return {
        "requests": int(verdicts.size),
        "attained": int(verdicts.sum()),
        "attainment": _known(mean(verdicts), 6),
        **{str(outcome): outcomes[outcome] for outcome in RequestOutcome},
        "short": sum(r.outcome is RequestOutcome.DONE and r.tokens < r.wanted_tokens for r in records),
        "held_back": sum(record.was_held for record in records),
        "failures": dict(failures.most_common(5)),
    }


def _percentiles(name: str, values_s: Floats, tail: int) -> dict[str, float | None]:
    known_s = seen(values_s)
    return {f"{name}_p{p}_ms": _ms(percentile(known_s, p)) if p <= tail else None for p in PERCENTS}


def _throughput(records: Sequence[Record], duration_s: float) -> dict[str, float | None]:
    """Return what was offered, by the arrivals alone, and what was served, over the whole run with its end."""
    per_s = 1 / duration_s if duration_s > 0 else UNKNOWN
    span_s = records[-1].scheduled_s - records[0].scheduled_s if records else 0.0
    answered = [record for record in records if record.token_s]
    return {
        "offered_requests_per_s": _known((len(records) - 1) / span_s if span_s > 0 else UNKNOWN, 4),
        "prompt_tok_s": _known(sum(record.prompt_tokens for record in answered) * per_s, 2),
        "output_tok_s": _known(sum(record.tokens for record in answered) * per_s, 2),
    }


def _lateness(records: Sequence[Record]) -> dict[str, float | None]:
    """Return how much later than scheduled requests were sent, by the generator's fault or by the bound."""
    late_s = seen(np.array([record.sent_s - record.scheduled_s for record in records], dtype=np.float64))
    return {f"late_p{percent}_ms": _ms(percentile(late_s, percent)) for percent in (50, 99)} | {
        "late_max_ms": _ms(float(late_s.max())) if late_s.size else None
    }


def _worst(minutes: Sequence[dict[str, Any]], key: str) -> float | None:
    return max((minute[key] for minute in minutes if minute[key] is not None), default=None)


def seen(values: Floats) -> Floats:
    """Return the values that are known."""
    return values[~np.isnan(values)]


def _known(value: float, digits: int) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def _ms(seconds: float) -> float | None:
    return _known(seconds * 1000, 3)
