"""Households can be solved, and nothing lies where the task wants it."""

from __future__ import annotations

from collections import Counter

import pytest

from rose.envs.alfworld.expert import plan_of
from rose.envs.alfworld.households import KINDS, ROOMS, TOOLS, draw_household, problem

ALL = tuple(KINDS)


def test_a_seed_draws_one_household_and_another_seed_another():
    assert all(draw_household(seed, ALL) == draw_household(seed, ALL) for seed in range(50))
    assert len({problem(draw_household(seed, ALL)) for seed in range(500)}) == 500
    assert Counter(draw_household(seed, ALL).kind for seed in range(600)).keys() == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_lie_away_from_the_goal_and_things_where_they_may(kind):
    for seed in range(200):
        found = draw_household(seed, (kind,), places=4 + seed % 10, things=2 + seed % 12)
        wanted = [thing for thing in found.things if thing.kind == found.target]
        assert len(wanted) == (2 if kind == "two" else 1)
        assert all(found.places[thing.at] != found.goal for thing in wanted)
        assert len({thing.name for thing in found.things}) == len(found.things)
        assert kind not in TOOLS or TOOLS[kind] in found.places.values()
        assert any(
            all(thing.kind == "desklamp" or thing.kind in room[found.places[thing.at]].holds for thing in found.things)
            for room in ROOMS.values()
            if set(found.places.values()) <= set(room)
        )


def test_a_household_in_words():
    found = draw_household(3, ALL)
    assert (found.kind, found.task) == ("cool", "put a cool mug in countertop")
    assert plan_of(found) == (
        "go to coffeemachine 1",
        "take mug 1 from coffeemachine 1",
        "go to fridge 1",
        "cool mug 1 with fridge 1",
        "go to countertop 1",
        "move mug 1 to countertop 1",
    )
    text = problem(found)
    assert text.count("(") == text.count(")") and "(inReceptacle mug_1 coffeemachine_1)" in text
    assert "(isCool ?o)" in text and "(openable fridge_1)" in text
