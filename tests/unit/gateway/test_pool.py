"""The pool of workers: leases, versions, hashes, and tokens that are withheld until their hash is known."""

from __future__ import annotations

import pytest
from tests.unit.core_world import World, kinds

from rose.api.faults import Fault
from rose.api.worker_messages import (
    CancelTurn,
    NewVersion,
    TurnRefused,
    VersionReady,
)
from rose.errors import RequestRefused
from rose.gateway.pool import RETRY_S, PoolWorker


def swapped() -> tuple[World, PoolWorker, int]:
    """A worker that has a turn of version 1, and has just swapped to 2 without a word."""
    world = World()
    world.core.publish(NewVersion("1", "folder", hash="one"), 0.0)
    member = world.join("a", "1", hash="one")
    world.ask()
    [turn] = world.turns("a")
    world.says(member, turn.attempt_id, 5, version="1")
    world.core.publish(NewVersion("2", "folder", hash="two"), 0.0)
    world.says(member, turn.attempt_id, 6, version="2")
    world.says(member, turn.attempt_id, 7, version="2", end="stop")
    return world, member, turn.attempt_id


def test_an_expired_lease_ends_before_the_next_tick() -> None:
    world = World()
    member, other = world.join("a"), world.join("b")
    world.silent.add("a")
    world.ask()
    [turn] = world.turns("a") or world.turns("b")
    holder = member if world.turns("a") else other
    world.silent = {holder.name}
    world.wait(5.0)
    world.now_s += 0.1  # after its lease, before the next tick
    world.says(holder, turn.attempt_id, 66, end="stop")
    assert world.core.pool.get(holder.name) is None and world.core.scheduler.counts.late == 1
    [again] = world.turns("b" if holder is member else "a")
    assert again.request.partial.token_ids == ()
    world.beat(holder)
    assert world.core.pool.get(holder.name) is None, "a late beat renews nothing"


def test_leases_are_numbered_and_names_are_unique() -> None:
    world = World()
    first = world.join("a")
    with pytest.raises(RequestRefused, match="already"):
        world.join("a")
    world.core.remove_worker(first, 0.0)
    assert world.join("a").lease.number > first.lease.number


def test_a_worker_with_a_wrong_hash_gets_no_turns_and_is_asked_again() -> None:
    world = World()
    world.core.publish(NewVersion("1", "folder", hash="right"), 0.0)
    liar = world.join("liar", "1", hash="wrong")
    world.ask()
    assert kinds(world.told["liar"]) == ["NewVersion"] and "weights have the hash" in liar.trouble
    honest, silent = world.join("honest", "1", hash="right"), world.join("silent", "1")
    assert [world.core.pool.may_run(member) for member in (honest, silent, liar)] == [True, False, False]
    assert kinds(world.told["silent"]) == ["NewVersion"], "who was started anew takes them again, and then it knows"
    assert len(world.turns("honest")) == 1
    world.wait(RETRY_S + 1.0)
    assert kinds(world.told["liar"]) == ["NewVersion"] * 2
    world.core.receive(liar, VersionReady("1", hash="right"), world.now_s)
    assert world.core.pool.may_run(liar) and liar.trouble == ""


@pytest.mark.parametrize("max_staleness, runs", [(0, []), (1, ["1"]), (2, ["0", "1"])])
def test_a_worker_may_be_max_staleness_versions_behind(max_staleness: int, runs: list[str]) -> None:
    world = World(max_staleness=max_staleness)
    for version in ("0", "1", "2"):
        world.core.publish(NewVersion(version, "folder"), 0.0)
    behind = [world.join(f"at {version}", version) for version in ("0", "1")]
    stranger = world.join("stranger", "other weights")
    assert [member.weights.version for member in behind if world.core.pool.may_run(member)] == runs
    assert not world.core.pool.may_run(stranger)
    assert all(world.told[member.name] == [NewVersion("2", "folder")] for member in behind), "all catch up"
    world.ask()
    [turn] = [turn for name in world.told for turn in world.turns(name)] or [None]
    assert (turn is not None) == bool(runs)
    assert turn is None or turn.version is None, "any version is right that is right for its worker"


def test_a_strict_turn_names_the_published_version() -> None:
    world = World()
    world.core.publish(NewVersion("1", "folder"), 0.0)
    member = world.join("a", "1")
    world.ask()
    [turn] = world.turns("a")
    assert turn.version == "1"
    world.core.publish(NewVersion("2", "folder"), 0.0)
    world.says(member, turn.attempt_id, 5, version="1")
    world.core.receive(member, VersionReady("2"), 0.0)
    world.says(member, turn.attempt_id, 6, version="2")
    assert world.core.scheduler.counts.off_version == 0, "it began within the bound and went on under newer weights"
    world.says(member, turn.attempt_id, 66, version="0")
    assert world.core.scheduler.counts.off_version == 1 and isinstance(world.told["a"][-2], CancelTurn)
    again = world.turns("a")[-1]
    assert again.request.partial.token_ids == (5, 6) and [span.version for span in again.request.partial.spans] == [
        "1",
        "2",
    ]


def test_the_router_sees_a_gate_that_serving_blocks() -> None:
    world = World()
    member, pool = world.join("a", kind="borrowed"), world.core.pool
    world.wait(2.0)
    assert pool.view(member).blocked_since_s is None and pool.view(member).opened_s == 0.0
    world.gated_since_s["a"] = 1.75
    world.wait(3.0)
    view = pool.view(member)
    assert view.is_open and (view.blocked_since_s, view.opened_s) == (1.75, 0.0)
    del world.gated_since_s["a"]
    world.wait(0.25)
    view = pool.view(member)
    assert view.is_open and (view.blocked_since_s, view.opened_s) == (None, 5.25)


def test_a_gate_closed_by_the_owner_opens_by_the_owner() -> None:
    world = World()
    member, pool = world.join("a", kind="borrowed"), world.core.pool
    world.gated_since_s["a"] = 0.5
    world.wait(1.0)
    world.shut.add("a")
    world.wait(3.0)
    assert not pool.view(member).is_open and pool.view(member).blocked_since_s == 0.5
    world.shut.clear()
    world.gated_since_s["a"] = 4.0
    world.wait(1.0)
    assert pool.view(member).is_open and pool.view(member).blocked_since_s == pool.view(member).opened_s == 4.0


def test_withheld_tokens_are_accepted_when_the_hash_is_right() -> None:
    world, member, _ = swapped()
    assert world.core.scheduler.counts.tokens == 1 and world.core.scheduler.running == 1
    world.core.receive(member, VersionReady("2", hash="two"), 0.0)
    counts = world.core.scheduler.counts
    assert (counts.tokens, counts.ended, counts.off_version) == (3, 1, 0) and not member.weights.withheld


def test_withheld_tokens_are_dropped_when_the_hash_is_wrong() -> None:
    world, member, attempt_id = swapped()
    world.core.receive(member, VersionReady("2", hash="one"), 0.0)
    counts = world.core.scheduler.counts
    assert (counts.tokens, counts.ended, counts.off_version) == (1, 0, 1)
    assert CancelTurn(attempt_id) in world.told["a"] and counts.late == 1
    world.join("b", "2", hash="two")
    [again] = world.turns("b")
    assert again.request.partial.token_ids == (5,)


def test_tokens_are_withheld_until_the_worker_reports_its_hash() -> None:
    world, member, _ = swapped()
    world.beat(member, "2")
    assert world.core.scheduler.counts.tokens == 1 and len(member.weights.withheld) == 2
    world.beat(member, "2", hash="two")
    assert world.core.scheduler.counts.ended == 1


def test_tokens_of_the_previous_weights_are_still_accepted() -> None:
    world = World()
    world.core.publish(NewVersion("1", "folder", hash="one"), 0.0)
    member = world.join("a", "1", hash="one")
    world.ask()
    world.core.publish(NewVersion("2", "folder", hash="two"), 0.0)
    [turn] = world.turns("a")
    world.beat(member, "2", hash="two")
    world.says(member, turn.attempt_id, 5, version="1")
    assert world.core.scheduler.counts.tokens == 1, "they were on their way when it swapped"


@pytest.mark.parametrize("how", ["refused", "lost"])
def test_a_turn_that_leaves_with_withheld_tokens_continues(how: str) -> None:
    world, member, attempt_id = swapped()
    world.join("b", "2", hash="two")
    if how == "refused":
        world.core.receive(member, TurnRefused(attempt_id, Fault("Unavailable", "no")), 0.0)
    else:
        world.core.remove_worker(member, 0.0)
    [again] = world.turns("b")
    assert again.request.partial.token_ids == (5,)
    world.core.receive(member, VersionReady("2", hash="two"), 0.0)
    assert world.core.scheduler.counts.tokens == 1
