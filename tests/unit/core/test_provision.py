"""Borrowing and returning devices, and the time that a run spends on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.core.provision import (
    Borrow,
    Cycle,
    Demand,
    DeviceView,
    Provision,
    ProvisionRules,
    Return,
    allocation_overhead_s,
    allocation_overhead_share,
)
from rose.errors import ConfigError

RULES = ProvisionRules(serving_max=2)
PLENTY = Demand(turns=100, work_tokens=100_000, dedicated_workers=1, dedicated_tok_s=500, sequence_tok_s=50)
FREE = DeviceView("a", is_borrowed=False, tok_s=400, activation_s=5.0, kv_use=0.1, slack_s=0.1)
OURS = replace(FREE, is_borrowed=True, turns=3)


@pytest.mark.parametrize(
    "story, demand, devices, borrowed",
    [
        ("nothing to do", Demand(), [FREE], []),
        ("much to do", PLENTY, [FREE], ["a"]),
        ("never more than the user allows", PLENTY, [replace(FREE, name=n) for n in "abc"], ["a", "b"]),
        ("the emptiest first", PLENTY, [FREE, replace(FREE, name="b", kv_use=0.05)], ["b", "a"]),
        ("then the one with most slack", PLENTY, [FREE, replace(FREE, name="b", slack_s=0.2)], ["b", "a"]),
        ("not one that its owner keeps", PLENTY, [replace(FREE, is_on_offer=False)], []),
        ("activation would take all the time there is", replace(PLENTY, work_tokens=1000), [FREE], []),
        ("it takes less than half", replace(PLENTY, work_tokens=6000), [FREE], ["a"]),
        ("the longest trajectory takes so long anyway", replace(PLENTY, longest_tokens=90_000), [FREE], []),
        ("too few turns for another", replace(PLENTY, turns=2), [FREE], []),
        ("nothing known of lengths", Demand(turns=100, dedicated_workers=1), [FREE], ["a"]),
    ],
)
def test_borrowing(story: str, demand: Demand, devices: list[DeviceView], borrowed: list[str]) -> None:
    decisions = Provision(RULES).decide(demand, devices, 0.0)
    assert [decision.name for decision in decisions if isinstance(decision, Borrow)] == borrowed, story
    assert all(decision.reason for decision in decisions)


def test_a_device_that_its_owner_wants_is_returned_at_once() -> None:
    decisions = Provision(RULES).decide(PLENTY, [replace(OURS, is_on_offer=False)], 0.0)
    assert decisions == [Return("a", "its owner wants it back")]


def test_a_lowered_cap_returns_the_least_used_devices() -> None:
    devices = [replace(OURS, name=name, turns=turns) for name, turns in (("a", 5), ("b", 1), ("c", 3))]
    decisions = Provision(RULES).decide(PLENTY, devices, 0.0)
    assert [decision.name for decision in decisions] == ["b"]


def test_an_idle_device_is_returned_and_rests() -> None:
    provision, idle = Provision(RULES), replace(OURS, turns=0)
    few = replace(PLENTY, turns=1)
    for now_s in range(15):
        assert provision.decide(few, [idle], float(now_s)) == [], "it is kept for a while"
    assert [type(decision) for decision in provision.decide(few, [idle], 16.0)] == [Return]
    for now_s in range(17, 46):
        assert provision.decide(PLENTY, [FREE], float(now_s)) == [], "and left alone for a while"
    assert [type(decision) for decision in provision.decide(PLENTY, [FREE], 48.0)] == [Borrow]


def test_a_busy_device_stays() -> None:
    provision = Provision(RULES)
    assert all(provision.decide(PLENTY, [OURS], float(now_s)) == [] for now_s in range(100))


def test_caps_and_thresholds_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="cap"):
        ProvisionRules(serving_max=-1)
    with pytest.raises(ConfigError, match="returned at a gain"):
        ProvisionRules(gain_min=0.1, keep_gain_min=0.2)


WHOLE = Cycle(1, "a", 10.0, 10.1, "", 10.4, 10.5, 10.5, 50.0, 50.2)


@pytest.mark.parametrize(
    "story, cycles, overhead_s",
    [
        ("no device", [], 0.0),
        ("wanted until usable, returned until gone", [WHOLE], 0.7),
        ("at the same time counts once", [WHOLE, Cycle(2, "b", 10.2, 10.2, "", 10.3, 10.6, 10.6)], 0.8),
        ("never usable", [Cycle(1, "a", 90.0, 90.0, "", 91.0)], 10.0),
        ("given back before it was usable", [Cycle(1, "a", 10.0, 10.0, returned_s=12.0, released_s=12.5)], 2.5),
        ("still on its way back", [Cycle(1, "a", 1.0, 1.0, "", 1.0, 1.0, 1.0, 99.0)], 1.0),
        ("before the run", [Cycle(1, "a", -5.0, -5.0, "", -4.0, -4.0, 1.0)], 1.0),
        ("after the run", [Cycle(1, "a", 200.0, 200.0)], 0.0),
    ],
)
def test_allocation_overhead_is_time_in_transition(story: str, cycles: list[Cycle], overhead_s: float) -> None:
    assert allocation_overhead_s(cycles, 0.0, 100.0) == pytest.approx(overhead_s), story
    assert allocation_overhead_share(cycles, 0.0, 100.0) == pytest.approx(overhead_s / 100)


def test_an_empty_run_has_no_allocation_overhead() -> None:
    assert allocation_overhead_share([WHOLE], 5.0, 5.0) is None
