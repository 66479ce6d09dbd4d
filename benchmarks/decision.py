"""What one admission decision costs, in microseconds of one core, with 64 serving and 64 rollout requests.

Every mode is asked in the situations that take it longest: prompts waiting and requests decoding, only decoding, and a
device without serving work. The models have learnt from thousands of steps, as they would have in a day's use. The
figures are medians over repeats; P99 is over single decisions.

    python benchmarks/decision.py
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import harness

from rose.core.admission import MODES, Admission, LendingLimits, Mode
from rose.core.facts import RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.latency import LatencyModel
from rose.core.slo import Budgets

NOW_S = 100.0
REQUESTS = 64
DECISION_US_MAX = 50.0
ROLLOUT = RolloutView(decoding=REQUESTS, prompt_tokens=4096, context_tokens=300)


def learnt(constants: tuple[float, ...], seed: int) -> LatencyModel:
    """A model that has seen steps of every shape."""
    chance, model, timed = random.Random(seed), LatencyModel(), []
    for _ in range(4000):
        sequences = chance.randint(1, REQUESTS)
        new = sequences + (chance.randint(0, 448) if chance.random() < 0.5 else 0)
        context = chance.randint(16, 3000)
        features = StepFeatures(new, sequences * context + new, new * context, sequences)
        terms = (1, new, features.kv_read_tokens, features.new_by_context, sequences)
        seconds = sum(constant * term for constant, term in zip(constants, terms))
        timed.append((features, seconds * chance.lognormvariate(0, 0.03)))
    model.fit(timed)
    return model


def views() -> dict[str, ServingView]:
    running = tuple(
        RunningRequest(NOW_S - 0.001 * number / REQUESTS, 200 + 10 * number, NOW_S - 2, NOW_S - 1, 100)
        for number in range(REQUESTS)
    )
    late = tuple(RunningRequest(NOW_S - 0.085, request.context_tokens, NOW_S - 2, NOW_S - 1, 10) for request in running)
    waiting = tuple(WaitingRequest(NOW_S - 0.0001 * number, 20 + number) for number in range(REQUESTS))
    return {
        "64 waiting, 64 decoding": ServingView(1, waiting, running),
        "64 decoding": ServingView(2, (), running),
        "64 decoding, little slack": ServingView(3, (), late),
        "no serving work": ServingView(4),
    }


def measure(admission: Admission, view: ServingView, decisions: int) -> tuple[list[float], str]:
    taken_us = []
    for _ in range(decisions):
        begin_ns = time.perf_counter_ns()
        grant = admission.decide(view, ROLLOUT, NOW_S)
        taken_us.append((time.perf_counter_ns() - begin_ns) / 1000)
    return taken_us, grant.reason


def row(mode: Mode, case: str, view: ServingView, arguments: Any) -> dict[str, Any]:
    budgets = Budgets(ttft_s=0.5, tpot_s=0.15, answer_s=60.0)
    serving = learnt((1.2e-4, 8e-5, 1.5e-7, 8e-8, 2e-6), arguments.seed)
    rollout = learnt((8e-5, 3e-5, 2e-8, 5.5e-8, 3e-6), arguments.seed + 1)
    limits = LendingLimits(serving_sequences=4 * REQUESTS)  # seats left, or decode mode would not look any further
    admission = Admission(mode, budgets, serving, rollout, limits)
    admission.history.bursts.restore(1e6, (), (), NOW_S)
    for _ in range(1000):
        admission.history.prompts.observe(random.Random(arguments.seed).randint(8, 400))
    medians, worst, reason = [], [], ""
    for _ in range(3 if arguments.quick else 9):
        taken_us, reason = measure(admission, view, 500 if arguments.quick else 3000)
        medians.append(statistics.median(taken_us))
        worst.append(statistics.quantiles(taken_us, n=100)[98])
    found: dict[str, Any] = {"mode": mode, "case": case, "reason": reason}
    harness.put_ratio(found, "decision_us", medians)
    return found | {"decision_us_p99": round(statistics.median(worst), 3)}


def main() -> int:
    arguments = harness.parser(__doc__ or "").parse_args()
    begun = harness.machine()
    rows = [row(mode, case, view, arguments) for mode in MODES for case, view in views().items()]
    harness.print_table(rows, ("mode", "case", "decision_us", "decision_us_p99", "reason"))
    slowest = max(found["decision_us"] for found in rows)
    bars = [harness.wanted("decision at 64 + 64 requests, us", slowest, DECISION_US_MAX, at_most=True)]
    return harness.finish(arguments, "decision", rows, bars, begun)


if __name__ == "__main__":
    raise SystemExit(main())
