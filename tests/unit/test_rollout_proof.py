"""Tokens that come before their worker has told the hash of its new weights."""

from __future__ import annotations

import pytest
from tests.unit.test_rollout_pool import World

from rose.coserve.messages import Fault
from rose.rollout.messages import Cancel, NewVersion, Refused, VersionReady
from rose.rollout.pool import Member


def swapped() -> tuple[World, Member, int]:
    """A worker that has a turn of version 1, and has just swapped to 2 without a word."""
    world = World()
    world.books.publish(NewVersion("1", "folder", hash="one"), 0.0)
    member = world.join("a", "1", hash="one")
    world.ask()
    [turn] = world.turns("a")
    world.says(member, turn.ticket, 5, version="1")
    world.books.publish(NewVersion("2", "folder", hash="two"), 0.0)
    world.says(member, turn.ticket, 6, version="2")
    world.says(member, turn.ticket, 7, version="2", end="stop")
    return world, member, turn.ticket


def test_they_are_taken_when_the_hash_is_right() -> None:
    world, member, _ = swapped()
    assert world.books.scheduler.counts.tokens == 1 and world.books.scheduler.running == 1
    world.books.heard(member, VersionReady("2", hash="two"), 0.0)
    counts = world.books.scheduler.counts
    assert (counts.tokens, counts.ended, counts.off_version) == (3, 1, 0) and not member.withheld


def test_they_are_dropped_when_it_is_another_and_the_turn_goes_on_from_what_it_had() -> None:
    world, member, ticket = swapped()
    world.books.heard(member, VersionReady("2", hash="one"), 0.0)
    counts = world.books.scheduler.counts
    assert (counts.tokens, counts.ended, counts.off_version) == (1, 0, 1)
    assert Cancel(ticket) in world.told["a"] and counts.late == 1
    world.join("b", "2", hash="two")
    [again] = world.turns("b")
    assert again.request.partial.token_ids == (5,)


def test_they_wait_for_a_worker_that_does_not_know_its_hash_yet() -> None:
    world, member, _ = swapped()
    world.beat(member, "2")
    assert world.books.scheduler.counts.tokens == 1 and len(member.withheld) == 2
    world.beat(member, "2", hash="two")
    assert world.books.scheduler.counts.ended == 1


def test_tokens_of_the_weights_before_are_still_taken() -> None:
    world = World()
    world.books.publish(NewVersion("1", "folder", hash="one"), 0.0)
    member = world.join("a", "1", hash="one")
    world.ask()
    world.books.publish(NewVersion("2", "folder", hash="two"), 0.0)
    [turn] = world.turns("a")
    world.beat(member, "2", hash="two")
    world.says(member, turn.ticket, 5, version="1")
    assert world.books.scheduler.counts.tokens == 1, "they were on their way when it swapped"


@pytest.mark.parametrize("how", ["refused", "lost"])
def test_a_turn_that_leaves_meanwhile_loses_nothing_but_time(how: str) -> None:
    world, member, ticket = swapped()
    world.join("b", "2", hash="two")
    if how == "refused":
        world.books.heard(member, Refused(ticket, Fault("Unavailable", "no")), 0.0)
    else:
        world.books.lost(member, 0.0)
    [again] = world.turns("b")
    assert again.request.partial.token_ids == (5,)
    world.books.heard(member, VersionReady("2", hash="two"), 0.0)
    assert world.books.scheduler.counts.tokens == 1
