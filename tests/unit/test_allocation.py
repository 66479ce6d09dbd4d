"""How much of a run's time goes into having devices and giving them back."""

from __future__ import annotations

from typing import Any

import pytest

from rose.core.allocation import Cycle, allocation_overhead_s, allocation_overhead_share
from rose.launch.allocation import allocation_of, count_from_asking

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
    assert allocation_of(lines) == {"allocation_overhead_share": pytest.approx(0.02), "borrow_cycles": 0}
    assert allocation_of(lines[2:]) == {"allocation_overhead_share": None, "borrow_cycles": 0}, "without a step"
    assert allocation_of(steps)["allocation_overhead_share"] is None, "nothing was borrowed"


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
    assert allocation_of(lines)["allocation_overhead_share"] == pytest.approx(0.01)


def test_a_device_is_back_when_its_owner_says_so_too() -> None:
    cycles = [Cycle(1, "a", 1.0, 1.0, "", 1.0, 1.0, 1.0, 10.1, 10.1)]
    count_from_asking(cycles, [{"at_s": 10.0, "is_lent": False, "answered_s": 10.4}])
    assert (cycles[0].returned_s, cycles[0].released_s) == (10.0, 10.4)


def test_only_what_was_given_back_in_time_is_a_cycle() -> None:
    def line(number: int, **changes: Any) -> dict[str, Any]:
        known = {"kind": "allocation", "number": number, "name": "a", "wanted_s": 1.0, "chosen_s": 1.0, "usable_s": 1.0}
        return known | changes

    steps = [{"kind": "step", "began_s": 0.0, "step_s": 100.0}]
    back, late = line(1, returned_s=9.0, released_s=9.5), line(2, returned_s=101.0, released_s=102.0)
    early = line(0, wanted_s=-9.0, chosen_s=-9.0, usable_s=-9.0, returned_s=-5.0, released_s=-4.5)
    found = allocation_of([*steps, early, back, late, line(3)])
    assert found == {"allocation_overhead_share": pytest.approx(0.005), "borrow_cycles": 1}


def test_each_attempt_of_a_run_has_its_own_clock_and_its_own_numbers() -> None:
    def attempt(began_s: float) -> list[dict[str, Any]]:
        moments = {"wanted_s": began_s + 1, "chosen_s": began_s + 1, "usable_s": began_s + 2}
        back = {"returned_s": began_s + 20, "released_s": began_s + 21}
        cycle = {"kind": "allocation", "number": 1, "name": "a", **moments, **back}
        return [{"kind": "step", "began_s": began_s, "step_s": 50.0}, cycle]

    found = allocation_of([*attempt(1000.0), {"kind": "resume", "step": 1}, *attempt(3.0)])
    assert found == {"allocation_overhead_share": pytest.approx(0.04), "borrow_cycles": 2}
