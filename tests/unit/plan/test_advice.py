"""What to change first, by rules."""

from __future__ import annotations

import pytest
from tests.unit.plan_world import result, small_fleet, small_job

from rose.plan.advice import advice_of
from rose.plan.curve import Curve, CurvePoint
from rose.plan.windows import Estimate


def curve(*steps: float, longest_s: float = 10.0, rollout_s: float = 100.0, step_s: float = 110.0) -> Curve:
    points = tuple(
        CurvePoint(number, number, Estimate(value, value, value, 3), rollout_s, step_s, 0.5)
        for number, value in enumerate(steps)
    )
    return Curve(points, longest_s, 1)


@pytest.mark.parametrize(
    "changes, line, words",
    [
        ({"requests": 0, "alone": 0, "lent": 0}, curve(1, 2), "No request arrived"),
        ({"alone": 90, "lent": 90}, curve(1, 2), "Mend serving first: alone it keeps only 90.0%"),
        ({"lent": 95, "lost": 5}, curve(1, 2), "Do not lend"),
        ({"peak_kv_share": 0.95}, curve(1, 2), "KV memory"),
        ({"lent_share": 0.1}, curve(1, 2), "Only 10% of the time is lent, mostly because of `a prompt waits`"),
        ({"lent_share": 0.1, "unlent_s": {"no step fits: slack between decode steps": 9.0}}, curve(1, 2), "--tpot-ms"),
        ({"lent_share": 0.1, "unlent_s": {"a new reason": 9.0}}, curve(1, 2), "look into `a new reason`"),
        ({}, curve(0, 0), "Give the job devices of its own"),
        ({}, curve(1, 2, step_s=6.0), "Speed up training"),
        ({}, curve(1, 2, longest_s=90.0), "Shorten the longest trajectories"),
        ({}, curve(100, 140, 141), "Borrow 1 devices: the other 1 add 0.7% steps"),
        ({}, curve(100, 140, 180), "Borrow all 2 devices"),
    ],
)
def test_the_first_rule_that_applies_speaks(changes: dict, line: Curve, words: str) -> None:
    fleet = small_fleet()
    assert words in advice_of(fleet, small_job(fleet), [result(**changes)] * 4, line)
