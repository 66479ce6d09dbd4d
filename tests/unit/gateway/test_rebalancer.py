"""Turns move away from workers where they do not advance."""

from __future__ import annotations

import pytest
from tests.unit.core_world import World, kinds

from rose.api.worker_messages import (
    EvictTurn,
    Turn,
)
from rose.gateway.pool import PoolWorker


def moving(world: World, *tokens: int) -> tuple[PoolWorker, Turn]:
    """A turn on `a` that has said so much, a quarter of a second each; its prompt takes three of those."""
    member = world.join("a", kind="borrowed")
    world.ask(3000)
    [turn] = world.turns("a")
    for token in tokens:
        world.wait(0.25)
        world.says(member, turn.attempt_id, token)
    world.join("b")
    return member, turn


def test_turns_behind_a_blocked_gate_move_if_there_is_room() -> None:
    world = World(gated_s=1.0)
    member = world.join("a")
    world.ask()
    [turn] = world.turns("a")
    world.says(member, turn.attempt_id, 5)
    world.shut.add("a")
    world.wait(20.0)
    assert kinds(world.told["a"]) == ["Turn"], "gated is not stalled, and there is nowhere to go"
    other = world.join("b")
    world.wait(0.5)
    assert kinds(world.told["a"]) == ["Turn", "EvictTurn"] and isinstance(world.told["a"][-1], EvictTurn)
    world.says(member, turn.attempt_id, 6, end="abort")
    [again] = world.turns("b")
    assert again.request.partial.token_ids == (5, 6) and other.placement.attempt_ids == {again.attempt_id}


@pytest.mark.parametrize("is_told", [True, False])
def test_a_turn_behind_a_gate_that_opens_soon_stays(is_told: bool) -> None:
    world = World()
    member, turn = moving(world, 5, 6)
    if is_told:
        world.gated_since_s["a"] = world.now_s
    world.wait(2.0)
    counts = world.core.scheduler.counts
    if is_told:
        assert kinds(world.told["a"]) == ["Turn"] and counts.stalled == 0 and member.trouble == ""
        world.gated_since_s.clear()
        world.says(member, turn.attempt_id, 7, end="stop")
        assert counts.ended == 1
    else:
        assert kinds(world.told["a"]) == ["Turn", "CancelTurn"] and counts.stalled == 1


def test_a_turn_behind_a_gate_that_stays_blocked_is_asked_back() -> None:
    world = World()
    moving(world, 5, 6)
    world.gated_since_s["a"] = world.now_s
    world.wait(20.0)
    assert kinds(world.told["a"])[:2] == ["Turn", "EvictTurn"] and world.core.scheduler.counts.stalled == 0


def test_no_more_turns_are_asked_back_than_others_have_room_for() -> None:
    world = World()
    member = world.join("a", kind="borrowed", max_concurrency=64)
    for _ in range(5):
        world.ask()
    world.wait(0.25)
    for turn in world.turns("a"):
        world.says(member, turn.attempt_id, 5)
    world.gated_since_s["a"] = world.now_s
    world.wait(0.25)
    world.join("b", max_concurrency=1)
    world.wait(3.0)
    assert kinds(world.told["a"]).count("EvictTurn") == len(world.turns("b")) == 1, (
        "seats behind a shut gate are no room"
    )


def test_blocked_time_does_not_count_as_a_stall() -> None:
    world = World()
    member, turn = moving(world, 5, 6)
    world.gated_since_s["a"] = world.now_s
    world.wait(2.0)
    world.says(member, turn.attempt_id, 7)  # it has opened, and no beat has said so yet
    world.gated_since_s.clear()
    world.wait(2.0)
    assert world.core.scheduler.counts.stalled == 1, "four times as long as between two tokens, not as the gate"


def test_a_worker_that_does_not_hand_back_loses_the_turn() -> None:
    world = World(gated_s=1.0)
    member, _ = world.join("a"), world.ask()
    [turn] = world.turns("a")
    world.shut.add("a")
    world.join("b")
    world.wait(6.0)
    assert kinds(world.told["a"]) == ["Turn", "EvictTurn", "CancelTurn"] and len(world.turns("b")) == 1
    world.says(member, turn.attempt_id, 66, end="stop")
    assert world.core.scheduler.counts.late == 1


def test_a_stalled_turn_moves_and_its_worker_pauses_longer_each_time() -> None:
    world = World(router="paper")
    member = world.join("a")
    readers = [world.ask() for _ in range(2)]
    world.wait(0.25)
    for turn in world.turns("a"):
        world.says(member, turn.attempt_id, 5)
    world.wait(0.25)
    for turn in world.turns("a"):
        world.says(member, turn.attempt_id, 6)
    other = world.join("b")
    world.wait(5.0)  # it beats, and yet nothing moves
    assert world.core.scheduler.counts.stalled == 2 and "does not advance" in member.trouble
    assert [turn.request.partial.token_ids for turn in world.turns("b")] == [(5, 6)] * 2
    first_s = member.placement.closed_until_s
    assert first_s > world.now_s - 5.0
    for turn in world.turns("a"):
        world.says(member, turn.attempt_id, 66, end="stop")
    for turn in world.turns("b"):
        world.says(other, turn.attempt_id, 7, end="stop")
    world.core.ledger.commit()
    assert [sum((event.token_ids for event in reader._events), ()) for reader in readers] == [(5, 6, 7)] * 2


def test_the_only_worker_is_never_called_stalled() -> None:
    world = World()
    world.join("a")
    world.ask()
    world.wait(100.0)
    assert kinds(world.told["a"]) == ["Turn"] and world.core.scheduler.counts.stalled == 0
