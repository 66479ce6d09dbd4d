"""The gateway may die at any moment, and be wrong about nothing: whatever was told to anybody is still so afterwards.

A world of members that play by the rules, members that speak too late, readers that ask again, and a gateway that is
killed between any two events. Tokens are drawn from (prompt, position), as engines with keyed dice draw them, so the
right answer to every turn is known. What late members say is poison: it must never be found in an answer.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rose.api.faults import Fault
from rose.api.worker_messages import (
    CancelTurn,
    Heartbeat,
    Join,
    NewVersion,
    TokensAdded,
    Turn,
    TurnRefused,
    TurnTokens,
    VersionReady,
)
from rose.config.server_settings import GatewaySettings
from rose.engines.base import Sampling
from rose.engines.token_stream import TokenStream
from rose.errors import QueueFull, RequestRefused, Unavailable
from rose.gateway import turn_log
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.ledger import Ledger
from rose.gateway.pool import PoolWorker
from rose.gateway.sessions import Finish

MODEL = "model"
ANSWER_TOKENS = 6
POISON = 9999
GROUP_SIZE = 2
NAMES = [f"{group}{member}" for group in "abcd" for member in range(GROUP_SIZE)]
SAMPLING = Sampling(max_tokens=ANSWER_TOKENS)
ROWS_KEPT = turn_log.ROWS_KEPT


def right(prompt_ids: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
    return tuple((sum(prompt_ids) * 31 + position * 7) % 101 for position in range(start, end))


class Reader(TokenStream):
    """Knows what it was told without waiting for it."""

    def told(self) -> tuple[tuple[int, ...], str | None]:
        ids = tuple(token_id for event in self._events for token_id in event.token_ids)
        reasons = [event.finish_reason for event in self._events if event.finish_reason is not None]
        assert len(reasons) <= 1, "a turn ends once"
        return ids, reasons[0] if reasons else None


@dataclass(eq=False)
class Device:
    """One agent's connection: what it was told to run, and how far it is."""

    name: str
    version: str
    member: PoolWorker | None = None
    turns: dict[int, Turn] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    wanted: NewVersion | None = None

    def hear(self, message: Any) -> None:
        match message:
            case Turn():
                assert message.version in (None, self.version), "a turn for other weights"
                self.turns[message.attempt_id] = message
                self.done[message.attempt_id] = len(message.request.partial.token_ids)
            case CancelTurn():
                self.turns.pop(message.attempt_id, None)
            case NewVersion():
                self.wanted = message


class Gateways(RuleBasedStateMachine):
    @initialize(
        max_staleness=st.integers(0, 1),
        wait_s=st.sampled_from([1.0, 1e6]),
        max_waiting=st.sampled_from([1, 4096]),
        rows_kept=st.sampled_from([0, 2, 256]),
    )
    def start(self, max_staleness: int, wait_s: float, max_waiting: int, rows_kept: int) -> None:
        turn_log.ROWS_KEPT = rows_kept  # restored by `teardown`
        self.settings = GatewaySettings(
            lease_s=5.0, wait_s=wait_s, idle_s=1e6, max_staleness=max_staleness, max_waiting=max_waiting
        )
        self.database = sqlite3.connect(":memory:", isolation_level=None)
        self.now_s = 0.0
        self.devices: dict[str, Device] = {}
        self.former: list[tuple[PoolWorker, int]] = []  # members that are gone, with a attempt_id that they had
        self.attempt_ids: set[int] = set()
        self.published: list[str] = []
        self.acknowledged: list[str] = []
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.readers: list[tuple[str, tuple[int, ...], Reader]] = []
        self.begun: set[str] = set()
        self.finished: dict[str, Finish] = {}
        self.batches: dict[int, Any] = {}
        self.taken: set[int] = set()
        self.core = self.open()
        for name in NAMES[:4]:
            self.begin(name)
        self.core.ledger.commit()
        for name in "xy":
            self.join(name, 2, True)

    def open(self) -> GatewayCore:
        return GatewayCore(MODEL, self.settings, Ledger(None, MODEL, connection=self.database), now_s=self.now_s)

    # The gateway

    @rule(rejoin=st.booleans())
    def crash(self, rejoin: bool) -> None:
        """kill -9: what was not committed is gone, all connections are cut."""
        names = list(self.devices) if rejoin else []
        for device in self.devices.values():
            assert device.member is not None
            self.former += [(device.member, attempt_id) for attempt_id in device.turns]
        self.devices, self.readers = {}, []
        self.core = self.open()
        for session in self.core.trajectories:
            for turn in session.turns:
                ids = tuple(turn.produced.token_ids)
                assert ids == right(turn.prompt_ids, 0, len(ids)), "what was durable is whole"
                assert turn.is_running == (turn.finish_reason is None and not turn.is_stopped)
        order: list[str | None] = [None, *self.published]
        least = order.index(self.acknowledged[-1]) if self.acknowledged else 0
        assert order.index(self.core.pool.newest_version) >= least, "a version that was acknowledged is forgotten"
        for name in names:
            self.join(name, 2, True)

    @rule()
    def settle(self) -> None:
        self.core.ledger.commit()

    @rule(seconds=st.sampled_from([0.1, 0.25, 0.9]))
    def tick(self, seconds: float) -> None:
        """Devices that are here say so."""
        self.now_s += seconds
        for device in self.devices.values():
            self.beat(device)
        self.core.tick(self.now_s)

    # Members

    @rule(name=st.sampled_from("xyz"), seats=st.integers(1, 3), is_new=st.booleans())
    def join(self, name: str, seats: int, is_new: bool) -> None:
        if name in self.devices:
            return
        version = self.published[-1] if self.published and is_new else "old"
        device = Device(name, version)
        device.member = self.core.pool.join(
            Join(name, "dedicated", MODEL, version, seats, 1000, 500), device.hear, self.now_s
        )
        self.core.on_joined(device.member, self.now_s)
        self.devices[name] = device

    @rule(name=st.sampled_from("xyz"), is_silent=st.booleans())
    def leave(self, name: str, is_silent: bool) -> None:
        """With a word, or so that its lease runs out."""
        device = self.devices.pop(name, None)
        if device is None:
            return
        assert device.member is not None
        self.former += [(device.member, attempt_id) for attempt_id in device.turns]
        if not is_silent:
            self.core.remove_worker(device.member, self.now_s)
            return
        for _ in range(8):
            self.tick(0.9)

    @rule(
        name=st.sampled_from("xyz"),
        count=st.integers(0, ANSWER_TOKENS),
        how=st.sampled_from(["onward", "abort", "refuse"]),
    )
    def work(self, name: str, count: int, how: str) -> None:
        """Some tokens for all its turns; those that are whole end."""
        device = self.devices.get(name)
        if device is None or not device.turns:
            return
        assert device.member is not None
        pieces = []
        for attempt_id in list(device.turns):
            pieces.append(self.piece(device, attempt_id, count, how == "abort"))
        self.hear(device.member, TokensAdded(tuple(pieces)))
        if how == "refuse" and device.turns:
            attempt_id = min(device.turns)
            del device.turns[attempt_id]
            self.hear(device.member, TurnRefused(attempt_id, Fault("Unavailable", "not now")))

    def piece(self, device: Device, attempt_id: int, count: int, is_abort: bool) -> TurnTokens:
        prompt_ids, start = device.turns[attempt_id].request.prompt_ids, device.done[attempt_id]
        end = min(ANSWER_TOKENS, start + count)
        device.done[attempt_id] = end
        is_end = end == ANSWER_TOKENS
        reason: Any = "length" if is_end else "abort" if is_abort else None
        if reason is not None:
            del device.turns[attempt_id]
        ids = right(prompt_ids, start, end)
        return TurnTokens(attempt_id, ids, tuple(-1.0 / (1 + token_id) for token_id in ids), device.version, reason)

    @precondition(lambda self: self.former)
    @rule(data=st.data(), is_beat=st.booleans())
    def speak_too_late(self, data: Any, is_beat: bool) -> None:
        """Of an expired lease, or of another life."""
        member, attempt_id = data.draw(st.sampled_from(self.former))
        self.hear(member, TokensAdded((TurnTokens(attempt_id, (POISON,), (-1.0,), "old", "length"),)))
        others = [device.member for device in self.devices.values() if device.member is not None]
        for other in others:
            self.hear(
                other, TokensAdded((TurnTokens(attempt_id, (POISON,), (-1.0,), other.weights.version, "length"),))
            )

    @rule(speaker=st.sampled_from("xyz"), name=st.sampled_from("xyz"))
    def speak_of_anothers_turn(self, speaker: str, name: str) -> None:
        if speaker != name and speaker in self.devices and name in self.devices:
            member = self.devices[speaker].member
            assert member is not None
            for attempt_id in self.devices[name].turns:
                self.hear(
                    member, TokensAdded((TurnTokens(attempt_id, (POISON,), (-1.0,), member.weights.version, "length"),))
                )

    @rule(name=st.sampled_from("xyz"))
    def run_other_weights(self, name: str) -> None:
        """An engine that was restarted in the middle of a turn, with weights that are nobody's any more."""
        device = self.devices.get(name)
        if device is None or not device.turns or not self.published:
            return
        assert device.member is not None
        attempt_id = min(device.turns)
        if self.settings.max_staleness == 0 or device.version != "stale":
            self.hear(device.member, TokensAdded((TurnTokens(attempt_id, (POISON,), (-1.0,), "stale", None),)))

    def hear(self, member: PoolWorker, message: Any) -> None:
        self.core.receive(member, message, self.now_s)

    def beat(self, device: Device) -> None:
        assert device.member is not None
        self.hear(device.member, Heartbeat(len(device.turns), 0, 0, 1000, device.version, True))

    # Trainer

    @rule()
    def publish(self) -> None:
        name = f"v{len(self.published)}"
        self.published.append(name)
        self.core.publish(NewVersion(name, "folder"), self.now_s)
        self.core.ledger.when_durable(lambda trouble: self.acknowledged.append(name))

    @rule(name=st.sampled_from("xyz"))
    def take_version(self, name: str) -> None:
        device = self.devices.get(name)
        if device is None or device.wanted is None or device.turns:
            return
        assert device.member is not None
        device.version, device.wanted = device.wanted.version, None
        self.hear(device.member, VersionReady(device.version))

    @rule(groups=st.integers(1, 2), is_taken=st.booleans())
    def take_batch(self, groups: int, is_taken: bool) -> None:
        after = max(self.batches, default=0)
        if after and not is_taken and after not in self.taken:
            assert self.core.trajectories.batch(groups, after - 1) == self.batches[after], (
                "the same, as often as it is asked for"
            )
            return
        self.taken.add(after)
        batch = self.core.trajectories.batch(groups, after)
        if batch is not None:
            self.core.ledger.when_durable(lambda trouble: self.batches.__setitem__(batch.batch, batch))

    # Environments

    @rule(name=st.sampled_from(NAMES))
    def begin(self, name: str) -> None:
        self.core.trajectories.begin(name, self.now_s, group=name[0], group_size=GROUP_SIZE, seed=1)
        self.core.ledger.when_durable(lambda trouble: self.begun.add(name))

    @rule(data=st.data(), whole=st.booleans())
    def ask(self, data: Any, whole: bool) -> None:
        """The trajectory's next turn, or the same one again if it has not been answered."""
        open_ones = sorted(self.begun - self.finished.keys())
        if not open_ones:
            return
        name = data.draw(st.sampled_from(open_ones))
        prompt_ids = self.prompts.setdefault(name, (NAMES.index(name), 1))
        reader = Reader()
        session = self.core.trajectories.get(name)
        if session is None or session.finish is not None:  # the word that it has finished is not out yet
            with pytest.raises(RequestRefused, match="has finished"):
                self.core.ask(name, prompt_ids, SAMPLING, reader, self.now_s, whole=whole)
            return
        try:
            self.core.ask(name, prompt_ids, SAMPLING, reader, self.now_s, whole=whole)
        except QueueFull:
            refused = [turn for turn in session.turns if turn.prompt_ids == prompt_ids]
            assert all(turn.produced for turn in refused), "a turn that was refused leaves nothing behind"
            return
        self.readers.append((name, prompt_ids, reader))

    @rule()
    def read(self) -> None:
        """Who has the whole answer goes on from it."""
        left = []
        for name, prompt_ids, reader in self.readers:
            ids, reason = reader.told()
            assert ids == right(prompt_ids, 0, len(ids)), "no token is lost, doubled, or somebody else's"
            if isinstance(reader._error, Unavailable):  # it waited too long for a worker: asked again, it goes on
                continue
            if reason is None:
                left.append((name, prompt_ids, reader))
                continue
            assert len(ids) == ANSWER_TOKENS
            if self.prompts[name] == prompt_ids:
                self.prompts[name] = (*prompt_ids, *ids, 3)
        self.readers = left

    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def finish(self, data: Any, reward: float) -> None:
        if not self.begun:
            return
        name = data.draw(st.sampled_from(sorted(self.begun)))
        finish = self.finished.get(name, Finish(reward))
        try:
            self.core.finish(name, finish, self.now_s)
        except RequestRefused:
            assert name not in self.finished, "what was acknowledged is not forgotten"
            finish = Finish(1.0 - reward)
            self.core.finish(name, finish, self.now_s)
        self.core.ledger.when_durable(lambda trouble: self.finished.setdefault(name, finish))

    # What always holds

    @invariant()
    def no_ticket_is_used_twice(self) -> None:
        if not hasattr(self, "core"):
            return
        for device in self.devices.values():
            for attempt_id, turn in device.turns.items():
                partial = turn.request.partial.token_ids
                assert partial == right(turn.request.prompt_ids, 0, len(partial)), "only what was really produced"
                assert all(attempt_id != other for _, other in self.former)

    @invariant()
    def turns_run_within_the_bound(self) -> None:
        if not hasattr(self, "core") or not self.published:
            return
        allowed = self.core.pool.published
        versions = {version.version for version in allowed}
        assert len(versions) <= self.settings.max_staleness + 1
        for device in self.devices.values():
            member = device.member
            assert member is not None
            assert self.core.pool.view(member).is_open <= (not versions or member.weights.version in versions)

    def teardown(self) -> None:
        """Everything is played to its end: each trajectory comes out once, with the right tokens."""
        if not hasattr(self, "core"):
            return
        turn_log.ROWS_KEPT = ROWS_KEPT
        self.crash(rejoin=False)
        self.finish_all()
        seen: dict[str, int] = {}
        while (batch := self.core.trajectories.batch(1, max(self.batches, default=0))) is not None:
            self.core.ledger.commit()
            self.batches[batch.batch] = batch
        for batch in self.batches.values():
            for group in batch.groups:
                assert group.lost == 0 or len(group.trajectories) + group.lost >= GROUP_SIZE
                for trajectory in group.trajectories:
                    seen[trajectory.trajectory_id] = seen.get(trajectory.trajectory_id, 0) + 1
                    assert POISON not in trajectory.token_ids
                    assert trajectory.reward == self.finished[trajectory.trajectory_id].reward
        assert not [name for name, times in seen.items() if times > 1], "finished twice"
        assert sorted(self.batches) == list(range(1, len(self.batches) + 1))

    def finish_all(self) -> None:
        for name in NAMES:
            self.begin(name)
            self.core.ledger.commit()
            if name not in self.finished:
                session = self.core.trajectories.get(name)
                assert session is not None, f"{name} was lost"
                finish = session.finish or Finish(0.5)
                self.core.finish(name, finish, self.now_s)
                self.finished[name] = finish
            else:
                self.core.finish(name, self.finished[name], self.now_s)
        self.core.ledger.commit()


def test_a_gateway_that_is_killed_at_any_moment_loses_and_doubles_nothing() -> None:
    run_state_machine_as_test(Gateways)
