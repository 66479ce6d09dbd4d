"""From what was measured to figures: one row per mode, and what compares modes.

Attainment is a share of requests, and so is `aa_spread`. Modes are compared on the requests, or the segments, that both
have: a difference of attainment is paired per request, a ratio of token rates is taken within a segment and given as
the median with its lowest and highest. "Serving alone" in a comparison is its two runs pooled: the mean of the two for
every request. What was not measured is null and `reasons` says why.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coserving.pairing import PairedDifference, paired_difference
from coserving.plan import ALONE
from coserving.sending import record_of
from coserving.store import Measured
from rose.load.driver import Record
from rose.load.harvest import Harvest
from rose.load.load_report import LatencyBudget, measure, report_of

Pieces = Mapping[int, Measured]  # by segment
Verdicts = dict[int, tuple[float, float]]  # request: (when it should have come, attained)
LATENCY_KEYS = ("ttft_p99_ms", "tpot_p99_ms", "itl_p99_ms")
JUDGED_KEYS = ("worst_minute_ttft_p99_ms", "attainment", "budget_used_ttft", "budget_used_tpot")
FEW_MINUTES = "fewer than two minutes of requests say nothing about how minutes differ"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a segment lies in the whole run."""

    offset_s: float
    first_index: int


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything measured under all modes."""

    modes: Mapping[str, Pieces]
    places: Sequence[Place]
    budget: LatencyBudget

    def records(self, mode: str) -> list[Record]:
        """In the order and the time of the whole run."""
        return [
            record_of(row, offset_s=self.places[number].offset_s, first_index=self.places[number].first_index)
            for number, piece in sorted(self.modes.get(mode, {}).items())
            for row in piece.rows
        ]

    def harvest(self, mode: str) -> Harvest:
        """Tokens over the time of the whole run, without the clients' warm-up before a segment, and without what came
        after its last request when the next segment has begun in the time of the run."""
        harvest, total = Harvest(), 0.0
        for number, piece in sorted(self.modes.get(mode, {}).items()):
            end_s = min(piece.wall_s, self._next_offset_s(number) - self.places[number].offset_s)
            looks = [look for look in zip(piece.rollout_at_s, piece.rollout_total) if 0 <= look[0] <= end_s]
            for at_s, tokens in looks:
                harvest.at_s.append(self.places[number].offset_s + at_s)
                harvest.tokens.append(total + tokens - looks[0][1])
            total = harvest.tokens[-1] if looks else total
        return harvest

    def _next_offset_s(self, number: int) -> float:
        return self.places[number + 1].offset_s if number + 1 < len(self.places) else math.inf


# Rows


def row_of(findings: Findings, mode: str) -> dict[str, Any]:
    """The figures of one mode."""
    pieces = list(findings.modes.get(mode, {}).values())
    reasons: dict[str, str] = {}
    row: dict[str, Any] = {"mode": mode, "segments": len(pieces)}
    row |= _latencies(findings, mode, reasons)
    row["rollout_tok_s"] = _rounded(_rate(pieces), 1)
    if row["rollout_tok_s"] is None:
        reasons["rollout_tok_s"] = "no rollouts run in this mode" if mode in ALONE else "it was not measured"
    row["serving_time_share"] = _rounded(_serving_share(pieces, mode), 4)
    if row["serving_time_share"] is None:
        reasons["serving_time_share"] = _no_share_reason(mode)
    row["breaches"] = _total(pieces, lambda piece: piece.breaches)
    if row["breaches"] is None:
        reasons["breaches"] = "no device here counts them" if mode == "halves" else "the device does not show them"
    row["late_requests"] = _total(pieces, lambda piece: piece.late_requests)
    row["ambiguous"] = _total(pieces, lambda piece: piece.ambiguous)
    row["breaker_trips"] = _total(pieces, lambda piece: piece.breaker_trips)
    row["is_lending_share"] = _average(pieces, lambda piece: piece.is_lending_share)
    row["lent_tok_s"] = _average(pieces, lambda piece: piece.lent_tok_s)
    row |= _machine(pieces)
    row["reasons"] = reasons
    return row


def _latencies(findings: Findings, mode: str, reasons: dict[str, str]) -> dict[str, Any]:
    records = findings.records(mode)
    if not records:
        keys = (*LATENCY_KEYS, *JUDGED_KEYS)
        reasons |= dict.fromkeys(keys, "no serving requests in this mode")
        return {"requests": 0, "percentile": None, **dict.fromkeys(keys)}
    wall_s = sum(piece.wall_s for piece in findings.modes[mode].values())
    report = report_of(records, findings.budget, wall_s)
    tail = report["tail"]
    if tail != "p99":
        reasons["percentile"] = f"the keys named p99 hold P95: {report['p99_missing_because']}"
    return {
        "requests": report["requests"],
        "percentile": int(tail[1:]),
        **{key: report[key.replace("p99", tail)] for key in LATENCY_KEYS},
        **{key: report[key] for key in JUDGED_KEYS},
        "ttft_p50_ms": report["ttft_p50_ms"],
        "tpot_p50_ms": report["tpot_p50_ms"],
        "rejected": report["rejected"],
        "timed_out": report["timed_out"],
        "failed": report["failed"],
        "failures": report["failures"],
        "late_p99_ms": report["late_p99_ms"],
    }


def _serving_share(pieces: Sequence[Measured], mode: str) -> float | None:
    """By the engine's account of its steps. Where serving has the process for itself, its CPU time will do."""
    step_s = _total(pieces, lambda piece: piece.serving_step_s)
    if step_s is None and mode in (*ALONE, "halves"):
        step_s = _total(pieces, lambda piece: piece.serving_cpu_s)
    wall_s = sum(piece.wall_s for piece in pieces)
    return step_s / wall_s if step_s is not None and wall_s else None


def _no_share_reason(mode: str) -> str:
    return "serving has no load" if mode == "rollouts_alone" else "the device does not show the time in serving's steps"


def _rate(pieces: Sequence[Measured]) -> float | None:
    tokens = _total(pieces, lambda piece: piece.rollout_tokens)
    wall_s = sum(piece.wall_s for piece in pieces)
    return tokens / wall_s if tokens is not None and wall_s else None


def _machine(pieces: Sequence[Measured]) -> dict[str, Any]:
    """How busy the cores were, and what the rollouts' own client cost and met."""
    found: dict[str, Any] = {
        "device_core_share": _average(pieces, lambda piece: piece.cores.device if piece.cores else None),
        "other_cores_share": _average(pieces, lambda piece: piece.cores.others if piece.cores else None),
        "foreign_share": _average(pieces, lambda piece: piece.cores.foreign if piece.cores else None),
    }
    notes = [piece.rollout_notes for piece in pieces if piece.rollout_notes]
    for key in ("turns", "aborts", "refusals", "thrown_away_tokens"):
        found[f"rollout_{key}"] = sum(note[key] for note in notes) if notes else None
    for key in ("turn_p50_ms", "client_cpu_us_per_turn"):
        found[f"rollout_{key}"] = statistics.median(note[key] for note in notes) if notes else None
    return found


# Comparisons


def verdicts(findings: Findings, mode: str) -> Verdicts:
    records = findings.records(mode)
    measures = measure(records, findings.budget)
    return {record.index: row for record, row in zip(records, zip(measures.at_s.tolist(), measures.attained.tolist()))}


def pooled(first: Verdicts, second: Verdicts) -> Verdicts:
    """The two runs of serving alone as one: the mean for every request that both have."""
    return {index: (at_s, (value + second[index][1]) / 2) for index, (at_s, value) in first.items() if index in second}


def difference(first: Verdicts, second: Verdicts) -> PairedDifference:
    """Of attainment, second less first, over the requests that both have."""
    both = sorted(first.keys() & second.keys())
    columns = (
        [first[index][1] for index in both],
        [second[index][1] for index in both],
        [first[index][0] for index in both],
    )
    return paired_difference(*(np.array(column, dtype=np.float64) for column in columns))


def ratios(first: Pieces, second: Pieces, of: Callable[[Measured, Measured], float | None]) -> list[float]:
    """`of` both, segment by segment, where both have one."""
    found = [of(first[number], second[number]) for number in sorted(first.keys() & second.keys())]
    return [value for value in found if value is not None]


def harvest_share(lent: Measured, dedicated: Measured) -> float | None:
    lent_tok_s, dedicated_tok_s = lent.rollout_tok_s, dedicated.rollout_tok_s
    return lent_tok_s / dedicated_tok_s if lent_tok_s is not None and dedicated_tok_s else None


def no_waste(lent: Measured, dedicated: Measured) -> float | None:
    """Of the time that serving did not use, how much became rollouts."""
    share = harvest_share(lent, dedicated)
    if share is None or lent.serving_step_s is None:
        return None
    left = 1 - lent.serving_step_s / lent.wall_s
    return share / left if left > 0 else None


def overall_of(findings: Findings, rate_rps: float, capacity_rps: float) -> dict[str, Any]:
    """What is said of the run as a whole. Ratios are of `decode`."""
    modes, reasons = findings.modes, dict[str, str]()
    found: dict[str, Any] = {
        "busy_share": _rounded(
            _serving_share([piece for mode in ALONE for piece in modes.get(mode, {}).values()], ALONE[0]), 4
        ),
        "capacity_share": round(rate_rps / capacity_rps, 4),
    }
    if found["busy_share"] is None:
        reasons["busy_share"] = "serving alone was not measured"
    found |= _spread(findings, reasons)
    decode = modes.get("decode", {})
    for name, other, of in (
        ("harvest_share", "rollouts_alone", harvest_share),
        ("no_waste", "rollouts_alone", no_waste),
        ("lending_gain", "idle", harvest_share),
    ):
        values = ratios(decode, modes.get(other, {}), of)
        found |= _ratio(name, values)
        if not values:
            reasons[name] = f"it needs decode and {other}, with their token rates and serving's time in steps"
    return found | {"reasons": reasons}


def _spread(findings: Findings, reasons: dict[str, str]) -> dict[str, Any]:
    first, second = (verdicts(findings, mode) for mode in ALONE)
    spread = difference(first, second)
    if math.isnan(spread.half_width):
        both = first and second
        reasons["aa_spread"] = FEW_MINUTES if both else "serving alone was not measured twice"
    return {
        "aa_spread": _rounded(spread.half_width, 5),
        "aa_difference": _rounded(spread.mean, 5),
        "is_void": spread.half_width > 0.01,  # two runs of the same thing that far apart judge nothing
    }


def _ratio(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    ends = {f"{name}_low": round(min(values), 3), f"{name}_high": round(max(values), 3)}
    return {name: round(statistics.median(values), 3), **ends}


def _total(pieces: Sequence[Measured], of: Callable[[Measured], float | None]) -> float | None:
    """None if there is nothing, or if one of them does not say."""
    values = [of(piece) for piece in pieces]
    return sum(values) if values and None not in values else None  # type: ignore[arg-type]


def _average(pieces: Sequence[Measured], of: Callable[[Measured], float | None]) -> float | None:
    """Over time; None if there is nothing, or if one of them does not say."""
    wall_s, total = sum(piece.wall_s for piece in pieces), 0.0
    for piece in pieces:
        value = of(piece)
        if value is None:
            return None
        total += value * piece.wall_s
    return round(total / wall_s, 3) if wall_s else None


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or math.isnan(value) else round(value, digits)
