"""Whose step is next, and who is counted: the lender of a device, with simulated engines and without a loop."""

from __future__ import annotations

import pytest
from tests.unit.test_gates import lender, request, step

from rose.core.breaker import Breaker
from rose.core.dry_run import DryRun
from rose.core.facts import StepFeatures
from rose.core.latency import LatencyModel
from rose.core.ration import Ration
from rose.core.slo import Budgets
from rose.coserve.lending import REFIT_S, Lender
from rose.engines.base import Request, Sampling
from rose.sim.models import Cost, learnt


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


# How much longer requests live


def test_requests_that_end_by_a_stop_string_are_stretched_too() -> None:
    """Such a request is cancelled by its front. Where all clients use stop strings, nobody seemed to live longer."""
    found = lender()
    for number in range(10):
        name, came_s = f"r{number}", float(number)
        found.add_serving(Request(name, (1, 2, 3), Sampling(max_tokens=9, ignore_eos=True), arrival_s=came_s))
        assert step(found, came_s + 0.1) == "serving"
        found.ledger.lent(came_s + 0.1, came_s + 0.5, upper_s=1.0)
        found.serving.cancel(name)
        found.serving_gone(name, came_s + 0.8)
    assert (found.stretch.requests, found.stretch.mean) == (10, pytest.approx(2.0))


def test_requests_that_leave_without_a_token_are_not_stretched() -> None:
    found = lender()
    found.add_serving(request("r"))
    found.ledger.lent(0.0, 0.3, upper_s=1.0)
    found.serving.cancel("r")
    found.serving_gone("r", 0.4)
    assert (found.stretch.requests, found.stretch.mean) == (0, 1.0)


# Planning


def run_out(found: Lender, now_s: float) -> None:
    """Whatever was dropped, rollouts go on to their end and every block comes back."""
    while step(found, now_s) != "nobody":
        found.rollout.scheduler.check()
        now_s += 0.01
    assert found.rollout.scheduler.pool.used == 0


def test_a_step_that_was_planned_too_late_is_dropped_and_planned_again() -> None:
    found = lender()
    for number in range(8):
        found.rollout.add(request(f"r{number}"))
    planned = found.next_step(0.0)
    assert planned is not None and planned.grant is not None
    late_s = planned.grant.until_s
    assert found.may_begin(planned, late_s / 2) and not found.may_begin(planned, late_s)
    assert (found.dropped_steps, found.lent_steps) == (1, 0)
    assert found.ledger.total_lent_s == late_s, "serving had to wait for it"
    assert not found.last_grant.is_open(late_s)
    run_out(found, late_s)
    assert found.rollout.facts().generated_tokens == 8 * 4


def test_plans_that_are_always_too_late_are_a_shut_gate() -> None:
    found = lender()
    found.rollout.add(request("rollout"))
    for now_s in (0.0, 1.0, 2.0):
        planned = found.next_step(now_s)
        assert planned is not None and planned.grant is not None
        assert not found.may_begin(planned, planned.grant.until_s)
    assert (found.gate.shut_s(2.5) or 0.0) > 2.0
    assert step(found, 3.0) == "rollout" and found.gate.shut_s(9.0) is None


def test_a_loop_that_plans_slowly_gets_smaller_steps() -> None:
    """A step as long as it may be leaves half a millisecond for its planning; whoever needs more is not shut out."""
    found = lender()
    found.admission.rollout = learnt(lambda features: 0.0005 * features.new_tokens)
    for number in range(32):
        found.rollout.add(request(f"r{number}"))
    for dropped in range(4):
        planned = found.next_step(float(dropped))
        assert planned is not None
        if found.may_begin(planned, dropped + 0.002):
            break
    assert found.dropped_steps == dropped > 0


def test_planning_is_lent_time_and_no_late_step() -> None:
    found = lender()
    found.rollout.add(request("rollout"))
    planned = found.next_step(0.0)
    assert planned is not None
    end_s = 0.01 + 0.9 * planned.upper_s
    assert found.finish(planned, found.rollout.step(planned.plan), 0.01, end_s) == []
    assert found.ledger.total_lent_s == end_s
    planned = found.next_step(1.0)
    assert planned is not None
    [breach] = found.finish(planned, found.rollout.step(planned.plan), 1.01, 1.01 + 9 * planned.upper_s)
    assert breach.objective == "step"


def fixed_cost(features: StepFeatures) -> float:
    return 0.03 + 30e-6 * features.new_tokens


def no_fixed_cost(features: StepFeatures) -> float:
    return 0.0001 + 30e-6 * features.new_tokens


def lender_beside_decoding(cost: Cost) -> Lender:
    """One serving request decodes; of its 32 rollouts, steps of more than 24 at a time take longer than was thought."""
    found = lender()
    found.admission.mode, model = "decode", learnt(cost)
    found.admission.rollout, upper = model, model.upper
    model.upper = lambda features: upper(features) if features.sequences <= 24 else 0.06  # type: ignore[method-assign]
    found.add_serving(request("serving", 3))
    assert step(found, 0.0) == "serving"
    for number in range(32):
        found.rollout.add(request(f"r{number}", 1))
    return found


@pytest.mark.parametrize("cost, side", [(fixed_cost, "serving"), (no_fixed_cost, "rollout")])
def test_a_step_that_is_planned_smaller_must_be_nearly_as_efficient_too(cost: Cost, side: str) -> None:
    found = lender_beside_decoding(cost)
    planned = found.next_step(0.001)
    assert found.last_grant.is_open(0.001), "as if it were one prompt"
    assert planned is not None and planned.side == side
    if side == "rollout":
        assert 1 < planned.plan.features.sequences <= 24


def test_a_step_of_any_size_runs_while_serving_has_no_work() -> None:
    found = lender_beside_decoding(fixed_cost)
    assert [step(found, now_s) for now_s in (0.001, 0.002, 0.003)] == ["serving", "serving", "rollout"]
    run_out(found, 0.004)


def test_planning_in_vain_is_lent_time_too() -> None:
    found = lender_beside_decoding(fixed_cost)
    planned = found.next_step(0.001)
    assert planned is not None and planned.side == "serving"
    found.finish(planned, found.serving.step(planned.plan), 0.003, 0.004)
    assert found.ledger.total_lent_s == pytest.approx(0.002)


# Learning again


def due_for_a_refit(found: Lender) -> list[LatencyModel]:
    models = [found.admission.serving, found.admission.rollout]
    for model in models:
        while not model.is_refit_due:
            model.observe(StepFeatures(4, 400, 400, 4), 0.002)
    return models


def test_constants_are_fitted_again_while_rollouts_always_have_something_to_run() -> None:
    found = lender()
    models = due_for_a_refit(found)
    before = [model.constants for model in models]
    found.add_serving(request("serving", 2))
    found.rollout.add(request("rollout", 100))
    assert [step(found, now_s) for now_s in (0.0, 0.1)] == ["serving", "serving"]
    assert all(model.is_refit_due for model in models), "not while serving has work"
    assert [step(found, now_s) for now_s in (0.2, 0.3)] == ["rollout", "rollout"]
    assert not any(model.is_refit_due for model in models)
    assert all(model.constants != old for model, old in zip(models, before, strict=True))


def test_a_refit_is_no_longer_than_a_lent_step_may_be() -> None:
    found = lender()
    found.admission.budgets = Budgets(5 * REFIT_S, 0.15)  # half of it is what a step may take
    models = due_for_a_refit(found)
    found.rollout.add(request("rollout", 2))
    assert step(found, 0.0) == "rollout" and all(model.is_refit_due for model in models)
    assert [step(found, now_s) for now_s in (0.1, 0.2, 0.3)] == ["rollout", "nobody", "nobody"]
    assert not any(model.is_refit_due for model in models)


# Dry runs


@pytest.mark.parametrize("stopped", ["", "paused by the owner"])
def test_a_dry_run_counts_whatever_is_stopped_and_lends_nothing(stopped: str) -> None:
    found = lender()
    found.stop(stopped)
    found.rollout.add(request("rollout"))
    found.dry_run = DryRun(found.admission, 0.0)
    assert [step(found, now_s) for now_s in (0.0, 4.0)] == ["nobody", "nobody"]
    assert (found.dry_run.lent_s, found.lent_steps) == (pytest.approx(4.0), 0)


def test_a_dry_run_keeps_the_owners_limit() -> None:
    found = lender()
    found.ration = Ration(0.25)
    found.dry_run = DryRun(found.admission, 0.0)
    assert [step(found, now_s) for now_s in (0.0, 4.0)] == ["nobody", "nobody"]
    assert found.dry_run.lent_s == pytest.approx(1.25)
