"""The records of serving requests, and the check of a lent step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.core.slo import Budgets
from rose.engines.base import Request, Sampling, TokenEvent
from rose.sim.scenario import Traffic
from rose.sim.simulated_device import Device, DeviceWorld
from rose.sim.slo_invariants import ServedRequest, ServingClients, check_lent_step

BUDGETS = Budgets(1.0, 0.1)


def served(*times_s: float) -> ServedRequest:
    record = ServedRequest(Request("r", (1, 2), arrival_s=0.0))
    for at_s in times_s:
        record.token_made(1, at_s)
    return record


@pytest.mark.parametrize(
    "times_s, tpot, keeps",
    [
        ((), "mean", False),
        ((1.0,), "mean", True),
        ((1.1,), "mean", False),
        ((0.5, 0.55, 0.7), "mean", True),
        ((0.5, 0.55, 0.7), "every_gap", False),
        ((0.5, 0.75), "mean", False),
    ],
)
def test_budgets_are_kept_by_first_token_and_gaps(times_s: tuple[float, ...], tpot: str, keeps: bool) -> None:
    assert served(*times_s).keeps(replace(BUDGETS, tpot=tpot)) is keeps


def test_lent_time_counts_from_the_arrival_to_the_first_token() -> None:
    record = ServedRequest(Request("r", (1,), arrival_s=2.0))
    record.step_lent(1.5, 2.5)
    record.step_lent(3.0, 3.1, is_step=False)
    record.token_made(1, 4.0)
    record.step_lent(4.0, 5.0)
    assert record.lent_s == pytest.approx(0.6) and record.lent_steps == 1


def test_clients_are_added_when_they_arrive_and_leave_with_their_last_token() -> None:
    device = Device(DeviceWorld("decode", Traffic(1.0)))
    requests = [
        Request(name, (1, 2, 3), Sampling(max_tokens=2), arrival_s=at_s) for name, at_s in (("a", 1.0), ("b", 2.0))
    ]
    clients = ServingClients([(request.arrival_s, request) for request in reversed(requests)])
    assert clients.add_due(device.arbiter, 0.5) == []
    assert clients.add_due(device.arbiter, 1.0) == requests[:1] and list(clients.here) == ["a"]
    clients.record_lent(1.0, 1.2)
    assert clients.here["a"].lent_steps == 1
    assert clients.receive([TokenEvent("a", (5,), (-1.0,), "0", None)], 1.3) == []
    [ended] = clients.receive([TokenEvent("a", (6,), (-1.0,), "0", "length")], 1.4)
    assert (ended.tokens, ended.ttft_s, clients.here) == (2, pytest.approx(0.3), {})


def test_a_lent_step_beside_a_waiting_prompt_is_a_violation() -> None:
    device = Device(DeviceWorld("decode", Traffic(1.0), observed_s=1e6))
    step = device.arbiter.next_step(0.0)
    assert step is not None and step.side == "rollout"
    check_lent_step(step, device.admission, [], 0.0)
    with pytest.raises(AssertionError, match="while a prompt waits"):
        check_lent_step(step, device.admission, [served()], 0.0)
    with pytest.raises(AssertionError, match="expired grant"):
        check_lent_step(step, device.admission, [], 1e9)
