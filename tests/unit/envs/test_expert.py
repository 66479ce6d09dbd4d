"""The expert of a household solves it from any state."""

from __future__ import annotations

from rose.envs.alfworld.expert import Expert, plan_of
from rose.envs.alfworld.households import KINDS, Household, draw_household

ALL = tuple(KINDS)


def test_plans_open_doors_before_reaching_in():
    for seed in range(300):
        check_doors(draw_household(seed, ALL))


def check_doors(found: Household) -> None:
    opened: set[str] = set()
    for command in plan_of(found):
        words = command.split()
        if words[0] == "open":
            opened.add(command.removeprefix("open "))
        place = " ".join(words[-2:])
        if words[0] in ("take", "move") and place in found.openable:
            assert place in opened, (found.task, command)


def test_the_expert_puts_down_unneeded_things_and_repeats_undone_steps():
    found = draw_household(3, ALL)  # a mug in the coffeemachine, to be cooled, for the countertop
    expert = Expert(found)
    for command in ("go to drawer 1", "open drawer 1", "take fork 1 from drawer 1", "go to shelf 1"):
        expert.on_command(command)
    assert expert.next() == "go to drawer 1"
    expert.on_command("go to drawer 1")
    expert.on_command("close drawer 1")
    assert expert.next() == "open drawer 1"
    for command in ("open drawer 1", "move fork 1 to drawer 1", *plan_of(found)):
        expert.on_command(command)
    assert expert.next() is None
    for command in ("take mug 1 from countertop 1", "heat mug 1 with microwave 1"):
        expert.on_command(command)
    assert expert.next() == "go to fridge 1", "it is hot again"
