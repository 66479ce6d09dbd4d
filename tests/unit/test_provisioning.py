"""Devices come and go as the books decide: wanted, told, and written down."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.test_rollout_pool import World

from rose.core.allocation import Cycle
from rose.rollout.messages import Activate, Beat, Park, ToAgent, Turn
from rose.rollout.pool import Member
from rose.rollout.provisioning import STUCK_S, TELL_AGAIN_S, USELESS


class Lending(World):
    """Borrowed devices that obey, unless they are deaf, and whose owners have a say."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**({"return_after_s": 5.0} | changes))
        self.held: set[str] = set()
        self.deaf: set[str] = set()

    def lent(self, name: str, **changes: Any) -> Member:
        member = self.join(name, kind="borrowed", **changes)
        self.beat(member)
        return member

    def beat(self, member: Member, version: str | None = None, **changes: Any) -> None:
        if member.kind == "dedicated":
            super().beat(member, version, **changes)
            return
        orders = [message for message in self.told[member.name] if isinstance(message, Activate | Park)]
        is_parked = bool(orders) and isinstance(orders[-1], Park) and member.name not in self.deaf
        is_offered = member.name not in self.held
        place: Any = "parked" if is_parked or not is_offered else "resident"
        beat = Beat(
            0, 0, 0, member.kv_tokens, member.version, place == "resident" and member.name not in self.shut,
            place=place, is_offered=is_offered,
            can_park=True, hash=member.hash,
        )  # fmt: skip
        self.books.heard(member, beat, self.now_s)

    def orders(self, name: str) -> list[type[ToAgent]]:
        return [type(message) for message in self.told[name] if isinstance(message, Activate | Park)]

    def end_all(self, member: Member) -> None:
        for ticket in sorted(member.tickets):
            self.says(member, ticket, 1, end="stop")

    @property
    def cycles(self) -> list[Cycle]:
        return self.books.provisioning.cycles


def test_a_device_is_borrowed_while_there_is_work_and_parked_when_there_has_been_none() -> None:
    world = Lending()
    member = world.lent("a")
    world.ask()
    assert len(world.turns("a")) == 1
    world.wait(60.0)
    assert world.orders("a") == [], "it has a turn"
    world.end_all(member)
    world.wait(4.0)
    assert world.orders("a") == []
    world.wait(3.0)
    assert world.orders("a") == [Park] and member.place == "parked"
    world.ask()
    assert len(world.turns("a")) == 1, "not before it is there"
    world.wait(3.0)
    assert world.orders("a") == [Park, Activate] and len(world.turns("a")) == 2
    first, second = world.cycles
    assert first.usable_s == 0.0 and first.returned_s is not None and first.released_s is not None
    assert "no work" in first.why_returned and second.wanted_s <= second.chosen_s <= second.usable_s


def test_never_more_than_the_cap_and_those_that_do_nothing_go_first() -> None:
    world = Lending(borrowed_max=1)
    busy = world.lent("busy")
    world.ask()
    world.lent("idle")
    world.wait(1.0)
    assert (world.orders("busy"), world.orders("idle")) == ([], [Park])
    world.books.lost(busy, world.now_s)
    world.wait(4.0)
    assert world.orders("idle") == [Park, Activate] and len(world.turns("idle")) == 1
    assert [cycle.why_returned for cycle in world.cycles if cycle.name == "busy"] == ["it is gone"]


def test_none_is_borrowed_where_none_may_be() -> None:
    world = Lending(borrowed_max=0, wait_s=5.0)
    world.lent("a")
    world.wait(1.0)
    world.ask()
    world.wait(3.0)
    assert world.orders("a") == [Park] and world.turns("a") == []


def test_dedicated_workers_over_the_cap_are_not_used() -> None:
    world = World(dedicated_max=1)
    first, second = world.join("a"), world.join("b")
    world.wait(0.5)
    for _ in range(4):
        world.ask()
    assert (len(first.tickets), len(second.tickets)) == (4, 0)
    world.books.lost(first, world.now_s)
    world.wait(1.0)
    assert len(second.tickets) == 4


def test_what_the_owner_says_goes_before() -> None:
    world = Lending()
    member = world.lent("a")
    world.ask()
    world.held.add("a")
    world.wait(10.0)
    assert world.orders("a") == [] and world.books.scheduler.counts.refused == 0
    assert [cycle.why_returned for cycle in world.cycles] == ["its owner wants it back"]
    world.ask()
    world.wait(10.0)
    assert len(world.turns("a")) == 1, "nothing is offered to a device that is held back"
    world.held.clear()
    world.wait(0.25)
    assert len(world.turns("a")) == 2, "and at once when it is offered again"
    assert member.is_wanted and len(world.cycles) == 2


def test_a_device_that_is_held_back_when_it_joins_is_used_when_it_is_offered() -> None:
    world = Lending()
    world.held.add("a")
    world.lent("a", place="parked", is_offered=False)
    world.ask()
    world.wait(2.0)
    assert world.turns("a") == [] and world.cycles == []
    world.held.clear()
    world.wait(0.5)
    assert len(world.turns("a")) == 1


def test_who_does_not_do_what_it_is_told_is_told_again() -> None:
    world = Lending(borrowed_max=0)
    world.deaf.add("a")
    world.lent("a")
    world.wait(1.0)
    assert world.orders("a") == [Park]
    world.wait(TELL_AGAIN_S)
    assert world.orders("a") == [Park, Park]
    [cycle] = world.cycles
    assert cycle.returned_s is not None and cycle.released_s is None, "it is still on its way"


def test_a_device_that_can_have_no_turns_is_exchanged_for_another() -> None:
    world = Lending(borrowed_max=1)
    broken = world.lent("a")
    world.lent("b")
    world.ask()
    world.wait(1.0)
    assert world.orders("b") == [Park] and len(broken.tickets) == 1
    world.shut.add("a")
    world.wait(9.0)
    assert broken.is_wanted, "it may be a burst of its users"
    world.wait(4.0)
    assert not broken.is_wanted and world.orders("b") == [Park, Activate]
    assert [cycle.why_returned for cycle in world.cycles] == [USELESS, "2 are borrowed, 1 are allowed", ""]


def test_so_is_one_whose_turns_do_not_get_on() -> None:
    world = Lending(borrowed_max=1)
    stuck = world.lent("a")
    world.lent("b")
    world.ask()
    world.wait(STUCK_S + 5.0)
    assert stuck.is_wanted and world.turns("b") == []
    world.wait(15.0)
    assert not stuck.is_wanted and len(world.turns("b")) == 1


def test_a_dedicated_worker_that_hangs_keeps_nobody_from_helping() -> None:
    world = Lending()
    world.join("d")
    world.ask()
    world.lent("a", place="parked")
    world.told["a"].append(Park(""))
    world.wait(4.0)
    assert Activate not in world.orders("a")
    world.wait(10.0)
    assert Activate in world.orders("a") and len(world.turns("a")) == 1, "the turn that hangs goes on there"


def test_a_worker_that_knows_nothing_of_parking_is_never_told() -> None:
    world = World(borrowed_max=0)
    world.join("old", kind="borrowed")
    world.ask()
    world.wait(3.0)
    assert all(isinstance(message, Turn) for message in world.told["old"])
    [cycle] = world.books.provisioning.cycles
    assert cycle.released_s is not None


@pytest.mark.parametrize("turns, is_borrowed", [(2, False), (3, True)])
def test_a_parked_device_is_called_for_more_turns_than_the_others_do_well(turns: int, is_borrowed: bool) -> None:
    world = Lending()
    world.lent("a", place="parked")
    world.told["a"].append(Park(""))
    world.join("d")
    for _ in range(turns):
        world.ask()
    world.wait(2.0)
    assert (Activate in world.orders("a")) == is_borrowed
