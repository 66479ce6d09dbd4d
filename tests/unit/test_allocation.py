"""How much of a run's time goes into having devices and giving them back."""

from __future__ import annotations

from typing import Any

import pytest

from rose.core.allocation import Cycle, allocation_overhead_s, allocation_overhead_share
from rose.launch.watching import allocation_overhead, count_from_asking

WHOLE = Cycle(1, "a", 10.0, 10.1, "", 10.4, 10.5, 10.5, 50.0, 50.2)


@pytest.mark.parametrize(
    "story, cycles, overhead_s",
    [
        ("nobody", [], 0.0),
        ("wanted until usable, returned until gone", [WHOLE], 0.7),
        ("at the same time counts once", [WHOLE, Cycle(2, "b", 10.2, 10.2, "", 10.3, 10.6, 10.6)], 0.8),
        ("never usable", [Cycle(1, "a", 90.0, 90.0, "", 91.0)], 10.0),
        ("given back before it was usable", [Cycle(1, "a", 10.0, 10.0, returned_s=12.0, released_s=12.5)], 2.5),
        ("still on its way back", [Cycle(1, "a", 1.0, 1.0, "", 1.0, 1.0, 1.0, 99.0)], 1.0),
        ("before the run", [Cycle(1, "a", -5.0, -5.0, "", -4.0, -4.0, 1.0)], 1.0),
        ("after the run", [Cycle(1, "a", 200.0, 200.0)], 0.0),
    ],
)
def test_overhead(story: str, cycles: list[Cycle], overhead_s: float) -> None:
    assert allocation_overhead_s(cycles, 0.0, 100.0) == pytest.approx(overhead_s), story
    assert allocation_overhead_share(cycles, 0.0, 100.0) == pytest.approx(overhead_s / 100)


def test_no_time_has_no_share() -> None:
    assert allocation_overhead_share([WHOLE], 5.0, 5.0) is None


def test_of_a_run_by_the_newest_record_of_every_cycle() -> None:
    def line(**changes: Any) -> dict[str, Any]:
        return {"kind": "allocation", "number": 7, "name": "a", "wanted_s": 20.0, "chosen_s": 20.0} | changes

    steps = [{"kind": "step", "began_s": 10.0, "step_s": 5.0}, {"kind": "step", "began_s": 100.0, "step_s": 10.0}]
    lines = [*steps, line(), line(activated_s=21.0, synced_s=22.0, usable_s=22.0), {"kind": "sample", "at_s": 3.0}]
    assert allocation_overhead(lines) == pytest.approx(0.02)
    assert allocation_overhead(lines[2:]) is None


def test_time_counts_from_asking_the_owner_not_from_when_the_gateway_hears() -> None:
    cycles = [
        Cycle(1, "a", 1.0, 1.0, "", 1.0, 1.0, 1.0, 10.2, 10.2),
        Cycle(2, "a", 20.3, 20.3, "", 20.4, 20.4, 20.4, 30.1, 30.2),
        Cycle(3, "a", 50.0, 50.0, "", 50.0, 50.0, 50.0),
    ]
    asked = [
        {"at_s": 10.0, "is_lent": False},
        {"at_s": 20.0, "is_lent": True},
        {"at_s": 30.0, "is_lent": False},
        {"at_s": 40.0, "is_lent": True},
        {"at_s": 41.0, "is_lent": False},  # before it had heard of the last: no cycle came of it
        {"at_s": 49.9, "is_lent": True},
    ]
    count_from_asking(cycles, asked)
    assert [(cycle.wanted_s, cycle.returned_s) for cycle in cycles] == [(1.0, 10.0), (20.0, 30.0), (49.9, None)]
    assert allocation_overhead_s(cycles, 0.0, 100.0) == pytest.approx(0.2 + 0.4 + 0.2 + 0.1)


def test_a_run_counts_what_it_asked() -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "step", "began_s": 0.0, "step_s": 100.0},
        {"kind": "asked", "at_s": 20.0, "is_lent": True},
        {"kind": "allocation", "number": 1, "name": "a", "wanted_s": 20.5, "chosen_s": 20.5, "usable_s": 21.0},
    ]
    assert allocation_overhead(lines) == pytest.approx(0.01)
