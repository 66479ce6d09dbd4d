"""What one decision of the router costs, in microseconds of one core, with 10,000 live trajectories.

Fleets of 10, 100 and 1,000 workers, a third of them dedicated. Every trajectory has run a turn, so its prefix is at
some worker, and every worker has turns under way. Measured is `choose` alone and, apart, `placed` with `ended`, for
turns of random trajectories. Figures are medians over repeats of the median of single decisions; P99 is over single
ones too, and shows whatever else the machine did.

    python benchmarks/router.py
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import harness

from rose.core.router import ROUTER_KINDS, Place, Router, RouterKind, TurnView, WorkerView

FLEETS = (10, 100, 1000)
TRAJECTORIES = 10_000
GROUP = 16
TURNS_PER_WORKER = 8
MAX_TOKENS = 4096
DECISION_US_MAX = 100.0
COLUMNS = ("router", "workers", "decision_us", "decision_us_low", "decision_us_high", "decision_us_p99", "books_us")


def turn_of(number: int, chance: random.Random) -> TurnView:
    return TurnView(f"trajectory {number}", f"group {number // GROUP}", chance.randint(2000, 30_000), MAX_TOKENS)


def lived_in(kind: RouterKind, workers: int, seed: int) -> Router:
    """A router in the middle of its work."""
    chance, router = random.Random(seed), Router(kind)
    for number in range(workers):
        rates = {"prefill_tok_s": chance.uniform(1e4, 4e4), "decode_tok_s": chance.uniform(40, 120)}
        router.put_worker(
            WorkerView(f"worker {number:04}", number % 3 == 0, True, 64, 363_000, slack_s=0.1, version="1", **rates)
        )
    for number in range(TRAJECTORIES):
        run_one(router, turn_of(number, chance), f"first {number}", number / 1000, chance, workers)
    for number in range(0, TRAJECTORIES, 2 * GROUP):
        router.finished(f"trajectory {number}", f"group {number // GROUP}", 20, chance.randint(500, 9000))
    for number in range(TURNS_PER_WORKER * workers):
        turn = turn_of(chance.randrange(TRAJECTORIES), chance)
        decision = router.choose(turn, 11.0)
        if isinstance(decision, Place):
            router.placed(f"now {number}", turn, decision.worker, 11.0)
    return router


def run_one(
    router: Router, turn: TurnView, turn_id: str, now_s: float, chance: random.Random, workers: int
) -> None:  # fmt: skip
    decision = router.choose(turn, now_s)
    worker = decision.worker if isinstance(decision, Place) else f"worker {chance.randrange(workers):04}"
    router.placed(turn_id, turn, worker, now_s)
    router.ended(turn_id, "ended", chance.randint(10, 400), now_s + 0.5)


def measure(router: Router, decisions: int, chance: random.Random) -> tuple[list[float], list[float]]:
    """Microseconds of each decision, and of the books of each turn that found a place."""
    decided_us, booked_us = [], []
    for number in range(decisions):
        turn = turn_of(chance.randrange(TRAJECTORIES), chance)
        now_s = 12.0 + number / 1000
        begin_ns = time.perf_counter_ns()
        decision = router.choose(turn, now_s)
        decided_us.append((time.perf_counter_ns() - begin_ns) / 1000)
        if isinstance(decision, Place):
            begin_ns = time.perf_counter_ns()
            router.placed("measured", turn, decision.worker, now_s)
            router.ended("measured", "ended", 100, now_s + 0.5)
            booked_us.append((time.perf_counter_ns() - begin_ns) / 1000)
    return decided_us, booked_us


def row(kind: RouterKind, workers: int, arguments: Any) -> dict[str, Any]:
    router, chance = lived_in(kind, workers, arguments.seed), random.Random(arguments.seed + 1)
    middles, worst, books = [], [], []
    for _ in range(3 if arguments.quick else 9):
        decided_us, booked_us = measure(router, 1000 if arguments.quick else 4000, chance)
        middles.append(statistics.median(decided_us))
        worst.append(statistics.quantiles(decided_us, n=100)[98])
        books.append(statistics.median(booked_us) if booked_us else 0.0)
    found: dict[str, Any] = {"router": kind, "workers": workers, "trajectories": TRAJECTORIES}
    harness.put_ratio(found, "decision_us", middles)
    return found | {
        "decision_us_p99": round(statistics.median(worst), 1),
        "books_us": round(statistics.median(books), 1),
    }


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--routers", nargs="+", choices=ROUTER_KINDS, default=list(ROUTER_KINDS))
    arguments = parser.parse_args()
    begun = harness.machine()
    rows = [row(kind, workers, arguments) for kind in arguments.routers for workers in FLEETS]
    harness.print_table(rows, COLUMNS)
    taken = {(found["router"], found["workers"]): found["decision_us"] for found in rows}
    kinds = arguments.routers
    slowest_us = max(taken[kind, 1000] for kind in kinds)
    growth = max(taken[kind, 1000] / taken[kind, 100] for kind in kinds)
    bars = [
        harness.wanted("decision at 1,000 workers, us", slowest_us, DECISION_US_MAX, at_most=True),
        harness.wanted("growth from 100 to 1,000 workers (linear is 10)", round(growth, 2), 5.0, at_most=True),
    ]
    return harness.finish(arguments, "router", rows, bars, begun, decision_us=slowest_us)


if __name__ == "__main__":
    raise SystemExit(main())
