"""Stories of borrowing and giving back, of pacing, and of expected lengths."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from rose.core.lengths import Answers, Lengths
from rose.core.pacing import Pacer, PacingRules
from rose.core.provision import Borrow, Demand, DeviceView, Provision, ProvisionRules, Return
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


def test_one_that_its_owner_wants_goes_back_at_once() -> None:
    decisions = Provision(RULES).decide(PLENTY, [replace(OURS, is_on_offer=False)], 0.0)
    assert decisions == [Return("a", "its owner wants it back")]


def test_a_lowered_cap_gives_back_those_that_do_least() -> None:
    devices = [replace(OURS, name=name, turns=turns) for name, turns in (("a", 5), ("b", 1), ("c", 3))]
    decisions = Provision(RULES).decide(PLENTY, devices, 0.0)
    assert [decision.name for decision in decisions] == ["b"]


def test_an_idle_device_goes_back_and_rests_before_it_is_borrowed_again() -> None:
    provision, idle = Provision(RULES), replace(OURS, turns=0)
    few = replace(PLENTY, turns=1)
    for now_s in range(15):
        assert provision.decide(few, [idle], float(now_s)) == [], "it is kept for a while"
    assert [type(decision) for decision in provision.decide(few, [idle], 16.0)] == [Return]
    for now_s in range(17, 46):
        assert provision.decide(PLENTY, [FREE], float(now_s)) == [], "and left alone for a while"
    assert [type(decision) for decision in provision.decide(PLENTY, [FREE], 48.0)] == [Borrow]


def test_a_device_at_work_stays() -> None:
    provision = Provision(RULES)
    assert all(provision.decide(PLENTY, [OURS], float(now_s)) == [] for now_s in range(100))


def test_caps_and_thresholds_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="cap"):
        ProvisionRules(serving_max=-1)
    with pytest.raises(ConfigError, match="given back"):
        ProvisionRules(gain_min=0.1, keep_gain_min=0.2)


# Pacing


def test_a_few_evicted_turns_go_on_at_once() -> None:
    pacer = Pacer(PacingRules(burst_turns=4))
    pacer.evicted(4, 0.0)
    assert all(pacer.may_place(0.0, True) for _ in range(4)) and pacer.next_s() is None


def test_a_storm_is_spread_and_new_turns_never_wait() -> None:
    pacer = Pacer(PacingRules(burst_turns=2, prompt_share=0.5))
    pacer.survivors(workers=3, prompts_per_s=20.0)
    pacer.evicted(100, 10.0)
    placed = [0.0] * sum(pacer.may_place(10.0, True) for _ in range(100))
    assert len(placed) <= 6
    assert pacer.may_place(10.0, False)
    now_s = pacer.next_s()
    while now_s is not None:
        assert pacer.may_place(now_s, True)
        placed.append(now_s)
        now_s = pacer.next_s()
    assert len(placed) == 100
    assert placed[-1] == pytest.approx(10.0 + (100 - 6) / 10.0, rel=0.1), "half of 20 prompts a second"


def test_a_clock_that_jumps_back_stops_nobody_for_long() -> None:
    pacer = Pacer(PacingRules(burst_turns=1))
    pacer.evicted(10, 1000.0)
    while pacer.may_place(1000.0, True):
        pass
    assert not pacer.may_place(5.0, True)
    assert pacer.may_place(6.1, True)


# Lengths


def test_nothing_is_said_before_some_have_finished() -> None:
    lengths = Lengths()
    assert lengths.remaining("g", 0) is None
    for _ in range(8):
        lengths.finished("g", 100)
    assert lengths.remaining("g", 0) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("alike, expected", [(0.0, 0.0), (0.5, 0.5), (0.9, 0.9)])
def test_how_alike_siblings_are_is_learnt(alike: float, expected: float) -> None:
    chance, lengths = random.Random(3), Lengths()
    for group in range(200):
        shared = chance.gauss(0, 1)
        for _ in range(8):
            value = 7 + math.sqrt(alike) * shared + math.sqrt(1 - alike) * chance.gauss(0, 1)
            lengths.finished(f"{group}", int(math.exp(value)))
    assert lengths.likeness == pytest.approx(expected, abs=0.1)


def test_finished_siblings_tell_and_a_long_one_is_expected_to_go_on() -> None:
    chance, lengths = random.Random(3), Lengths()
    for group in range(50):
        for _ in range(8):
            lengths.finished(f"{group}", int((5000 if group % 2 else 300) * chance.lognormvariate(0, 0.2)))
    short, long, unknown = (lengths.remaining(group, 0) for group in ("0", "1", "another"))
    assert short is not None and long is not None and unknown is not None
    assert short < 600 < unknown < long and long > 3500
    late = [lengths.remaining("0", done) for done in (0, 300, 3000, 10**9)]
    assert all(value is not None and value > 0 for value in late) and late[2] > late[1]  # type: ignore[operator]


def test_answers_are_taken_as_long_as_asked_until_some_are_known() -> None:
    answers = Answers()
    assert (answers.mean(500), answers.high(500)) == (500.0, 500)
    for number in range(1000):
        answers.add(number % 100)
    assert answers.mean(500) == pytest.approx(49.5, abs=3) and 90 <= answers.high(500) <= 99
    assert (answers.mean(20), answers.high(20)) == (20, 20)
