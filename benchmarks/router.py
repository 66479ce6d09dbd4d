"""The cost of one decision of the router, in microseconds of one core, with 10,000 live trajectories.

Pools have 10, 100 and 1,000 workers, a third of them dedicated. Every trajectory has a cached prefix, and every worker
has running turns. `choose` is measured alone and `placed` with `ended` separately (`books_us`), for turns of random
trajectories. Figures are medians over repeats of the median of single decisions. P99 is over single decisions, and
includes the noise of the machine.

    python benchmarks/router.py
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import harness
from scheduling.baselines import ROUTERS, make_router

from rose.core.router import Router
from rose.core.routing_rules import Place, TurnView
from rose.core.worker_table import WorkerView

FLEETS = (10, 100, 1000)
TRAJECTORIES = 10_000
GROUP = 16
TURNS_PER_WORKER = 8
MAX_TOKENS = 4096
DECISION_US_MAX = 100.0
COLUMNS = ("router", "workers", "decision_us", "decision_us_low", "decision_us_high", "decision_us_p99", "books_us")


def turn_of(number: int, chance: random.Random) -> TurnView:
    return TurnView(f"trajectory {number}", f"group {number // GROUP}", chance.randint(2000, 30_000), MAX_TOKENS)


def loaded_router(kind: str, workers: int, seed: int) -> Router:
    """Return a router with live trajectories and running turns."""
    chance, router = random.Random(seed), make_router(kind)
    for number in range(workers):
        rates = {"prefill_tok_s": chance.uniform(1e4, 4e4), "decode_tok_s": chance.uniform(40, 120)}
        router.put_worker(
            WorkerView(f"worker {number:04}", number % 3 == 0, True, 64, 363_000, slack_s=0.1, version="1", **rates)
        )
    for number in range(TRAJECTORIES):
        run_one(router, turn_of(number, chance), f"first {number}", number / 1000, chance, workers)
    for number in range(0, TRAJECTORIES, 2 * GROUP):
        router.on_finished(f"trajectory {number}", f"group {number // GROUP}", 20, chance.randint(500, 9000))
    for number in range(TURNS_PER_WORKER * workers):
        turn = turn_of(chance.randrange(TRAJECTORIES), chance)
        decision = router.choose(turn, 11.0)
        if isinstance(decision, Place):
            router.on_placed(f"now {number}", turn, decision.worker, 11.0)
    return router


def run_one(
    router: Router, turn: TurnView, turn_id: str, now_s: float, chance: random.Random, workers: int
) -> None:  # fmt: skip
    decision = router.choose(turn, now_s)
    worker = decision.worker if isinstance(decision, Place) else f"worker {chance.randrange(workers):04}"
    router.on_placed(turn_id, turn, worker, now_s)
    router.on_ended(turn_id, "ended", chance.randint(10, 400), now_s + 0.5)


def measure(router: Router, decisions: int, chance: random.Random) -> tuple[list[float], list[float]]:
    """Return the microseconds of each decision, and of recording each placed turn."""
    decided_us, booked_us = [], []
    for number in range(decisions):
        turn = turn_of(chance.randrange(TRAJECTORIES), chance)
        now_s = 12.0 + number / 1000
        begin_ns = time.perf_counter_ns()
        decision = router.choose(turn, now_s)
        decided_us.append((time.perf_counter_ns() - begin_ns) / 1000)
        if isinstance(decision, Place):
            begin_ns = time.perf_counter_ns()
            router.on_placed("measured", turn, decision.worker, now_s)
            router.on_ended("measured", "ended", 100, now_s + 0.5)
            booked_us.append((time.perf_counter_ns() - begin_ns) / 1000)
    return decided_us, booked_us


def measured_row(kind: str, workers: int, arguments: Any) -> dict[str, Any]:
    router, chance = loaded_router(kind, workers, arguments.seed), random.Random(arguments.seed + 1)
    middles, worst, books = [], [], []
    for _ in range(3 if arguments.quick else 9):
        decided_us, booked_us = measure(router, 1000 if arguments.quick else 4000, chance)
        middles.append(statistics.median(decided_us))
        worst.append(statistics.quantiles(decided_us, n=100)[98])
        books.append(statistics.median(booked_us) if booked_us else 0.0)
    row: dict[str, Any] = {"router": kind, "workers": workers, "trajectories": TRAJECTORIES}
    harness.put_ratio(row, "decision_us", middles)
    return row | {
        "decision_us_p99": round(statistics.median(worst), 1),
        "books_us": round(statistics.median(books), 1),
    }


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    arguments = parser.parse_args()
    begun = harness.machine()
    rows = [measured_row(kind, workers, arguments) for kind in arguments.routers for workers in FLEETS]
    harness.print_table(rows, COLUMNS)
    decision_us = {(row["router"], row["workers"]): row["decision_us"] for row in rows}
    kinds = arguments.routers
    slowest_us = max(decision_us[kind, 1000] for kind in kinds)
    growth = max(decision_us[kind, 1000] / decision_us[kind, 100] for kind in kinds)
    bars = [
        harness.wanted("decision at 1,000 workers, us", slowest_us, DECISION_US_MAX, at_most=True),
        harness.wanted("growth from 100 to 1,000 workers (linear is 10)", round(growth, 2), 5.0, at_most=True),
    ]
    return harness.finish(arguments, "router", rows, bars, begun, decision_us=slowest_us)


if __name__ == "__main__":
    raise SystemExit(main())
