"""Members, their leases, and which weights they may run."""

from __future__ import annotations

from typing import Any

import pytest

from rose.config.gateway import GatewaySettings
from rose.coserve.mailbox import Mailbox
from rose.engines.base import Sampling
from rose.errors import RequestRefused
from rose.rollout.books import Books
from rose.rollout.messages import Beat, Cancel, Evict, Join, NewVersion, Piece, ToAgent, Tokens, Turn, VersionReady
from rose.rollout.pool import RETRY_S, Member

MODEL = "model"


class World:
    """Books with members that take notes, and a clock that ticks as a gateway's does."""

    def __init__(self, **changes: Any) -> None:
        self.books = Books(MODEL, GatewaySettings(**({"lease_s": 5.0} | changes)))
        self.now_s = 0.0
        self.told: dict[str, list[ToAgent]] = {}
        self.silent: set[str] = set()
        self.shut: set[str] = set()
        self.gated_since_s: dict[str, float] = {}  # by serving, for the moment
        self.asked = 0

    def join(self, name: str, version: str = "0", **changes: Any) -> Member:
        told = self.told[name] = []
        known: dict[str, Any] = {"kind": "dedicated", "seats": 4, "kv_tokens": 10_000, "context_tokens": 4096}
        return self.books.join(
            Join(name=name, model=MODEL, version=version, **(known | changes)), told.append, self.now_s
        )

    def beat(self, member: Member, version: str | None = None, **changes: Any) -> None:
        open_ = member.name not in self.shut
        since_s = self.gated_since_s.get(member.name)
        shut_s = self.now_s - since_s if since_s is not None else None
        beat = Beat(0, 0, 0, member.kv_tokens, version or member.version, open_, shut_s=shut_s, **changes)
        self.books.heard(member, beat, self.now_s)

    def wait(self, seconds: float) -> None:
        """Ticks, and everybody who is not silent says how it is."""
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s += 0.25
            for member in list(self.books.pool):
                if member.name not in self.silent:
                    self.beat(member, hash=member.hash)
            self.books.tick(self.now_s)

    def ask(self, prompt_tokens: int = 10) -> Mailbox:
        reader = Mailbox()
        self.asked += 1
        prompt_ids = (self.asked, *range(prompt_tokens - 1))
        self.books.ask(f"t{self.asked}", prompt_ids, Sampling(max_tokens=100), reader, self.now_s)
        return reader

    def turns(self, name: str) -> list[Turn]:
        return [message for message in self.told[name] if isinstance(message, Turn)]

    def says(self, member: Member, ticket: int, *token_ids: int, version: str = "0", end: Any = None) -> None:
        piece = Piece(ticket, token_ids, (-1.0,) * len(token_ids), version, end)
        self.books.heard(member, Tokens((piece,)), self.now_s)


def kinds(told: list[ToAgent]) -> list[str]:
    return [type(message).__name__ for message in told]


# Leases


def test_a_lease_that_ran_out_is_over_before_anybody_looked() -> None:
    world = World()
    member, other = world.join("a"), world.join("b")
    world.silent.add("a")
    world.ask()
    [turn] = world.turns("a") or world.turns("b")
    holder = member if world.turns("a") else other
    world.silent = {holder.name}
    world.wait(5.0)
    world.now_s += 0.1  # after its lease, before the next tick
    world.says(holder, turn.ticket, 66, end="stop")
    assert world.books.pool.get(holder.name) is None and world.books.scheduler.counts.late == 1
    [again] = world.turns("b" if holder is member else "a")
    assert again.request.partial.token_ids == ()
    world.beat(holder)
    assert world.books.pool.get(holder.name) is None, "a late beat renews nothing"


def test_leases_are_numbered_and_a_name_is_one_members() -> None:
    world = World()
    first = world.join("a")
    with pytest.raises(RequestRefused, match="already"):
        world.join("a")
    world.books.lost(first, 0.0)
    assert world.join("a").lease > first.lease


def test_when_the_gateway_stood_still_nobody_is_to_blame() -> None:
    world = World()
    world.join("a")
    world.ask()
    world.wait(1.0)
    world.now_s += 60.0  # stopped, or the machine slept
    world.books.tick(world.now_s)
    assert world.books.pool.get("a") is not None and kinds(world.told["a"]) == ["Turn"]
    world.silent.add("a")
    world.wait(6.0)
    assert world.books.pool.get("a") is None


# Versions


def test_who_does_not_run_what_it_says_gets_no_turns_and_is_told_again() -> None:
    world = World()
    world.books.publish(NewVersion("1", "folder", hash="right"), 0.0)
    liar = world.join("liar", "1", hash="wrong")
    world.ask()
    assert kinds(world.told["liar"]) == ["NewVersion"] and "weights are others" in liar.trouble
    honest, silent = world.join("honest", "1", hash="right"), world.join("silent", "1")
    assert [world.books.pool.may_run(member) for member in (honest, silent, liar)] == [True, False, False]
    assert kinds(world.told["silent"]) == ["NewVersion"], "who was started anew takes them again, and then it knows"
    assert len(world.turns("honest")) == 1
    world.wait(RETRY_S + 1.0)
    assert kinds(world.told["liar"]) == ["NewVersion"] * 2
    world.books.heard(liar, VersionReady("1", hash="right"), world.now_s)
    assert world.books.pool.may_run(liar) and liar.trouble == ""


@pytest.mark.parametrize("max_staleness, runs", [(0, []), (1, ["1"]), (2, ["0", "1"])])
def test_a_worker_may_be_so_many_versions_behind(max_staleness: int, runs: list[str]) -> None:
    world = World(max_staleness=max_staleness)
    for version in ("0", "1", "2"):
        world.books.publish(NewVersion(version, "folder"), 0.0)
    behind = [world.join(f"at {version}", version) for version in ("0", "1")]
    stranger = world.join("stranger", "other weights")
    assert [member.version for member in behind if world.books.pool.may_run(member)] == runs
    assert not world.books.pool.may_run(stranger)
    assert all(world.told[member.name] == [NewVersion("2", "folder")] for member in behind), "all catch up"
    world.ask()
    [turn] = [turn for name in world.told for turn in world.turns(name)] or [None]
    assert (turn is not None) == bool(runs)
    assert turn is None or turn.version is None, "any version is right that is right for its worker"


def test_strict_means_the_published_version_and_says_so() -> None:
    world = World()
    world.books.publish(NewVersion("1", "folder"), 0.0)
    member = world.join("a", "1")
    world.ask()
    [turn] = world.turns("a")
    assert turn.version == "1"
    world.books.publish(NewVersion("2", "folder"), 0.0)
    world.says(member, turn.ticket, 5, version="1")
    world.books.heard(member, VersionReady("2"), 0.0)
    world.says(member, turn.ticket, 6, version="2")
    assert world.books.scheduler.counts.off_version == 0, "it began within the bound and went on under newer weights"
    world.says(member, turn.ticket, 66, version="0")
    assert world.books.scheduler.counts.off_version == 1 and isinstance(world.told["a"][-2], Cancel)
    again = world.turns("a")[-1]
    assert again.request.partial.token_ids == (5, 6) and [span.version for span in again.request.partial.spans] == [
        "1",
        "2",
    ]


# Gates and stalls


def test_turns_behind_a_shut_gate_go_on_elsewhere_when_there_is_room() -> None:
    world = World(gated_s=1.0)
    member = world.join("a")
    world.ask()
    [turn] = world.turns("a")
    world.says(member, turn.ticket, 5)
    world.shut.add("a")
    world.wait(20.0)
    assert kinds(world.told["a"]) == ["Turn"], "gated is not stalled, and there is nowhere to go"
    other = world.join("b")
    world.wait(0.5)
    assert kinds(world.told["a"]) == ["Turn", "Evict"] and isinstance(world.told["a"][-1], Evict)
    world.says(member, turn.ticket, 6, end="abort")
    [again] = world.turns("b")
    assert again.request.partial.token_ids == (5, 6) and other.tickets == {again.ticket}


def test_the_router_is_told_of_a_gate_that_serving_has_shut_for_the_moment() -> None:
    world = World()
    member, pool = world.join("a", kind="borrowed"), world.books.pool
    world.wait(2.0)
    assert pool.view(member).gated_since_s is None and pool.view(member).opened_s == 0.0
    world.gated_since_s["a"] = 1.75
    world.wait(3.0)
    view = pool.view(member)
    assert view.is_open and (view.gated_since_s, view.opened_s) == (1.75, 0.0)
    del world.gated_since_s["a"]
    world.wait(0.25)
    view = pool.view(member)
    assert view.is_open and (view.gated_since_s, view.opened_s) == (None, 5.25)


def test_a_gate_that_its_owner_shuts_is_shut_since_then_and_opens_with_his_word() -> None:
    world = World()
    member, pool = world.join("a", kind="borrowed"), world.books.pool
    world.gated_since_s["a"] = 0.5
    world.wait(1.0)
    world.shut.add("a")
    world.wait(3.0)
    assert not pool.view(member).is_open and pool.view(member).gated_since_s == 0.5
    world.shut.clear()
    world.gated_since_s["a"] = 4.0
    world.wait(1.0)
    assert pool.view(member).is_open and pool.view(member).gated_since_s == pool.view(member).opened_s == 4.0


def moving(world: World, *tokens: int) -> tuple[Member, Turn]:
    """A turn on `a` that has said so much, a quarter of a second each; its prompt takes three of those."""
    member = world.join("a", kind="borrowed")
    world.ask(3000)
    [turn] = world.turns("a")
    for token in tokens:
        world.wait(0.25)
        world.says(member, turn.ticket, token)
    world.join("b")
    return member, turn


@pytest.mark.parametrize("is_told", [True, False])
def test_a_turn_behind_a_gate_that_opens_soon_is_waited_for_and_nobody_is_to_blame(is_told: bool) -> None:
    world = World()
    member, turn = moving(world, 5, 6)
    if is_told:
        world.gated_since_s["a"] = world.now_s
    world.wait(2.0)
    counts = world.books.scheduler.counts
    if is_told:
        assert kinds(world.told["a"]) == ["Turn"] and counts.stalled == 0 and member.trouble == ""
        world.gated_since_s.clear()
        world.says(member, turn.ticket, 7, end="stop")
        assert counts.ended == 1
    else:
        assert kinds(world.told["a"]) == ["Turn", "Cancel"] and counts.stalled == 1


def test_a_turn_behind_a_gate_that_does_not_open_is_asked_back() -> None:
    world = World()
    moving(world, 5, 6)
    world.gated_since_s["a"] = world.now_s
    world.wait(20.0)
    assert kinds(world.told["a"])[:2] == ["Turn", "Evict"] and world.books.scheduler.counts.stalled == 0


def test_no_more_turns_are_asked_back_than_there_are_seats_before_open_gates() -> None:
    world = World()
    member = world.join("a", kind="borrowed", seats=64)
    for _ in range(5):
        world.ask()
    world.wait(0.25)
    for turn in world.turns("a"):
        world.says(member, turn.ticket, 5)
    world.gated_since_s["a"] = world.now_s
    world.wait(0.25)
    world.join("b", seats=1)
    world.wait(3.0)
    assert kinds(world.told["a"]).count("Evict") == len(world.turns("b")) == 1, "seats behind a shut gate are no room"


def test_time_behind_a_gate_makes_nobody_more_patient_with_its_worker() -> None:
    world = World()
    member, turn = moving(world, 5, 6)
    world.gated_since_s["a"] = world.now_s
    world.wait(2.0)
    world.says(member, turn.ticket, 7)  # it has opened, and no beat has said so yet
    world.gated_since_s.clear()
    world.wait(2.0)
    assert world.books.scheduler.counts.stalled == 1, "four times as long as between two tokens, not as the gate"


def test_a_member_that_does_not_hand_back_has_lost_the_turn() -> None:
    world = World(gated_s=1.0)
    member, _ = world.join("a"), world.ask()
    [turn] = world.turns("a")
    world.shut.add("a")
    world.join("b")
    world.wait(6.0)
    assert kinds(world.told["a"]) == ["Turn", "Evict", "Cancel"] and len(world.turns("b")) == 1
    world.says(member, turn.ticket, 66, end="stop")
    assert world.books.scheduler.counts.late == 1


def test_a_stalled_turn_goes_on_elsewhere_and_its_worker_is_left_alone_longer_each_time() -> None:
    world = World(router="sticky")
    member = world.join("a")
    readers = [world.ask() for _ in range(2)]
    world.wait(0.25)
    for turn in world.turns("a"):
        world.says(member, turn.ticket, 5)
    world.wait(0.25)
    for turn in world.turns("a"):
        world.says(member, turn.ticket, 6)
    other = world.join("b")
    world.wait(5.0)  # it beats, and yet nothing moves
    assert world.books.scheduler.counts.stalled == 2 and "does not get on" in member.trouble
    assert [turn.request.partial.token_ids for turn in world.turns("b")] == [(5, 6)] * 2
    first_s = member.closed_until_s
    assert first_s > world.now_s - 5.0
    for turn in world.turns("a"):
        world.says(member, turn.ticket, 66, end="stop")
    for turn in world.turns("b"):
        world.says(other, turn.ticket, 7, end="stop")
    world.books.settle()
    assert [sum((event.token_ids for event in reader._events), ()) for reader in readers] == [(5, 6, 7)] * 2


def test_the_only_worker_is_never_called_stalled() -> None:
    world = World()
    world.join("a")
    world.ask()
    world.wait(100.0)
    assert kinds(world.told["a"]) == ["Turn"] and world.books.scheduler.counts.stalled == 0
