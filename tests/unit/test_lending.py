"""Whose step is next, and who is counted: the lender of a device, with simulated engines and without a loop."""

from __future__ import annotations

import pytest
from tests.unit.test_gates import lender, request, step

from rose.core.breaker import Breaker
from rose.engines.base import Request, Sampling


@pytest.mark.parametrize("late_every, is_stopped", [(22, False), (10, True)])
def test_who_is_cancelled_in_time_counts_as_much_as_who_is_cancelled_late(late_every: int, is_stopped: bool) -> None:
    """A stop string ends a request by cancelling it. Only misses were counted: 0 of 20 kept their budgets, it said."""
    found = lender()
    breaker = found.admission.breaker = Breaker()
    for number in range(500):
        name, came_s = f"r{number}", number / 10
        found.add_serving(Request(name, (1, 2, 3), Sampling(max_tokens=9, ignore_eos=True), arrival_s=came_s))
        assert step(found, came_s) == "serving"
        found.serving.cancel(name)
        found.serving_gone(name, came_s + (9.0 if number % late_every == late_every - 1 else 0.05))
    assert (breaker.trips > 0) is is_stopped
    assert found.ledger.open_accounts == 0


def test_who_leaves_before_the_first_token_is_due_proves_nothing() -> None:
    found = lender()
    breaker = found.admission.breaker = Breaker()
    for number in range(30):
        found.add_serving(request(f"r{number}"))
        found.serving.cancel(f"r{number}")
        found.serving_gone(f"r{number}", 0.4)
    for _ in range(19):
        breaker.finished(0.4, is_attained=False)
    assert breaker.why_stopped(0.5) is None, "fewer than 20 requests"
