"""Learns what steps of an engine cost, in seconds, before it serves anybody.

The shapes to run are the latency model's own choice (`profile_plan`); here they run on the real engine, with prompts
nobody sees again, and are timed. The engine must be idle, and is idle again afterwards.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from rose.core.facts import StepFeatures
from rose.core.latency import LatencyModel, ProfileShape, profile_plan
from rose.coserve.lending import ScheduledEngine
from rose.engines.base import Budget, Request, Sampling

REPEATS = 3  # of the whole plan: the first meets cold caches, and a stall spoils at most one
ENOUGH_S = 3.0  # no other repeat after this long: whoever waits for the device minds more than the estimate gains
TENANT = "rose profile"

Timed = list[tuple[StepFeatures, float]]


def profile(
    engine: ScheduledEngine, model: LatencyModel, step_tokens: int, *, now_s: Callable[[], float] = time.perf_counter
) -> None:
    """Run the plan and fit the model to it."""
    limits = engine.scheduler.limits
    plan = profile_plan(step_tokens, limits.max_sequences, limits.max_context_tokens)
    chance = random.Random(0)
    samples: Timed = []
    begin_s = now_s()
    for repeat in range(REPEATS):
        if repeat and now_s() - begin_s > ENOUGH_S:
            break
        for shape in plan:
            samples += _run(engine, shape, chance, now_s)
    model.fit(samples)


def _run(engine: ScheduledEngine, shape: ProfileShape, chance: random.Random, now_s: Callable[[], float]) -> Timed:
    sampling = Sampling(max_tokens=shape.decode_steps, ignore_eos=True)
    vocabulary = range(engine.scheduler.limits.vocabulary)
    for number in range(shape.requests):
        prompt = tuple(chance.choices(vocabulary, k=shape.context_tokens))
        engine.add(Request(f"profile-{number}", prompt, sampling, tenant=TENANT))
    timed: Timed = []
    while True:
        plan = engine.plan(Budget(shape.new_tokens, shape.requests))
        if plan is None:
            return timed
        begin_s = now_s()  # as the loop that runs it does: planning is no part of a step
        engine.step(plan)
        timed.append((plan.features, now_s() - begin_s))
