"""Steps a day against borrowed devices, by the real router."""

from __future__ import annotations

import math

import pytest
from tests.unit.plan_world import result, small_fleet, small_job, steady

from rose.core.router import Router
from rose.plan import curve
from rose.plan.curve import Curve, curve_of
from rose.plan.fleet import Fleet
from rose.sim.lent_timeline import BIN_S, LentTimeline


def run(fleet: Fleet, job: str = "grpo:64x4,turns=tools,train_s=5", **changes: object) -> Curve:
    return curve_of(fleet, steady(), small_job(fleet, job), [result(**changes)] * 3, 0, lambda *_: None)


def test_more_devices_give_more_steps_up_to_the_trainer() -> None:
    count, share = 40, 0.95
    edges = tuple(share * BIN_S * number for number in range(count + 1))
    line = LentTimeline((share,) * count, (400_000,) * count, (None,) * count, 1.0, 100, edges)
    points = run(small_fleet(), "grpo:192x4,turns=tools,train_s=5", timeline=line, lent_share=0.95).points
    assert [point.devices for point in points] == [0, 1, 2]
    steps = [point.steps_per_day.value for point in points]
    assert 1.1 * steps[0] < steps[2] < 86_400 / 5 and steps[0] < steps[1]
    assert points[0].borrowed_share == 0 < points[-1].borrowed_share < 1
    assert points[0].steps_per_day.low <= steps[0] <= points[0].steps_per_day.high
    assert points[0].step_s == pytest.approx(86_400 / steps[0])


def test_devices_that_lend_nothing_change_nothing() -> None:
    shut = LentTimeline((0.0,) * 8, (0,) * 8, (None,) * 8, 1.0, 0, (0.0,) * 9)
    steps = [point.steps_per_day.value for point in run(small_fleet(), timeline=shut, lent_share=0.0).points]
    assert steps[0] == pytest.approx(steps[-1])


def test_a_job_without_devices_takes_no_step() -> None:
    first, *others = run(small_fleet(dedicated=0)).points
    assert first.steps_per_day.value == 0 and math.isinf(first.step_s)
    assert all(point.steps_per_day.value > 0 for point in others)


def test_the_core_routes_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    choose = Router.choose

    def watched(self: Router, *arguments: object) -> object:
        chosen.append(arguments)
        return choose(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Router, "choose", watched)
    run(small_fleet())
    assert len(chosen) > 64


def test_a_large_job_is_simulated_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = small_fleet(devices="4xh800", dedicated=2)
    assert run(fleet).shrunk_by == 1
    monkeypatch.setattr(curve, "TURNS_MAX", 100)  # the workers of the job divide by two only
    assert run(fleet).shrunk_by == 2
