"""What a run of benchmarks/coserve_vllm.py says: what users saw, what rollouts got, and what is wanted of both."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import harness

from coserving.pairing import paired_difference
from rose.vllm.control_segment import Status

COLUMNS = ("mode", "requests", "ttft_p99_ms", "tpot_p99_ms", "itl_p99_ms", "worst_minute_ttft_p99_ms", "attainment",
           "rollout_tok_s", "serving_time_share", "present_share", "lent_share", "no_waste", "breaches",
           "breaker_trips", "budget_used_ttft", "budget_used_tpot")  # fmt: skip
LATENCIES = ("percentile", "ttft_p99_ms", "tpot_p99_ms", "itl_p99_ms", "worst_minute_ttft_p99_ms", "attainment",
             "budget_used_ttft", "budget_used_tpot")  # fmt: skip
UNACCOUNTED = ("lent_share", "breaches", "breaker_trips")  # without terms
REASONS = {
    "capacity_share": "serving is not driven to saturation here",
    "lent_share": "of `ungated`: steps that no admission lets through are not accounted for, nor what they break",
    "aa_spread": "under two minutes of requests say nothing about how minutes differ",
}


@dataclass(frozen=True, slots=True)
class Asked:
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(slots=True)
class Answer:
    at_s: float  # when it was due, in the trace's time
    ttft_s: float
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tpot_s(self) -> float:
        return statistics.fmean(self.gaps_s) if self.gaps_s else 0.0


@dataclass(slots=True)
class Piece:
    """One segment under one mode."""

    begun: Status
    ended: Status
    seconds: float
    steps_s: float  # of serving
    present_s: float  # in which serving had a request
    nice: int
    answers: list[Answer]

    def gained(self, count: Callable[[Status], float]) -> float:
        return count(self.ended) - count(self.begun)


@dataclass(frozen=True, slots=True)
class Budget:
    ttft_s: float
    tpot_s: float

    def is_kept(self, answer: Answer) -> bool:
        return answer.ttft_s <= self.ttft_s and answer.tpot_s <= self.tpot_s


GIVEN = Budget(0.5, 0.15)


def trace(seed: int, count: int, rate_rps: float) -> list[Asked]:
    chance, at_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(rate_rps)
        prompt = tuple(chance.choices(range(250), k=chance.randint(20, 200)))
        found.append(Asked(at_s, prompt, chance.randint(8, 48)))
    return found


def lent_mode(mode: str) -> str | None:
    """Under which admission rollouts run meanwhile."""
    return mode if mode in ("idle", "decode") else None if mode == "ungated" else "idle"


def row_of(mode: str, pieces: list[Piece], budget: Budget) -> dict[str, Any]:
    """What serving's users saw, what rollouts got, and what they waited for."""
    seconds = sum(piece.seconds for piece in pieces)
    steps = sum(piece.gained(lambda status: status.steps) for piece in pieces)
    tokens = sum(piece.gained(lambda status: status.generated_tokens + status.prompt_tokens) for piece in pieces)
    waited_s: Counter[str] = Counter()
    for piece in pieces:
        before_s = piece.begun.lent.closed_s
        waited_s.update({why: total_s - before_s.get(why, 0.0) for why, total_s in piece.ended.lent.closed_s.items()})
    found = {
        "mode": mode,
        "seconds": round(seconds, 1),
        "nice": max(piece.nice for piece in pieces),
        "rollout_tok_s": round(tokens / seconds, 1),
        "lent_share": round(sum(piece.gained(lambda status: status.lent.seconds) for piece in pieces) / seconds, 4),
        "waited_share": {why: round(s / seconds, 4) for why, s in waited_s.items() if s > 0.0005 * seconds},
        "breaches": sum(piece.gained(lambda status: sum(status.lent.breaches.values())) for piece in pieces),
        "breaker_trips": sum(piece.gained(lambda status: status.lent.breaker_trips) for piece in pieces),
        "gate_at_end": pieces[-1].ended.why,
        "serving_time_share": round(sum(piece.steps_s for piece in pieces) / seconds, 4),
        "present_share": round(sum(piece.present_s for piece in pieces) / seconds, 4),
        "rollout_step_ms": round(seconds / steps * 1e3, 2) if mode == "rollouts_alone" and steps else None,
    }
    unaccounted = {} if lent_mode(mode) is not None else dict.fromkeys(UNACCOUNTED)
    return {**found, **unaccounted, **figures([one for piece in pieces for one in piece.answers], budget)}


def figures(answers: list[Answer], budget: Budget) -> dict[str, Any]:
    if not answers:
        return {"requests": 0, **dict.fromkeys(LATENCIES)}
    ttfts, tpots = [one.ttft_s for one in answers], [one.tpot_s for one in answers]
    gaps = [gap for one in answers for gap in one.gaps_s]
    minutes = [[one.ttft_s for one in some] for _, some in groupby(answers, key=lambda one: one.at_s // 60)]
    share = 0.99 if len(answers) >= 1000 else 0.95
    return {
        "requests": len(answers),
        "percentile": "P99" if share == 0.99 else "P95",
        "ttft_p99_ms": round(at_share(ttfts, share) * 1e3, 1),
        "tpot_p99_ms": round(at_share(tpots, share) * 1e3, 2),
        "itl_p99_ms": round(at_share(gaps, 0.99) * 1e3, 2),
        "worst_minute_ttft_p99_ms": round(max(at_share(ttfts, share) for ttfts in minutes) * 1e3, 1),
        "attainment": round(statistics.fmean(budget.is_kept(one) for one in answers), 4),
        "budget_used_ttft": round(at_share(ttfts, share) / budget.ttft_s, 3),
        "budget_used_tpot": round(at_share(tpots, share) / budget.tpot_s, 3),
    }


def at_share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def judged(rows: list[dict[str, Any]], answers: dict[str, list[Answer]], budget: Budget) -> dict[str, Any]:
    """What is said of the run as a whole. Ratios are of `decode`; rows have their own.

    What serving leaves is what it leaves alone: while rollouts share the core its steps are long by the clock.
    """
    by = {row["mode"]: row for row in rows}
    busy_share = statistics.fmean(by[mode]["serving_time_share"] for mode in ("alone_1", "alone_2"))
    for mode in ("idle", "decode"):
        row = by[mode]
        row["harvest_share"] = round(row["rollout_tok_s"] / max(1e-9, by["rollouts_alone"]["rollout_tok_s"]), 3)
        row["no_waste"] = round(row["harvest_share"] / max(1e-9, 1 - busy_share), 3)
    gain = round(by["decode"]["rollout_tok_s"] / max(1e-9, by["idle"]["rollout_tok_s"]), 3)
    kept = {mode: [float(budget.is_kept(one)) for one in some] for mode, some in answers.items()}
    first, second = kept["alone_1"], kept["alone_2"]
    at_s, pooled = [one.at_s for one in answers["alone_1"]], [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    spread = paired_difference(first, second, at_s)
    lost = {mode: paired_difference(pooled, kept[mode], at_s).mean for mode in ("ungated", "idle", "decode")}
    return {
        "busy_share": round(busy_share, 4),
        "capacity_share": None,
        "aa_spread": None if math.isnan(spread.half_width) else round(spread.half_width, 5),
        "aa_difference": round(spread.mean, 5),
        "attainment_lost": {mode: round(value, 4) for mode, value in lost.items()},
        "harvest_share": by["decode"]["harvest_share"],
        "no_waste": by["decode"]["no_waste"],
        "lending_gain": gain,
        "reasons": {name: why for name, why in REASONS.items() if name != "aa_spread" or math.isnan(spread.half_width)},
    }


def bars_of(rows: list[dict[str, Any]], overall: dict[str, Any]) -> list[dict[str, Any]]:
    tolerance, lost = max(0.005, overall["aa_spread"] or abs(overall["aa_difference"])), overall["attainment_lost"]
    bars = [harness.wanted(f"attainment of {mode}, less alone", lost[mode], -tolerance) for mode in ("idle", "decode")]
    waste = max(row["no_waste"] for row in rows if row["mode"] in ("idle", "decode"))
    return [
        *bars,
        harness.wanted("CPU share of the gated engine", overall["gated_cpu_share"], 0.03, at_most=True),
        harness.wanted("rollout steps until the gate is closed", overall["gate_close_steps"], 1.0, at_most=True),
        harness.wanted("no_waste of the better mode", waste, 0.6),
    ]
