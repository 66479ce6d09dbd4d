"""Priorities order requests, and no request starves because of them."""

from __future__ import annotations

from tests.e2e.scripted_engine import ScriptedEngine

from rose.config.device import EngineSettings
from rose.engines.base import Budget, Request, Sampling
from rose.engines.scheduler import PRIORITY_LEVELS, PRIORITY_PLACES, PRIORITY_TURNS

WHOLE = Budget(512, 64)
OVERTAKEN_MAX = 2 * PRIORITY_LEVELS * PRIORITY_PLACES


def engine(**settings: int) -> ScriptedEngine:
    return ScriptedEngine(EngineSettings(**settings))


def request(name: str, priority: int, max_tokens: int = 1) -> Request:
    return Request(name, (1,), Sampling(max_tokens=max_tokens), priority=priority)


def step(found: ScriptedEngine, budget: Budget = WHOLE) -> list[str]:
    """The requests that one step served."""
    plan = found.plan(budget)
    assert plan is not None
    return [event.request_id for event in found.step(plan)]


def test_a_waiting_request_is_overtaken_a_bounded_number_of_times() -> None:
    found = engine(max_sequences=1, max_waiting=64)
    found.add(request("patient", 2**31 - 1))
    found.add(request("urgent-0", -(2**31) + 1))
    served: list[str] = []
    while "patient" not in served:  # there is always a more urgent one
        found.add(request(f"urgent-{len(served) + 1}", -(2**31) + 1))
        served += step(found)
        assert len(served) <= OVERTAKEN_MAX + 1
    assert len(served) > PRIORITY_PLACES, "a priority is worth something"


def test_a_running_request_is_passed_over_a_bounded_number_of_times() -> None:
    found = engine(max_sequences=4)
    for name, priority in (("patient", 2**31 - 1), ("urgent", -(2**31) + 1)):
        found.add(request(name, priority, max_tokens=1000))
    step(found)
    one = Budget(512, 1)
    served = [step(found, one)[0] for _ in range(8 * PRIORITY_TURNS)]
    assert "patient" in served
    assert served.count("urgent") > served.count("patient")
