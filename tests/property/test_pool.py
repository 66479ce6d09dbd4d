"""Whatever members do, in whatever order: a turn runs in one place, and a seat is one turn's."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rose.api.faults import Fault
from rose.api.worker_messages import (
    Activate,
    CancelTurn,
    EvictTurn,
    Heartbeat,
    Join,
    Leave,
    NewVersion,
    Park,
    TokensAdded,
    Turn,
    TurnRefused,
    TurnTokens,
    VersionReady,
)
from rose.config.server_settings import GatewaySettings
from rose.core.routing_rules import ROUTER_KINDS
from rose.engines.base import Request, Sampling, TokenEvent
from rose.errors import QueueFull, RequestRefused, RoseError
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.ledger import NoLedger
from rose.gateway.pool import PoolWorker

MODEL = "model"
MEMBERS = st.sampled_from("abcd")
ANSWER_TOKENS = 5


class Reader:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[Any] = []

    def put(self, event: TokenEvent) -> None:
        assert not self.ends, "nothing comes after the end"
        self.tokens += event.token_ids
        if event.finish_reason is not None:
            self.ends.append(event.finish_reason)

    def fail(self, error: RoseError) -> None:
        assert not self.ends, "a turn ends once"
        self.ends.append(error)


class Members(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(ROUTER_KINDS), max_staleness=st.integers(0, 1))
    def start(self, kind: Any, max_staleness: int) -> None:
        settings = GatewaySettings(
            lease_s=3.0, wait_s=20.0, max_waiting=6, router=kind, max_staleness=max_staleness, gated_s=0.5,
            borrowed_max=2, return_after_s=1.0,
        )  # fmt: skip
        self.core = GatewayCore(MODEL, settings, NoLedger(7))
        self.now_s = 0.0
        self.members: dict[str, PoolWorker] = {}
        self.running: dict[str, dict[int, Turn]] = {}  # by member, what it was told to run and did not give back
        self.shut: set[str] = set()
        self.held: set[str] = set()  # by their owners
        self.parked: set[str] = set()
        self.readers: dict[str, Reader] = {}
        self.versions = 0
        self.numbers = 0

    @rule(name=MEMBERS, kind=st.sampled_from(["dedicated", "borrowed"]), seats=st.integers(1, 3))
    def join(self, name: str, kind: Any, seats: int) -> None:
        join = Join(name, kind, MODEL, str(self.versions), seats, 64, 64)
        if self.core.pool.get(name) is not None:
            try:
                self.core.join(join, lambda message: None, self.now_s)
            except RequestRefused:
                return
            raise AssertionError("two members of one name")
        self.running[name] = {}
        for others in (self.shut, self.held, self.parked):
            others.discard(name)
        self.members[name] = self.core.join(join, lambda message: self.obey(name, message), self.now_s)

    def obey(self, name: str, message: Any) -> None:
        match message:
            case Turn():
                if (member := self.core.pool.get(name)) is not None:
                    assert member.provisioning.is_wanted and member.heartbeat.is_offered, (
                        "a turn for a device that is not ours"
                    )
                self.running[name][message.attempt_id] = message
            case Activate():
                self.parked.discard(name)
            case Park():
                if name not in self.held:  # what its owner holds back is not the gateway's to park
                    self.parked.add(name)
            case CancelTurn():
                self.running[name].pop(message.attempt_id, None)
            case Leave() | EvictTurn() | NewVersion():
                pass

    @rule(name=MEMBERS)
    def hang_up(self, name: str) -> None:
        if name in self.members:
            self.core.remove_worker(self.members[name], self.now_s)

    @rule(seconds=st.sampled_from([0.25, 0.5]), silent=MEMBERS)
    def wait(self, seconds: float, silent: str) -> None:
        """All but one say how they are."""
        self.now_s += seconds
        for name, member in self.members.items():
            if name != silent:
                is_ours = name not in self.held and name not in self.parked
                beat = Heartbeat(
                    0, 0, 0, 64, member.weights.version, is_ours and name not in self.shut,
                    is_offered=name not in self.held, place="parked" if name in self.parked else "resident",
                    can_park=member.kind == "borrowed",
                )  # fmt: skip
                self.core.receive(member, beat, self.now_s)
        self.core.tick(self.now_s)

    @rule(name=MEMBERS)
    def hold_or_offer(self, name: str) -> None:
        """The owner's word; it comes to the gateway with the next beat."""
        if name in self.members and self.members[name].kind == "borrowed":
            self.held ^= {name}

    @rule(name=MEMBERS)
    def shut_or_open(self, name: str) -> None:
        self.shut ^= {name}

    @rule()
    def publish(self) -> None:
        self.versions += 1
        self.core.publish(NewVersion(str(self.versions), "folder"), self.now_s)

    @rule(name=MEMBERS)
    def take_version(self, name: str) -> None:
        if name in self.members:
            self.core.receive(self.members[name], VersionReady(str(self.versions)), self.now_s)

    @rule(tokens=st.integers(1, 40), trajectory=st.sampled_from(["", "t", "u"]))
    def ask(self, tokens: int, trajectory: str) -> None:
        self.numbers += 1
        name, reader = f"turn {self.numbers}", Reader()
        request = Request(name, tuple(range(tokens)), Sampling(max_tokens=ANSWER_TOKENS))
        try:
            self.core.scheduler.submit(request, reader, self.now_s, affinity=trajectory)
        except QueueFull:
            assert self.core.scheduler.waiting >= 6
            return
        self.readers[name] = reader

    @rule(name=MEMBERS, count=st.integers(1, ANSWER_TOKENS), is_abort=st.booleans())
    def work(self, name: str, count: int, is_abort: bool) -> None:
        for attempt_id, turn in list(self.running.get(name, {}).items()):
            start = len(turn.request.partial.token_ids)
            ids = tuple(range(start, min(ANSWER_TOKENS, start + count)))
            end: Any = "length" if start + count >= ANSWER_TOKENS else "abort" if is_abort else None
            if end is None:
                continue
            del self.running[name][attempt_id]
            piece = TurnTokens(attempt_id, ids, (0.0,) * len(ids), self.members[name].weights.version, end)
            self.core.receive(self.members[name], TokensAdded((piece,)), self.now_s)

    @rule(name=MEMBERS)
    def refuse(self, name: str) -> None:
        if self.running.get(name):
            attempt_id = min(self.running[name])
            del self.running[name][attempt_id]
            self.core.receive(self.members[name], TurnRefused(attempt_id, Fault("Unavailable", "no")), self.now_s)

    @rule(name=MEMBERS)
    def drain(self, name: str) -> None:
        if self.core.pool.get(name) is not None:
            self.core.scheduler.drain(self.members[name], self.now_s)

    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        if self.readers:
            name = data.draw(st.sampled_from(sorted(self.readers)))
            self.core.scheduler.cancel([name], self.now_s)
            self.readers.pop(name)

    @invariant()
    def counts_balance(self) -> None:
        if not hasattr(self, "core"):
            return
        scheduler = self.core.scheduler
        counts, under_way = scheduler.counts, scheduler.waiting + scheduler.running
        assert counts.begun == counts.ended + counts.failed + counts.cancelled + under_way
        assert scheduler.running == sum(len(member.placement.attempt_ids) for member in self.core.pool)

    @invariant()
    def a_turn_runs_in_one_place_with_a_seat(self) -> None:
        if not hasattr(self, "core"):
            return
        placed = self.core.scheduler.placed
        assert len({turn.request.request_id for turn in placed}) == len(placed)
        for member in self.core.pool:
            assert len(member.placement.attempt_ids) <= member.registration.max_concurrency
        for turn in placed:
            assert turn.worker is not None and self.core.pool.has(turn.worker)
            assert turn.attempt_id in self.running[turn.worker.name]

    @invariant()
    def every_answer_is_one_line_of_tokens(self) -> None:
        for reader in getattr(self, "readers", {}).values():
            assert reader.tokens == list(range(len(reader.tokens)))
            assert reader.ends != ["length"] or len(reader.tokens) == ANSWER_TOKENS


def test_members_come_go_and_fall_silent() -> None:
    run_state_machine_as_test(Members)
