"""Devices come and go as the core decide: wanted, told, and written down."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core_world import World

from rose.api.worker_messages import Activate, Heartbeat, Park, ToAgent, Turn
from rose.core.provision import Cycle
from rose.gateway.pool import PoolWorker
from rose.gateway.provisioning import STUCK_S, TELL_AGAIN_S, USELESS


class Lending(World):
    """Borrowed devices that obey, unless they are deaf, and whose owners have a say."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**({"return_after_s": 5.0} | changes))
        self.held: set[str] = set()
        self.deaf: set[str] = set()

    def lent(self, name: str, **changes: Any) -> PoolWorker:
        member = self.join(name, kind="borrowed", **changes)
        self.beat(member)
        return member

    def beat(self, member: PoolWorker, version: str | None = None, **changes: Any) -> None:
        if member.kind == "dedicated":
            super().beat(member, version, **changes)
            return
        orders = [message for message in self.told[member.name] if isinstance(message, Activate | Park)]
        is_parked = bool(orders) and isinstance(orders[-1], Park) and member.name not in self.deaf
        is_offered = member.name not in self.held
        place: Any = "parked" if is_parked or not is_offered else "resident"
        beat = Heartbeat(
            0, 0, 0, member.heartbeat.kv_tokens, member.weights.version,
            place == "resident" and member.name not in self.shut,
            place=place, is_offered=is_offered,
            can_park=True, hash=member.weights.hash,
        )  # fmt: skip
        self.core.receive(member, beat, self.now_s)

    def orders(self, name: str) -> list[type[ToAgent]]:
        return [type(message) for message in self.told[name] if isinstance(message, Activate | Park)]

    def end_all(self, member: PoolWorker) -> None:
        for attempt_id in sorted(member.placement.attempt_ids):
            self.says(member, attempt_id, 1, end="stop")

    @property
    def cycles(self) -> list[Cycle]:
        return self.core.provisioning.cycles


def test_a_device_is_borrowed_for_work_and_parked_without() -> None:
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
    assert world.orders("a") == [Park] and member.heartbeat.place == "parked"
    world.ask()
    assert len(world.turns("a")) == 1, "not before it is there"
    world.wait(3.0)
    assert world.orders("a") == [Park, Activate] and len(world.turns("a")) == 2
    first, second = world.cycles
    assert first.usable_s == 0.0 and first.returned_s is not None and first.released_s is not None
    assert "no work" in first.why_returned and second.wanted_s <= second.chosen_s <= second.usable_s


def test_the_cap_holds_and_idle_devices_are_returned_first() -> None:
    world = Lending(borrowed_max=1)
    busy = world.lent("busy")
    world.ask()
    world.lent("idle")
    world.wait(1.0)
    assert (world.orders("busy"), world.orders("idle")) == ([], [Park])
    world.core.remove_worker(busy, world.now_s)
    world.wait(4.0)
    assert world.orders("idle") == [Park, Activate] and len(world.turns("idle")) == 1
    assert [cycle.why_returned for cycle in world.cycles if cycle.name == "busy"] == ["it is gone"]


def test_a_cap_of_zero_borrows_nothing() -> None:
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
    assert (len(first.placement.attempt_ids), len(second.placement.attempt_ids)) == (4, 0)
    world.core.remove_worker(first, world.now_s)
    world.wait(1.0)
    assert len(second.placement.attempt_ids) == 4


def test_the_owner_takes_precedence() -> None:
    world = Lending()
    member = world.lent("a")
    world.ask()
    world.held.add("a")
    world.wait(10.0)
    assert world.orders("a") == [] and world.core.scheduler.counts.refused == 0
    assert [cycle.why_returned for cycle in world.cycles] == ["its owner wants it back"]
    world.ask()
    world.wait(10.0)
    assert len(world.turns("a")) == 1, "nothing is offered to a device that is held back"
    world.held.clear()
    world.wait(0.25)
    assert len(world.turns("a")) == 2, "and at once when it is offered again"
    assert member.provisioning.is_wanted and len(world.cycles) == 2


def test_a_device_held_back_at_first_is_used_when_offered() -> None:
    world = Lending()
    world.held.add("a")
    world.lent("a", place="parked", is_offered=False)
    world.ask()
    world.wait(2.0)
    assert world.turns("a") == [] and world.cycles == []
    world.held.clear()
    world.wait(0.5)
    assert len(world.turns("a")) == 1


def test_a_device_that_does_not_obey_is_asked_again() -> None:
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
    assert world.orders("b") == [Park] and len(broken.placement.attempt_ids) == 1
    world.shut.add("a")
    world.wait(9.0)
    assert broken.provisioning.is_wanted, "it may be a burst of its users"
    world.wait(4.0)
    assert not broken.provisioning.is_wanted and world.orders("b") == [Park, Activate]
    assert [cycle.why_returned for cycle in world.cycles] == [USELESS, "2 are borrowed, 1 are allowed", ""]


def test_a_device_whose_turns_stall_is_exchanged() -> None:
    world = Lending(borrowed_max=1)
    stuck = world.lent("a")
    world.lent("b")
    world.ask()
    world.wait(STUCK_S + 5.0)
    assert stuck.provisioning.is_wanted and world.turns("b") == []
    world.wait(15.0)
    assert not stuck.provisioning.is_wanted and len(world.turns("b")) == 1


def test_a_hanging_dedicated_worker_does_not_prevent_borrowing() -> None:
    world = Lending()
    world.join("d")
    world.ask()
    world.lent("a", place="parked")
    world.told["a"].append(Park(""))
    world.wait(4.0)
    assert Activate not in world.orders("a")
    world.wait(10.0)
    assert Activate in world.orders("a") and len(world.turns("a")) == 1, "the turn that hangs goes on there"


def test_a_worker_that_cannot_park_is_never_asked_to() -> None:
    world = World(borrowed_max=0)
    world.join("old", kind="borrowed")
    world.ask()
    world.wait(3.0)
    assert all(isinstance(message, Turn) for message in world.told["old"])
    [cycle] = world.core.provisioning.cycles
    assert cycle.released_s is not None


@pytest.mark.parametrize("turns, is_borrowed", [(2, False), (3, True)])
def test_a_device_is_borrowed_for_more_turns_than_others_handle(turns: int, is_borrowed: bool) -> None:
    world = Lending()
    world.lent("a", place="parked")
    world.told["a"].append(Park(""))
    world.join("d")
    for _ in range(turns):
        world.ask()
    world.wait(2.0)
    assert (Activate in world.orders("a")) == is_borrowed
