"""Turns on a pool of members that only take notes: placing, moving, fencing, leases, versions."""

from __future__ import annotations

from typing import Any

import pytest

from rose.core.router import Router
from rose.coserve.messages import Fault
from rose.engines.base import Request, Sampling, Span, TokenEvent
from rose.errors import ContextTooLong, QueueFull, RequestRefused, RoseError, Unavailable
from rose.rollout.messages import (
    Beat,
    Cancel,
    Evict,
    Join,
    Leave,
    NewVersion,
    Piece,
    Refused,
    ToAgent,
    Tokens,
    Turn,
    VersionReady,
)
from rose.rollout.pool import Member, Pool
from rose.rollout.scheduler import Scheduler

MODEL = "model"


class Reader:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.errors: list[RoseError] = []

    def put(self, event: TokenEvent) -> None:
        self.events.append(event)

    def fail(self, error: RoseError) -> None:
        self.errors.append(error)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for event in self.events for token_id in event.token_ids]

    @property
    def ends(self) -> list[str]:
        return [event.finish_reason for event in self.events if event.finish_reason is not None]


class World:
    """A scheduler, its pool, and what each member was told."""

    def __init__(
        self, waiting_max: int = 8, wait_s: float = 10.0, lease_s: float = 5.0, max_staleness: int = 0
    ) -> None:
        self.pool = Pool(MODEL, lease_s, max_staleness=max_staleness)
        self.scheduler = Scheduler(self.pool, waiting_max=waiting_max, wait_s=wait_s)
        self.told: dict[str, list[ToAgent]] = {}
        self.now_s = 0.0

    def join(self, name: str, **changes: Any) -> Member:
        known: dict[str, Any] = {"kind": "dedicated", "model": MODEL, "version": "0", "seats": 2, "kv_tokens": 1000}
        told = self.told[name] = []
        join = Join(name=name, context_tokens=512, **(known | changes))
        member = self.pool.join(join, told.append, self.now_s)
        self.pool.catch_up(member, self.now_s)
        self.scheduler.changed(member, self.now_s)
        return member

    def submit(self, name: str, **more: Any) -> Reader:
        reader = Reader()
        request = Request(name, (1, 2, 3), Sampling(max_tokens=8, seed=5))
        self.scheduler.submit(request, reader, self.now_s, **more)
        return reader

    def turns(self, name: str) -> list[Turn]:
        return [message for message in self.told[name] if isinstance(message, Turn)]

    def says(self, member: Member, *pieces: Piece) -> None:
        self.scheduler.heard_tokens(member, Tokens(pieces), self.now_s)


def piece(ticket: int, *token_ids: int, version: str = "0", end: Any = None) -> Piece:
    return Piece(ticket, token_ids, tuple(-0.5 for _ in token_ids), version, end)


def test_a_turn_runs_and_ends_once() -> None:
    world = World()
    member = world.join("a")
    reader = world.submit("t")
    [turn] = world.turns("a")
    assert turn.request.prompt_ids == (1, 2, 3) and turn.request.partial.token_ids == ()
    world.says(member, piece(turn.ticket, 7, 8))
    world.says(member, piece(turn.ticket, 9, end="stop"), piece(turn.ticket, 10, end="stop"))
    assert reader.token_ids == [7, 8, 9] and reader.ends == ["stop"]
    assert world.scheduler.counts.ended == 1 and world.scheduler.counts.late == 1
    assert not member.tickets and member.tokens_held == 0


def test_turns_that_a_worker_refuses_before_they_began_go_elsewhere_at_once() -> None:
    """A device that its owner holds back refuses dozens at a time; nothing was computed there, so nothing is paced."""
    world = World(waiting_max=100)
    refusing = world.join("a", seats=40, kv_tokens=100_000)
    for number in range(40):
        world.submit(f"t{number}")
    world.join("b", seats=64, kv_tokens=100_000)
    for turn in world.turns("a"):
        world.scheduler.heard_refused(refusing, Refused(turn.ticket, Fault("Unavailable", "drained")), 0.0)
    assert len(world.turns("a")) == len(world.turns("b")) == 40 and world.scheduler.waiting == 0


@pytest.mark.parametrize("how", ["evicted", "refused", "lost", "expired"])
def test_a_turn_that_is_taken_from_a_worker_goes_on_elsewhere_from_what_it_had(how: str) -> None:
    world = World(max_staleness=1)
    world.pool.restore([NewVersion("0", "folder"), NewVersion("1", "folder")])
    first = world.join("a")
    reader = world.submit("t", affinity="trajectory")
    [turn] = world.turns("a")
    second = world.join("b")
    world.says(first, piece(turn.ticket, 7, 8))
    if how == "evicted":
        first.gate_open = False
        world.scheduler.changed(first, 0.0)
        world.says(first, piece(turn.ticket, 9, version="1", end="abort"))
    elif how == "refused":
        world.scheduler.heard_refused(first, Refused(turn.ticket, Fault("Unavailable", "the owner says no")), 0.0)
    else:
        world.now_s = 6.0
        world.pool.heard(second, Beat(0, 0, 0, 1000, "0", True), world.now_s)
        assert world.pool.expired(world.now_s) == [first]
        assert world.pool.remove(first)
        world.scheduler.lost(first, world.now_s)
    [again] = world.turns("b")
    had = [7, 8, 9] if how == "evicted" else [7, 8]
    assert list(again.request.partial.token_ids) == had and len(again.request.partial.logprobs) == len(had)
    spans = (Span("0", 0, 2), Span("1", 2, 3)) if how == "evicted" else (Span("0", 0, 2),)
    assert again.request.partial.spans == spans
    assert again.request.sampling == turn.request.sampling, "the same dice"
    world.says(first, piece(turn.ticket, 66, end="stop"))  # a late word about an old ticket
    world.says(second, piece(again.ticket, 10, end="length"))
    assert reader.token_ids == [*had, 10] and reader.ends == ["length"] and not reader.errors


def test_an_evicted_turn_keeps_its_place_before_those_that_came_later() -> None:
    world = World()
    member = world.join("a", seats=1)
    world.submit("first")
    world.submit("second")
    [turn] = world.turns("a")
    world.says(member, piece(turn.ticket, 7, end="abort"))
    assert [sent.request.partial.token_ids for sent in world.turns("a")] == [(), (7,)]
    assert world.scheduler.waiting == 1


def test_a_full_pool_is_not_looked_at_again_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    choose = Router.choose
    monkeypatch.setattr(Router, "choose", lambda *asked: looks.append(asked[-1]) or choose(*asked))
    world = World(waiting_max=100)
    member = world.join("a", seats=2)
    for number in range(20):
        world.submit(f"t{number}")
    assert len(looks) <= 4 and world.scheduler.waiting == 18
    world.scheduler.cancel(["t0"], 0.0)
    world.submit("u")
    assert [turn.request.request_id for turn in world.turns("a")] == ["turn-1", "turn-2", "turn-3"]
    world.says(member, piece(world.turns("a")[1].ticket, 7, end="stop"))
    assert len(world.turns("a")) == 4 and world.scheduler.waiting == 17


def test_an_urgent_turn_is_tried_though_the_others_find_no_room() -> None:
    world = World()
    world.join("a", kv_tokens=30)
    world.submit("first")
    for name in ("long", "longer"):
        request = Request(name, tuple(range(50)), Sampling(max_tokens=8))
        world.scheduler.submit(request, Reader(), 0.0)
    assert world.scheduler.waiting == 2
    world.scheduler.submit(Request("urgent", (1,), Sampling(max_tokens=2), priority=-1), Reader(), 0.0)
    assert world.turns("a")[-1].request.prompt_ids == (1,)


def test_the_clock_is_wanted_by_turns_that_are_paced_and_not_by_those_that_find_no_room() -> None:
    world = World(waiting_max=100)
    members = {name: world.join(name, seats=20, kv_tokens=100_000) for name in "ab"}
    for number in range(40):
        world.submit(f"t{number}", affinity=f"t{number}")
    lost = members["a"]
    for turn in world.turns("a"):
        world.says(lost, piece(turn.ticket, 7))
    assert world.pool.remove(lost)
    world.scheduler.lost(lost, 0.0)
    assert world.scheduler.waiting == 20 and world.scheduler.next_s() is None, "the others are full"
    world.join("c", seats=20, kv_tokens=100_000)
    assert 0 < world.scheduler.waiting < 20
    wanted_s = world.scheduler.next_s()
    assert wanted_s is not None and wanted_s > 0.0
    before = world.scheduler.waiting
    world.scheduler.place(wanted_s + 0.01)
    assert world.scheduler.waiting < before


def test_the_queue_is_bounded_and_waiting_ends() -> None:
    world = World(waiting_max=2)
    readers = [world.submit("1"), world.submit("2")]
    with pytest.raises(QueueFull) as full:
        world.scheduler.check_room()
    assert full.value.retry_after_s > 0
    world.scheduler.expire(9.0)
    assert not readers[0].errors
    world.scheduler.expire(11.0)
    for reader in readers:
        [error] = reader.errors
        assert isinstance(error, Unavailable) and "no worker has joined" in error.what and error.retry_after_s > 0
    assert world.scheduler.waiting == 0


def test_what_is_wrong_with_a_turn_itself_is_not_tried_elsewhere() -> None:
    world = World()
    member = world.join("a")
    world.join("b")
    reader = world.submit("t")
    [turn] = world.turns("a")
    world.scheduler.heard_refused(member, Refused(turn.ticket, Fault("ContextTooLong", "too long")), 0.0)
    assert isinstance(reader.errors[0], ContextTooLong) and world.turns("b") == []


def test_cancelled_turns_are_forgotten_everywhere() -> None:
    world = World()
    member = world.join("a", seats=1)
    readers = [world.submit("runs"), world.submit("waits")]
    world.scheduler.cancel(["runs", "waits", "unknown"], 0.0)
    assert isinstance(world.told["a"][-1], Cancel) and world.scheduler.waiting == world.scheduler.running == 0
    world.says(member, piece(1, 5, end="stop"))
    assert not any(reader.events or reader.errors for reader in readers)


def test_many_cancelled_turns_do_not_pile_up() -> None:
    world = World()
    for number in range(500):
        world.submit(str(number))
        world.scheduler.cancel([str(number)], 0.0)
    assert len(world.scheduler._queue) < 100


def test_a_drained_member_hands_back_and_leaves() -> None:
    world = World()
    member, _ = world.join("a"), world.join("b")
    world.submit("t")
    [turn] = world.turns("a")
    world.scheduler.drain(member, 0.0)
    assert isinstance(world.told["a"][-1], Evict)
    world.says(member, piece(turn.ticket, 7, end="abort"))
    assert isinstance(world.told["a"][-1], Leave) and len(world.turns("b")) == 1


def test_turns_go_only_to_members_with_the_published_version() -> None:
    world = World()
    member = world.join("a")
    world.pool.publish(NewVersion("1", "folder"), 0.0)
    world.scheduler.changed(member, 0.0)
    assert world.told["a"] == [NewVersion("1", "folder")]
    world.submit("t")
    assert world.turns("a") == []
    world.pool.version_ready(member, VersionReady("1"), 1.0)
    world.scheduler.changed(member, 1.0)
    assert [turn.version for turn in world.turns("a")] == ["1"]


def test_a_member_that_shows_another_version_is_told_again() -> None:
    world = World()
    member = world.join("a")
    world.pool.publish(NewVersion("1", "folder"), 0.0)
    world.pool.heard(member, Beat(0, 0, 0, 1000, "0", True), 1.0)
    assert len(world.told["a"]) == 1, "it is still loading"
    world.pool.version_ready(member, VersionReady("1", Fault("ModelError", "no such folder")), 2.0)
    assert "no such folder" in member.trouble
    world.pool.heard(member, Beat(0, 0, 0, 1000, "0", True), 8.0)
    assert len(world.told["a"]) == 2, "another try"
    world.pool.version_ready(member, VersionReady("1"), 9.0)
    world.pool.heard(member, Beat(0, 0, 0, 1000, "0", True), 300.0)
    assert len(world.told["a"]) == 3, "its engine was restarted with the weights of its folder"
    assert world.join("b").told_version == "1"


@pytest.mark.parametrize("changes, words", [({"model": "other"}, "other"), ({"name": "a"}, "already")])
def test_who_may_not_join(changes: dict[str, Any], words: str) -> None:
    world = World()
    world.join("a")
    known = {"name": "b", "kind": "borrowed", "model": MODEL, "version": "0", "seats": 1, "kv_tokens": 1}
    with pytest.raises(RequestRefused, match=words):
        world.pool.join(Join(context_tokens=1, **(known | changes)), lambda message: None, 0.0)
