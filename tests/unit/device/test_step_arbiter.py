"""Whose step is next, and who is counted: the lender of a device, with simulated engines and without a loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rose.core.admission import Admission
from rose.core.breaker import Breaker
from rose.core.facts import StepFeatures
from rose.core.latency import LatencyModel
from rose.core.lending_controller import ComputeQuota, DryRun
from rose.core.lending_state import PAUSED
from rose.core.slo import Budgets
from rose.device.step_arbiter import PAUSE_WAIT_S, REFIT_S, StepArbiter
from rose.engines.base import Budget, Request, Sampling
from rose.engines.profiles import load_profile
from rose.engines.simulated import SimulatedEngine
from rose.sim.models import Cost, calibrated_model


@pytest.mark.parametrize("late_every, is_stopped", [(120, False), (50, True)])
def test_requests_cancelled_in_time_count_like_those_cancelled_late(late_every: int, is_stopped: bool) -> None:
    """A stop string ends a request by cancelling it. One deadline in a hundred may be lost on a busy device."""
    found = new_arbiter()
    found.accountant.budgets = Budgets(0.5, 0.05)
    breaker = found.admission.breaker = Breaker()
    for number in range(590):
        name, came_s = f"r{number}", number / 10
        is_late = number % late_every == late_every - 1
        found.add_serving(Request(name, (1, 2, 3), Sampling(max_tokens=9, ignore_eos=True), arrival_s=came_s))
        assert step(found, came_s) == "serving"
        found.accountant.on_lent_step(came_s, came_s + 0.04, upper_s=1.0)
        found.serving.cancel(name)
        lost = found.on_serving_gone(name, came_s + (0.08 if is_late else 0.045))
        assert [breach.objective for breach in lost] == ["tpot"] * is_late
    assert (breaker.trips > 0) is is_stopped
    assert found.accountant.open_accounts == 0


def test_a_request_that_leaves_before_its_deadline_counts_for_nothing() -> None:
    found = new_arbiter()
    breaker = found.admission.breaker = Breaker()
    for number in range(1000):
        found.add_serving(request(f"r{number}"))
        found.serving.cancel(f"r{number}")
        found.on_serving_gone(f"r{number}", 0.4)
    for _ in range(4):
        breaker.on_deadline_lost(0.4)
    assert breaker.why_stopped(0.5) is not None, "4 of 1,000 would not be many"


# How much longer requests live


def test_requests_that_end_by_a_stop_string_are_stretched_too() -> None:
    """Such a request is cancelled by its front. Where all clients use stop strings, nobody seemed to live longer."""
    found = new_arbiter()
    for number in range(10):
        name, came_s = f"r{number}", float(number)
        found.add_serving(Request(name, (1, 2, 3), Sampling(max_tokens=9, ignore_eos=True), arrival_s=came_s))
        assert step(found, came_s + 0.1) == "serving"
        found.accountant.on_lent_step(came_s + 0.1, came_s + 0.5, upper_s=1.0)
        found.serving.cancel(name)
        found.on_serving_gone(name, came_s + 0.8)
    assert (found.inflation.requests, found.inflation.mean) == (10, pytest.approx(2.0))


def test_requests_that_leave_without_a_token_are_not_stretched() -> None:
    found = new_arbiter()
    found.add_serving(request("r"))
    found.accountant.on_lent_step(0.0, 0.3, upper_s=1.0)
    found.serving.cancel("r")
    found.on_serving_gone("r", 0.4)
    assert (found.inflation.requests, found.inflation.mean) == (0, 1.0)


# Spare sequences


@pytest.mark.parametrize("lent_s, running", [(0.0, 2), (0.1, 4)])
def test_requests_that_lending_delays_take_no_slot_from_others(lent_s: float, running: int) -> None:
    found = new_arbiter(max_sequences=2, spare_sequences=2)
    for name in ("a", "b"):
        found.add_serving(Request(name, (1, 2, 3), Sampling(max_tokens=9, ignore_eos=True), arrival_s=0.0))
    assert step(found, 0.1) == "serving"
    found.accountant.on_lent_step(0.1, 0.1 + lent_s, upper_s=10.0)
    for name in ("c", "d", "e"):
        found.add_serving(Request(name, (1, 2, 3), Sampling(max_tokens=9, ignore_eos=True), arrival_s=lent_s + 0.1))
    assert step(found, lent_s + 0.2) == "serving"
    assert len(found.serving.scheduler.running) == running


# Planning


def run_out(found: StepArbiter, now_s: float) -> None:
    """Whatever was dropped, rollouts go on to their end and every block comes back."""
    while step(found, now_s) != "nobody":
        found.rollout.scheduler.check()
        now_s += 0.01
    assert found.rollout.scheduler.pool.used == 0


def test_a_step_that_was_planned_too_late_is_dropped_and_planned_again() -> None:
    found = new_arbiter()
    for number in range(8):
        found.rollout.add(request(f"r{number}"))
    planned = found.next_step(0.0)
    assert planned is not None and planned.grant is not None
    late_s = planned.grant.until_s
    assert found.may_begin(planned, late_s / 2) and not found.may_begin(planned, late_s)
    assert (found.dropped_steps, found.lent_steps) == (1, 0)
    assert found.accountant.total_lent_s == late_s, "serving had to wait for it"
    assert not found.last_grant.is_open(late_s)
    run_out(found, late_s)
    assert found.rollout.facts().generated_tokens == 8 * 4


def test_plans_that_are_always_too_late_block_admission() -> None:
    found = new_arbiter()
    found.rollout.add(request("rollout"))
    for now_s in (0.0, 1.0, 2.0):
        planned = found.next_step(now_s)
        assert planned is not None and planned.grant is not None
        assert not found.may_begin(planned, planned.grant.until_s)
    assert (found.stalls.blocked_s(2.5) or 0.0) > 2.0
    assert step(found, 3.0) == "rollout" and found.stalls.blocked_s(9.0) is None


def test_a_loop_that_plans_slowly_gets_smaller_steps() -> None:
    """A step as long as it may be leaves half a millisecond for its planning; whoever needs more is not shut out."""
    found = new_arbiter()
    found.admission.rollout = calibrated_model(lambda features: 0.0005 * features.new_tokens)
    for number in range(32):
        found.rollout.add(request(f"r{number}"))
    for dropped in range(4):
        planned = found.next_step(float(dropped))
        assert planned is not None
        if found.may_begin(planned, dropped + 0.002):
            break
    assert found.dropped_steps == dropped > 0


def test_planning_is_lent_time_and_no_late_step() -> None:
    found = new_arbiter()
    found.rollout.add(request("rollout"))
    planned = found.next_step(0.0)
    assert planned is not None
    end_s = 0.01 + 0.9 * planned.upper_s
    assert found.finish(planned, found.rollout.step(planned.plan), 0.01, end_s) == []
    assert found.accountant.total_lent_s == end_s
    planned = found.next_step(1.0)
    assert planned is not None
    [breach] = found.finish(planned, found.rollout.step(planned.plan), 1.01, 1.01 + 9 * planned.upper_s)
    assert breach.objective == "step"


def fixed_cost(features: StepFeatures) -> float:
    return 0.03 + 30e-6 * features.new_tokens


def no_fixed_cost(features: StepFeatures) -> float:
    return 0.0001 + 30e-6 * features.new_tokens


def lender_beside_decoding(cost: Cost) -> StepArbiter:
    """One serving request decodes; of its 32 rollouts, steps of more than 24 at a time take longer than was thought."""
    found = new_arbiter()
    found.admission.mode, model = "decode", calibrated_model(cost)
    found.admission.rollout, upper = model, model.upper
    found.admission.history.bursts.restore(1e9, (), (), 0.0)
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
    assert found.accountant.total_lent_s == pytest.approx(0.002)


# Pauses


def test_new_weights_wait_for_a_moment_that_serving_can_spare() -> None:
    found = new_arbiter()
    assert found.may_pause(9.0, 0.0, 0.0), "serving has no work"
    found.add_serving(request("serving", 9))
    assert step(found, 0.0) == "serving"
    assert found.may_pause(0.01, 0.0, 0.001) and not found.may_pause(0.3, 0.0, 0.001)
    assert found.may_pause(0.3, 0.001 - PAUSE_WAIT_S, 0.001), "they do not wait for ever"


def test_a_pause_for_the_rollouts_side_is_lent_time_and_no_step() -> None:
    found = new_arbiter()
    found.quota = ComputeQuota(0.5)
    found.add_serving(request("serving"))
    found.charge_pause(0.0, 2.0)
    assert (found.accountant.total_lent_s, found.accountant.breaches, found.lent_steps) == (2.0, {}, 0)
    assert found.quota.is_spent(2.0)


# Learning again


def due_for_a_refit(found: StepArbiter) -> list[LatencyModel]:
    models = [found.admission.serving, found.admission.rollout]
    for model in models:
        while not model.is_refit_due:
            model.observe(StepFeatures(4, 400, 400, 4), 0.002)
    return models


def test_latency_models_are_refitted_while_rollouts_always_have_work() -> None:
    found = new_arbiter()
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
    found = new_arbiter()
    found.admission.budgets = Budgets(5 * REFIT_S, 0.15)  # half of it is what a step may take
    models = due_for_a_refit(found)
    found.rollout.add(request("rollout", 2))
    assert step(found, 0.0) == "rollout" and all(model.is_refit_due for model in models)
    assert [step(found, now_s) for now_s in (0.1, 0.2, 0.3)] == ["rollout", "nobody", "nobody"]
    assert not any(model.is_refit_due for model in models)


# Dry runs


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_dry_run_counts_whatever_is_stopped_and_lends_nothing(is_stopped: bool) -> None:
    found = new_arbiter()
    if is_stopped:
        found.stop(PAUSED)
    found.rollout.add(request("rollout"))
    found.dry_run = DryRun(found.admission, 0.0)
    assert [step(found, now_s) for now_s in (0.0, 4.0)] == ["nobody", "nobody"]
    assert (found.dry_run.lent_s, found.lent_steps) == (pytest.approx(4.0), 0)


def test_a_dry_run_keeps_the_owners_limit() -> None:
    found = new_arbiter()
    found.quota = ComputeQuota(0.25)
    found.dry_run = DryRun(found.admission, 0.0)
    assert [step(found, now_s) for now_s in (0.0, 4.0)] == ["nobody", "nobody"]
    assert found.dry_run.lent_s == pytest.approx(1.25)


WIDE = Budget(512, 64)


def new_arbiter(**sizes: int) -> StepArbiter:
    """A device that lends only while serving has no work."""
    models = [calibrated_model(load_profile(name).step_s, 0.02) for name in ("cpu", "cpu-frozenlake-1m")]
    engines = [SimulatedEngine(load_profile("cpu"), **sizes), SimulatedEngine(load_profile("cpu-frozenlake-1m"))]
    return StepArbiter(*engines, Admission("idle", Budgets(0.5, 0.15), *models), serving_budget=WIDE)


def request(name: str, tokens: int = 4) -> Request:
    return Request(name, tuple(range(8)), Sampling(max_tokens=tokens, ignore_eos=True), arrival_s=0.0)


def step(found: StepArbiter, now_s: float) -> str:
    """Whose it was."""
    planned = found.next_step(now_s)
    if planned is None:
        return "nobody"
    engine = found.serving if planned.side == "serving" else found.rollout
    found.finish(planned, engine.step(planned.plan), now_s, now_s)
    return planned.side


def test_the_arbiter_knows_how_long_rollouts_have_waited() -> None:
    found = new_arbiter()
    found.rollout.add(request("rollout", 8))
    assert step(found, 0.0) == "rollout" and found.stalls.blocked_s(5.0) is None
    found.add_serving(request("serving", 100))
    assert [step(found, now_s) for now_s in (6.0, 6.1)] == ["serving", "serving"]
    assert found.stalls.blocked_s(6.1) is None and found.stalls.blocked_s(8.0) == 2.0


def test_a_stall_lasts_after_rollouts_left_until_a_step_would_run() -> None:
    found = new_arbiter()
    found.rollout.add(request("rollout"))
    found.add_serving(request("serving", 3))
    assert step(found, 0.0) == "serving"
    found.rollout.evict("rollout")
    assert step(found, 1.0) == "serving" and found.stalls.blocked_s(1.0) == 1.0
    assert step(found, 2.0) == "serving" and found.stalls.blocked_s(2.0) == 2.0
    assert step(found, 3.0) == "nobody" and found.stalls.blocked_s(3.0) is None, "serving has ended"


def test_a_grant_without_a_step_does_not_end_a_stall() -> None:
    found = new_arbiter()
    found.rollout.add(request("rollout"))
    plan = found.rollout.plan
    found.rollout.plan = lambda budget: None  # type: ignore[method-assign]
    assert [step(found, now_s) for now_s in (0.0, 1.0)] == ["nobody", "nobody"]
    assert found.last_grant.is_open(1.0) and found.stalls.blocked_s(1.0) == 1.0
    found.rollout.plan = plan  # type: ignore[method-assign]
    assert step(found, 2.0) == "rollout" and found.stalls.blocked_s(9.0) is None


@pytest.mark.parametrize("how", ["stopped", "dry run", "resting"])
def test_a_device_that_lends_nothing_reports_no_stall(how: str) -> None:
    found = new_arbiter()
    found.rollout.add(request("rollout"))
    found.add_serving(request("serving", 100))
    step(found, 0.0)
    if how == "stopped":
        found.stop(PAUSED)
    elif how == "dry run":
        found.dry_run = cast(Any, SimpleNamespace(decide=lambda view, quota, now_s: found.last_grant))
    else:
        found.admission.breaker = cast(Any, SimpleNamespace(why_stopped=lambda now_s: "circuit breaker"))
        found.admission.breaker.on_finished = lambda *args, **named: None
    step(found, 1.0)
    assert found.stalls.blocked_s(9.0) is None
