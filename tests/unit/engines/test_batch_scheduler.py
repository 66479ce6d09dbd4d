"""The scheduler of our engines: priorities without starving, and spare sequences."""

from __future__ import annotations

from tests.integration.scripted_engine import ScriptedEngine

from rose.config.server_settings import EngineSettings
from rose.engines.base import Budget, Request, Sampling
from rose.engines.batch_scheduler import GONE_KEPT
from rose.engines.live_request import PRIORITY_LEVELS, PRIORITY_PLACES, PRIORITY_TURNS
from rose.engines.profiles import load_profile
from rose.engines.simulated import SimulatedEngine

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


def test_spare_sequences_run_only_while_they_are_released() -> None:
    found = SimulatedEngine(load_profile("cpu"), max_sequences=2, spare_sequences=2, max_waiting=8)
    running: list[int] = []
    for number in range(6):
        found.add(request(f"r{number}", 0, max_tokens=9))
    for uses_spare in (False, True, False):
        found.scheduler.uses_spare = uses_spare
        plan = found.plan(WHOLE)
        assert plan is not None
        found.step(plan)
        running.append(len(found.scheduler.running))
        found.scheduler.check()
    assert running == [2, 4, 4], "a sequence that runs already goes on"


def test_requests_cancelled_while_nothing_is_planned_leave_nothing_behind() -> None:
    """While admission is blocked clients retry for hours, and nothing is planned."""
    found = engine()
    for number in range(5):
        found.add(request(f"stays {number}", 0))
    for number in range(1000):
        found.add(request(f"goes {number}", 0))
        assert found.cancel(f"goes {number}")
    scheduler = found._scheduler
    assert len(scheduler._waiting) <= 2 * 5 + GONE_KEPT
    assert [live.request.request_id for live in scheduler.waiting(9)] == [f"stays {n}" for n in range(5)]
    scheduler.check()
    assert len(step(found)) == 5
