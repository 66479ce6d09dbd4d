"""Turns on a pool of members that only take notes: placing, moving, fencing, leases, versions."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from rose.api.faults import Fault
from rose.api.requests import VersionSpan
from rose.api.worker_messages import (
    CancelTurn,
    EvictTurn,
    Heartbeat,
    Join,
    Leave,
    NewVersion,
    ToAgent,
    TokensAdded,
    Turn,
    TurnRefused,
    TurnTokens,
    VersionReady,
)
from rose.core.router import Router
from rose.engines.base import Request, Sampling, TokenEvent
from rose.errors import ContextTooLong, QueueFull, RequestRefused, RoseError, Unavailable, VersionUnavailable
from rose.gateway.pool import Pool, PoolWorker
from rose.gateway.turn_scheduler import LOOK_PAST_MAX, Scheduler

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
        self,
        waiting_max: int = 8,
        wait_s: float = 10.0,
        lease_s: float = 5.0,
        max_staleness: int = 0,
        version_wait_s: float = 3.0,
    ) -> None:
        self.pool = Pool(MODEL, lease_s, max_staleness=max_staleness)
        self.scheduler = Scheduler(self.pool, waiting_max=waiting_max, wait_s=wait_s, version_wait_s=version_wait_s)
        self.told: dict[str, list[ToAgent]] = {}
        self.now_s = 0.0

    def join(self, name: str, **changes: Any) -> PoolWorker:
        known: dict[str, Any] = {
            "kind": "dedicated",
            "model": MODEL,
            "version": "0",
            "max_concurrency": 2,
            "kv_tokens": 1000,
        }
        told = self.told[name] = []
        join = Join(name=name, context_tokens=512, **(known | changes))
        member = self.pool.join(join, told.append, self.now_s)
        self.pool.request_newest(member, self.now_s)
        self.scheduler.update_worker(member, self.now_s)
        return member

    def publish(self, version: str, *members: PoolWorker) -> None:
        """Publish a version, which these members run at once."""
        self.pool.publish(NewVersion(version, "folder"), self.now_s)
        for member in self.pool:
            if member in members:
                self.pool.record_version(member, VersionReady(version), self.now_s)
            self.scheduler.update_worker(member, self.now_s)

    def submit(self, name: str, *, demand: dict[str, Any] | None = None, **more: Any) -> Reader:
        reader = Reader()
        request = Request(name, (1, 2, 3), Sampling(max_tokens=8, seed=5, **(demand or {})))
        self.scheduler.submit(request, reader, self.now_s, **more)
        return reader

    def turns(self, name: str) -> list[Turn]:
        return [message for message in self.told[name] if isinstance(message, Turn)]

    def says(self, member: PoolWorker, *pieces: TurnTokens) -> None:
        self.scheduler.receive_tokens(member, TokensAdded(pieces), self.now_s)


def piece(attempt_id: int, *token_ids: int, version: str = "0", end: Any = None) -> TurnTokens:
    return TurnTokens(attempt_id, token_ids, tuple(-0.5 for _ in token_ids), version, end)


def test_a_turn_runs_and_ends_once() -> None:
    world = World()
    member = world.join("a")
    reader = world.submit("t")
    [turn] = world.turns("a")
    assert turn.request.prompt_ids == (1, 2, 3) and turn.request.partial.token_ids == ()
    world.says(member, piece(turn.attempt_id, 7, 8))
    world.says(member, piece(turn.attempt_id, 9, end="stop"), piece(turn.attempt_id, 10, end="stop"))
    assert reader.token_ids == [7, 8, 9] and reader.ends == ["stop"]
    assert world.scheduler.counts.ended == 1 and world.scheduler.counts.late == 1
    assert not member.placement.attempt_ids


def test_a_turn_refused_before_it_began_is_placed_at_once() -> None:
    """A device that its owner holds back refuses dozens at a time; nothing was computed there, so nothing is paced."""
    world = World(waiting_max=100)
    refusing = world.join("a", max_concurrency=40, kv_tokens=100_000)
    for number in range(40):
        world.submit(f"t{number}")
    world.join("b", max_concurrency=64, kv_tokens=100_000)
    for turn in world.turns("a"):
        world.scheduler.receive_refusal(refusing, TurnRefused(turn.attempt_id, Fault("Unavailable", "drained")), 0.0)
    assert len(world.turns("a")) == len(world.turns("b")) == 40 and world.scheduler.waiting == 0


@pytest.mark.parametrize("how", ["evicted", "refused", "lost", "expired"])
def test_a_turn_that_loses_its_worker_continues_from_what_it_had(how: str) -> None:
    world = World(max_staleness=1)
    world.pool.restore([NewVersion("0", "folder"), NewVersion("1", "folder")])
    first = world.join("a")
    reader = world.submit("t", affinity="trajectory")
    [turn] = world.turns("a")
    second = world.join("b")
    world.says(first, piece(turn.attempt_id, 7, 8))
    if how == "evicted":
        first.heartbeat = structs.replace(first.heartbeat, gate_open=False)
        world.scheduler.update_worker(first, 0.0)
        world.says(first, piece(turn.attempt_id, 9, version="1", end="abort"))
    elif how == "refused":
        world.scheduler.receive_refusal(
            first, TurnRefused(turn.attempt_id, Fault("Unavailable", "the owner says no")), 0.0
        )
    else:
        world.now_s = 6.0
        world.pool.record_heartbeat(second, Heartbeat(0, 0, 0, 1000, "0", True), world.now_s)
        assert world.pool.expired(world.now_s) == [first]
        assert world.pool.remove(first)
        world.scheduler.remove_worker(first, world.now_s)
    [again] = world.turns("b")
    had = [7, 8, 9] if how == "evicted" else [7, 8]
    assert list(again.request.partial.token_ids) == had and len(again.request.partial.logprobs) == len(had)
    spans = (VersionSpan("0", 0, 2), VersionSpan("1", 2, 3)) if how == "evicted" else (VersionSpan("0", 0, 2),)
    assert again.request.partial.spans == spans
    assert again.request.sampling == turn.request.sampling, "the same dice"
    world.says(first, piece(turn.attempt_id, 66, end="stop"))  # a late word about an old attempt_id
    world.says(second, piece(again.attempt_id, 10, end="length"))
    assert reader.token_ids == [*had, 10] and reader.ends == ["length"] and not reader.errors


def test_an_evicted_turn_keeps_its_place_before_those_that_came_later() -> None:
    world = World()
    member = world.join("a", max_concurrency=1)
    world.submit("first")
    world.submit("second")
    [turn] = world.turns("a")
    world.says(member, piece(turn.attempt_id, 7, end="abort"))
    assert [sent.request.partial.token_ids for sent in world.turns("a")] == [(), (7,)]
    assert world.scheduler.waiting == 1


def test_a_full_pool_is_not_tried_again_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    choose = Router.choose
    monkeypatch.setattr(Router, "choose", lambda *asked: looks.append(asked[-1]) or choose(*asked))
    world = World(waiting_max=100)
    member = world.join("a", max_concurrency=2)
    for number in range(20):
        world.submit(f"t{number}")
    assert len(looks) <= 4 and world.scheduler.waiting == 18
    world.scheduler.cancel(["t0"], 0.0)
    world.submit("u")
    assert [turn.request.request_id for turn in world.turns("a")] == ["turn-1", "turn-2", "turn-3"]
    world.says(member, piece(world.turns("a")[1].attempt_id, 7, end="stop"))
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


def test_only_paced_turns_need_the_clock() -> None:
    world = World(waiting_max=100)
    members = {name: world.join(name, max_concurrency=20, kv_tokens=100_000) for name in "ab"}
    for number in range(40):
        world.submit(f"t{number}", affinity=f"t{number}")
    lost = members["a"]
    for turn in world.turns("a"):
        world.says(lost, piece(turn.attempt_id, 7))
    assert world.pool.remove(lost)
    world.scheduler.remove_worker(lost, 0.0)
    assert world.scheduler.waiting == 20 and world.scheduler.next_s() is None, "the others are full"
    world.join("c", max_concurrency=20, kv_tokens=100_000)
    assert 0 < world.scheduler.waiting < 20
    wanted_s = world.scheduler.next_s()
    assert wanted_s is not None and wanted_s > 0.0
    before = world.scheduler.waiting
    world.scheduler.place(wanted_s + 0.01)
    assert world.scheduler.waiting < before


def test_reclaimed_turns_are_placed_at_the_pace_of_the_other_workers() -> None:
    """Turns that stalled were placed at two a second, however many workers had nothing to do."""
    world = World(waiting_max=1000)
    stalled = world.join("a", max_concurrency=200, kv_tokens=100_000)
    for number in range(200):
        world.submit(f"t{number}")
    for number in range(50):
        world.join(f"b{number}", max_concurrency=20, kv_tokens=100_000)
    world.scheduler.close_worker(stalled, 60.0, "it does not advance its turns")
    for attempt_id in sorted(stalled.placement.attempt_ids):
        world.scheduler.reclaim(world.scheduler._placed[attempt_id], 0.0)
    world.scheduler.place(0.0)
    assert (wanted_s := world.scheduler.next_s()) is not None and wanted_s < 0.1, "no message announces it"
    world.scheduler.place(1.0)
    assert world.scheduler.waiting == 0


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


def test_an_invalid_turn_is_not_tried_elsewhere() -> None:
    world = World()
    member = world.join("a")
    world.join("b")
    reader = world.submit("t")
    [turn] = world.turns("a")
    world.scheduler.receive_refusal(member, TurnRefused(turn.attempt_id, Fault("ContextTooLong", "too long")), 0.0)
    assert isinstance(reader.errors[0], ContextTooLong) and world.turns("b") == []


def test_cancelled_turns_are_forgotten_everywhere() -> None:
    world = World()
    member = world.join("a", max_concurrency=1)
    readers = [world.submit("runs"), world.submit("waits")]
    world.scheduler.cancel(["runs", "waits", "unknown"], 0.0)
    assert isinstance(world.told["a"][-1], CancelTurn) and world.scheduler.waiting == world.scheduler.running == 0
    world.says(member, piece(1, 5, end="stop"))
    assert not any(reader.events or reader.errors for reader in readers)


def test_many_cancelled_turns_do_not_pile_up() -> None:
    world = World()
    for number in range(500):
        world.submit(str(number))
        world.scheduler.cancel([str(number)], 0.0)
    assert len(world.scheduler._queue) < 100


def test_a_drained_worker_hands_back_and_leaves() -> None:
    world = World()
    member, _ = world.join("a"), world.join("b")
    world.submit("t")
    [turn] = world.turns("a")
    world.scheduler.drain(member, 0.0)
    assert isinstance(world.told["a"][-1], EvictTurn)
    world.says(member, piece(turn.attempt_id, 7, end="abort"))
    assert isinstance(world.told["a"][-1], Leave) and len(world.turns("b")) == 1


def test_turns_go_only_to_workers_with_the_published_version() -> None:
    world = World()
    member = world.join("a")
    world.pool.publish(NewVersion("1", "folder"), 0.0)
    world.scheduler.update_worker(member, 0.0)
    assert world.told["a"] == [NewVersion("1", "folder")]
    world.submit("t")
    assert world.turns("a") == []
    world.pool.record_version(member, VersionReady("1"), 1.0)
    world.scheduler.update_worker(member, 1.0)
    assert [turn.version for turn in world.turns("a")] == ["1"]


def test_a_worker_with_another_version_is_asked_again() -> None:
    world = World()
    member = world.join("a")
    world.pool.publish(NewVersion("1", "folder"), 0.0)
    world.pool.record_heartbeat(member, Heartbeat(0, 0, 0, 1000, "0", True), 1.0)
    assert len(world.told["a"]) == 1, "it is still loading"
    world.pool.record_version(member, VersionReady("1", Fault("ModelError", "no such folder")), 2.0)
    assert "no such folder" in member.trouble
    world.pool.record_heartbeat(member, Heartbeat(0, 0, 0, 1000, "0", True), 8.0)
    assert len(world.told["a"]) == 2, "another try"
    world.pool.record_version(member, VersionReady("1"), 9.0)
    world.pool.record_heartbeat(member, Heartbeat(0, 0, 0, 1000, "0", True), 300.0)
    assert len(world.told["a"]) == 3, "its engine was restarted with the weights of its folder"
    assert world.join("b").weights.requested == "1"


@pytest.mark.parametrize("changes, words", [({"model": "other"}, "other"), ({"name": "a"}, "already")])
def test_a_wrong_model_or_a_taken_name_may_not_join(changes: dict[str, Any], words: str) -> None:
    world = World()
    world.join("a")
    known = {"name": "b", "kind": "borrowed", "model": MODEL, "version": "0", "max_concurrency": 1, "kv_tokens": 1}
    with pytest.raises(RequestRefused, match=words):
        world.pool.join(Join(context_tokens=1, **(known | changes)), lambda message: None, 0.0)


# Log-probabilities of prompts

SCORES = ((-1.0, 1, ((5, -0.5),)), (-2.0, 3, ((6, -0.5),)))


@pytest.mark.parametrize(
    "wanted, scores, tokens_before",
    [
        (None, SCORES, 0),
        (1, SCORES[:1], 0),
        (1, (*SCORES, SCORES[0]), 0),
        (0, SCORES, 0),
        (1, ((-1.0, 1, ()), (-2.0, 3, ((100, -0.5),))), 0),
        (1, SCORES, 1),
    ],
    ids=["unasked", "too few", "too many", "too many of the best", "outside the vocabulary", "a second time"],
)
def test_log_probabilities_that_no_prompt_asked_for_end_a_worker(
    wanted: int | None, scores: Any, tokens_before: int
) -> None:
    world = World()
    world.scheduler._vocabulary = 100
    member = world.join("a")
    world.submit("t", demand={"prompt_logprobs": wanted})
    [turn] = world.turns("a")
    if tokens_before:
        world.says(member, structs.replace(piece(turn.attempt_id, 7), prompt_logprobs=scores))
    with pytest.raises(Unavailable, match="log-probabilities of a prompt"):
        world.says(member, structs.replace(piece(turn.attempt_id, 7), prompt_logprobs=scores))


def test_log_probabilities_of_a_prompt_stay_with_a_turn_that_moves() -> None:
    world = World()
    member = world.join("a")
    reader = world.submit("t", demand={"prompt_logprobs": 1})
    [turn] = world.turns("a")
    world.says(member, structs.replace(piece(turn.attempt_id, 7), prompt_logprobs=SCORES))
    world.says(member, piece(turn.attempt_id, end="abort"))
    turn = world.turns("a")[1]
    world.says(member, piece(turn.attempt_id, 8, end="stop"))
    assert [event.prompt_logprobs for event in reader.events] == [SCORES, ()]


# Demands for weights


def test_a_turn_waits_for_the_weights_that_it_demands() -> None:
    world = World(max_staleness=1)
    a, b = world.join("a"), world.join("b")
    world.publish("1", a, b)
    world.submit("t", demand={"min_weight_version": "2"})
    world.submit("u", demand={"min_weight_version": "1"})
    assert [len(world.turns(name)) for name in "ab"] == [1, 0]
    world.publish("2", b)
    [turn] = world.turns("b")
    assert turn.request.sampling.min_weight_version == "2"


@pytest.mark.parametrize("demand", [{"min_weight_version": "9"}, {"weight_version": "9"}])
def test_weights_that_do_not_come_are_refused_with_the_newest(demand: dict[str, str]) -> None:
    world = World()
    world.publish("1", world.join("a"))
    reader = world.submit("t", demand=demand)
    world.now_s = 3.0
    world.scheduler.expire(world.now_s)
    assert not reader.errors
    world.now_s = 3.1
    world.scheduler.expire(world.now_s)
    [error] = reader.errors
    assert isinstance(error, VersionUnavailable) and error.newest == "1" and "version `9`" in error.what
    assert world.scheduler.waiting == 0


def test_weights_that_are_too_old_for_any_turn_are_refused_at_once() -> None:
    world = World()
    member = world.join("a")
    world.publish("1", member)
    world.publish("2", member)
    reader = world.submit("t", demand={"weight_version": "1"})
    world.now_s = 0.1
    world.scheduler.expire(world.now_s)
    assert [type(error) for error in reader.errors] == [VersionUnavailable]


def test_a_worker_that_has_the_weights_and_no_room_is_waited_for_as_any_other() -> None:
    world = World(version_wait_s=1.0)
    member = world.join("a", max_concurrency=1)
    world.publish("1", member)
    world.submit("t")
    reader = world.submit("u", demand={"weight_version": "1"})
    for now_s, errors in ((5.0, []), (10.1, [Unavailable])):
        world.now_s = now_s
        world.scheduler.expire(now_s)
        assert [type(error) for error in reader.errors] == errors


@pytest.mark.parametrize("demand, is_kept", [({"weight_version": "1"}, False), ({"min_weight_version": "1"}, True)])
def test_tokens_of_other_weights_than_demanded_do_not_count(demand: dict[str, str], is_kept: bool) -> None:
    world = World(max_staleness=1)
    member = world.join("a")
    world.publish("1", member)
    reader = world.submit("t", demand=demand)
    [turn] = world.turns("a")
    assert turn.version == demand.get("weight_version")
    world.says(member, piece(turn.attempt_id, 7, version="1"))
    world.publish("2", member)
    world.says(member, piece(turn.attempt_id, 8, version="2"))
    assert reader.token_ids == ([7, 8] if is_kept else [7])
    assert world.scheduler.waiting == (0 if is_kept else 1) and member.trouble == ""


def test_weights_that_nothing_runs_hold_back_no_other_turn() -> None:
    world = World(waiting_max=200)
    member = world.join("a", max_concurrency=200)
    world.publish("1", member)
    for number in range(LOOK_PAST_MAX + 10):
        world.submit(f"never {number}", demand={"min_weight_version": "9"})
    reader = world.submit("t")
    [turn] = world.turns("a")
    world.says(member, piece(turn.attempt_id, 7, version="1", end="stop"))
    assert reader.ends == ["stop"]
    world.scheduler.cancel([f"never {number}" for number in range(LOOK_PAST_MAX + 10)], world.now_s)
    assert world.scheduler.waiting == 0 and not world.scheduler._versionless


def test_a_full_worker_with_demanded_weights_holds_back_no_other_turn() -> None:
    world = World(waiting_max=200, max_staleness=1)
    a = world.join("a", max_concurrency=1)
    world.publish("1", a)
    world.submit("first", demand={"weight_version": "1"})
    for number in range(LOOK_PAST_MAX + 10):
        world.submit(f"pinned {number}", demand={"weight_version": "1"})
    world.publish("2", world.join("b"))
    assert not world.turns("b")
    world.submit("t")
    assert len(world.turns("b")) == 1


def test_the_weights_that_workers_start_with_are_the_oldest() -> None:
    world = World()
    member = world.join("a", version="0")
    world.submit("t", demand={"min_weight_version": "0"})
    world.submit("u", demand={"weight_version": "0"})
    assert len(world.turns("a")) == 2
    world.publish("1", member)
    for turn in world.turns("a"):
        world.says(member, piece(turn.attempt_id, 7, version="0", end="stop"))
    world.submit("v", demand={"min_weight_version": "0"})
    assert len(world.turns("a")) == 3
