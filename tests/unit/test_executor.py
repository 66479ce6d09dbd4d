"""The engine's loop over a real socket, with the scripted engine, in a thread of this process."""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.e2e.scripted_engine import CRASH, ScriptedEngine

from rose.config.device import EngineSettings, LendSettings
from rose.coserve import executor, link, messages, port
from rose.engines.base import Budget, Request, Sampling, StepPlan, TokenEvent
from rose.errors import ConfigError, ContextTooLong, ModelError, QueueFull, RoseError, Unavailable

FOREVER_S = 3600.0


@dataclass
class Peer:
    """The front's end of the socket, blocking."""

    connection: socket.socket
    engine: ScriptedEngine
    thread: threading.Thread
    outcome: list[BaseException | None]

    def __post_init__(self) -> None:
        self._reader = messages.FrameReader()
        self._unread: list[messages.Event] = []

    def send(self, *commands: messages.Command) -> None:
        self.connection.sendall(b"".join(map(messages.frame, commands)))

    def receive(self) -> messages.Event:
        while not self._unread:
            data = self.connection.recv(1 << 16)
            assert data, "the executor closed the socket"
            self._unread += map(messages.decode_event, self._reader.push(data))
        return self._unread.pop(0)

    def until(self, wanted: Callable[[messages.Event], bool]) -> list[messages.Event]:
        """Everything up to the first event like this."""
        seen = [self.receive()]
        while not wanted(seen[-1]):
            seen.append(self.receive())
        return seen

    def ask(self, command: messages.Command) -> messages.Reply:
        self.send(command)
        *_, reply = self.until(lambda event: isinstance(event, messages.Reply))
        assert isinstance(reply, messages.Reply)
        return reply

    def end(self) -> BaseException | None:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.outcome[0]


Start = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    peers: list[Peer] = []

    def begin(*, gated: bool = False, budget: Budget = Budget(512, 64)) -> Peer:  # noqa: B008
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        engine = ScriptedEngine(EngineSettings())
        loop = executor.Executor(engine, link.EngineLink(theirs), budget, gated=gated)
        outcome: list[BaseException | None] = []

        def run() -> None:
            try:
                loop.run()
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)
            theirs.close()

        peer = Peer(ours, engine, threading.Thread(target=run, daemon=True), outcome)
        peer.thread.start()
        peers.append(peer)
        return peer

    yield begin
    for peer in peers:
        peer.connection.close()
        peer.thread.join(30)


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **sampling: int) -> Request:
    return Request(name, prompt, Sampling(**{"max_tokens": 5, **sampling}))  # type: ignore[arg-type]


def finishes(name: str) -> Callable[[messages.Event], bool]:
    def found(event: messages.Event) -> bool:
        return isinstance(event, messages.Stepped) and any(
            token.request_id == name and token.finish_reason for token in event.events
        )

    return found


def tokens_of(events: list[messages.Event], name: str) -> list[int]:
    steps = [event for event in events if isinstance(event, messages.Stepped)]
    return [token for step in steps for event in step.events if event.request_id == name for token in event.token_ids]


def test_one_message_per_step_with_all_tokens(start: Start) -> None:
    peer = start()
    peer.send(*(messages.Add(request(name)) for name in "abc"))
    events = peer.until(finishes("c"))
    steps = [event for event in events if isinstance(event, messages.Stepped) and event.step_tokens]
    assert len(steps) == 5
    assert [len(step.events) for step in steps] == [3] * 5
    assert steps[0].started == ("a", "b", "c")
    assert steps[0].step_tokens == 9
    assert steps[-1].facts.running == 0


def test_an_idle_loop_sleeps(start: Start) -> None:
    peer = start()
    peer.send(messages.Add(request()))
    peer.until(finishes("r"))
    plans = 0
    plan = peer.engine.plan

    def counted(budget: Budget) -> StepPlan | None:
        nonlocal plans
        plans += 1
        return plan(budget)

    peer.engine.plan = counted  # type: ignore[method-assign]
    time.sleep(0.05)
    assert plans <= 1


def test_a_refused_request_harms_no_other(start: Start) -> None:
    peer = start()
    peer.send(messages.Add(request("long", max_tokens=10**6)), messages.Add(request("good")))
    events = peer.until(finishes("good"))
    [refusal] = [event for event in events if isinstance(event, messages.Refused)]
    assert refusal.request_id == "long"
    assert isinstance(messages.error_of(refusal.fault), ContextTooLong)


def test_cancel_is_followed_by_facts_without_a_step(start: Start) -> None:
    peer = start(gated=True)
    peer.send(messages.Add(request()))
    assert peer.ask(messages.GetFacts(1)).facts.waiting == 1
    peer.send(messages.Cancel("r"))
    event = peer.until(lambda event: isinstance(event, messages.Stepped) and event.facts.waiting == 0)[-1]
    assert isinstance(event, messages.Stepped)
    assert (event.events, event.step_tokens) == ((), 0)


def test_a_gate_is_closed_until_a_grant_and_after_it_expired(start: Start) -> None:
    peer = start(gated=True)
    peer.send(messages.Add(request(max_tokens=3000)))
    assert not peer.ask(messages.GetFacts(1)).gate_open
    assert peer.ask(messages.SetGrant(512, 64, time.monotonic() + FOREVER_S, 2)).gate_open
    peer.until(lambda event: isinstance(event, messages.Stepped) and event.step_tokens > 0)
    closed = peer.ask(messages.SetGrant(512, 64, time.monotonic() - 1, 3))
    assert not closed.gate_open
    assert peer.ask(messages.GetFacts(4)).facts.steps == closed.facts.steps


@pytest.mark.parametrize(
    "own, granted, expected",
    [(Budget(4, 64), (512, 64), 4), (Budget(512, 64), (4, 64), 4), (Budget(512, 64), (9, 1), 3)],
)
def test_a_step_keeps_both_budgets(start: Start, own: Budget, granted: tuple[int, int], expected: int) -> None:
    peer = start(gated=True, budget=own)
    peer.send(messages.Add(request("a")), messages.Add(request("b")))
    peer.send(messages.SetGrant(*granted, time.monotonic() + FOREVER_S))
    events = peer.until(lambda event: isinstance(event, messages.Stepped) and event.step_tokens > 0)
    assert isinstance(events[-1], messages.Stepped)
    assert events[-1].step_tokens == expected


def test_evict_ends_with_abort_and_an_unknown_id_is_no_error(start: Start) -> None:
    peer = start(gated=True)
    peer.send(messages.Add(request()))
    peer.send(messages.Evict("r"), messages.Evict("never here", 7))
    events = peer.until(lambda event: isinstance(event, messages.Reply))
    assert finishes("r")(next(event for event in events if isinstance(event, messages.Stepped) and event.events))
    assert events[-1].fault is None  # type: ignore[union-attr]


def test_less_kv_memory_evicts_what_no_longer_fits(start: Start) -> None:
    peer = start(gated=True)
    peer.send(messages.Add(request(max_tokens=100)))
    peer.send(messages.KvBudget(2 * peer.engine.facts().block_bytes, 7))
    events = peer.until(lambda event: isinstance(event, messages.Reply))
    assert any(finishes("r")(event) for event in events)
    assert events[-1].facts.kv_blocks_limit == 2  # type: ignore[union-attr]


def test_steps_go_on_while_weights_are_staged(start: Start, tmp_path: Path) -> None:
    peer = start()
    entered, leave = threading.Event(), threading.Event()
    stage = peer.engine.stage

    def slow(version: str, source: str) -> str:
        entered.set()
        assert leave.wait(30)
        return stage(version, source)

    peer.engine.stage = slow  # type: ignore[method-assign]
    peer.send(messages.Stage("v1", str(tmp_path), 1))
    assert entered.wait(30)
    peer.send(messages.Stage("v2", str(tmp_path), 2), messages.Add(request()))
    events = peer.until(finishes("r"))
    [refusal] = [event for event in events if isinstance(event, messages.Reply)]
    assert (refusal.tag, refusal.staged_version) == (2, None)
    assert refusal.fault is not None
    leave.set()
    *_, staged = peer.until(lambda event: isinstance(event, messages.Reply))
    assert (staged.tag, staged.staged_version) == (1, "v1")  # type: ignore[union-attr]
    committed = peer.ask(messages.Commit("v1", 3))
    assert (committed.facts.version, committed.staged_version) == ("v1", None)
    assert peer.ask(messages.Commit("v1", 4)).fault is not None


def test_an_error_in_a_step_ends_the_loop(start: Start) -> None:
    peer = start()
    peer.send(messages.Add(request(prompt=(CRASH,))))
    assert isinstance(peer.end(), RuntimeError)


def test_shutdown_ends_the_loop_with_work_left(start: Start) -> None:
    peer = start()
    peer.send(messages.Add(request(max_tokens=3000)), messages.Shutdown())
    assert peer.end() is None


def test_without_a_front_the_loop_ends(start: Start) -> None:
    peer = start()
    peer.send(messages.Add(request(max_tokens=3000)))
    peer.connection.close()
    assert isinstance(peer.end(), link.Closed)


def test_a_front_that_does_not_read_stops_the_steps_but_not_the_loop(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "BUFFER_BYTES", 50_000)
    peer = start()
    peer.send(messages.Add(request(max_tokens=4000, top_logprobs=20)))
    while peer.engine.facts().steps < 10:
        time.sleep(0.001)
    steps = -1
    while steps != peer.engine.facts().steps:
        steps = peer.engine.facts().steps
        time.sleep(0.05)
    assert steps < 4000, "everything fitted; the test proves nothing"
    events = peer.until(finishes("r"))
    assert len(tokens_of(events, "r")) == 4000


def test_a_front_that_never_reads_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BUFFER_BYTES", 50_000)
    monkeypatch.setattr(link, "STALL_S", 0.05)
    peer = start()
    peer.send(messages.Add(request(max_tokens=4000, top_logprobs=20)))
    assert isinstance(peer.end(), Unavailable)


def test_a_flood_of_commands_is_taken_a_little_at_a_time() -> None:
    ours, theirs = socket.socketpair()
    clock, engine, end = itertools.count(), ScriptedEngine(EngineSettings()), link.EngineLink(theirs)
    heard = port.Port(engine, end, Budget(512, 64), now_s=lambda: float(next(clock)))
    ours.sendall(b"".join(messages.frame(messages.Add(request(f"r{number}"))) for number in range(20)))
    taken = [0]
    while taken[-1] < 20:
        link.wait_any([end])  # returns at once while anything is left
        heard.obey_all(3.0)
        taken.append(engine.facts().waiting)
    assert taken == [0, 3, 6, 9, 12, 15, 18, 20]
    end.close()
    ours.close()


def test_a_link_that_is_closed_wakes_nobody() -> None:
    """A thread that reads weights may outlive its front, and the descriptor's number be another link's by then."""
    pairs = [socket.socketpair() for _ in range(2)]
    closed = link.EngineLink(pairs[0][1])
    closed.close()
    other, poll = link.EngineLink(pairs[1][1]), select.poll()
    closed.wake()
    closed.close()
    other.watch(poll)
    assert poll.poll(0) == []
    other.close()
    for ours, _ in pairs:
        ours.close()


def test_serve_says_why_it_cannot_start(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    factory = "tests.e2e.scripted_engine:ScriptedEngine.load"
    start = messages.Start(factory, str(tmp_path / "nowhere"), "cpu:4095", EngineSettings())
    ours.sendall(messages.frame(start))
    assert executor.serve(theirs) == ConfigError.exit_code
    [failed] = map(messages.decode_event, messages.FrameReader().push(ours.recv(1 << 16)))
    assert isinstance(failed, messages.Failed)
    assert "4095" in failed.fault.what
    ours.close()
    theirs.close()


# Messages

FACTS = ScriptedEngine(EngineSettings()).facts()
TOKEN = TokenEvent("r", (1, 2), (-0.5, -1.5), "v0", "stop", (((1, -0.5), (3, -2.0)),), 16)
LEND = messages.Lend("folder", LendSettings(), (messages.Control("limits", 0.5), messages.Control("drain")), "why")
COMMANDS = [
    messages.Start("m:f", "folder", "cpu:0", EngineSettings(), True),
    messages.Start("m:f", "folder", "cpu:0", EngineSettings(), lend=LEND),
    messages.Add(request()),
    messages.Cancel("r"),
    messages.Evict("r", 1),
    messages.SetGrant(1, 2, 3.5, 4),
    messages.KvBudget(5, 6),
    messages.Stage("v", "folder", 7),
    messages.Commit("v", 8),
    messages.GetFacts(9),
    messages.Shutdown(),
]
EVENTS = [
    messages.Progress("loading"),
    messages.Ready(FACTS),
    messages.Stepped((TOKEN,), FACTS, 3, 0.25, ("r",)),
    messages.Refused("r", messages.Fault("QueueFull", "full", None, 2.0)),
    messages.Reply(1, FACTS, False, "v1", messages.Fault("ModelError", "bad", "look")),
    messages.Failed(messages.Fault("Unavailable", "gone")),
]


@given(st.lists(st.integers(1, 400)))
def test_frames_survive_any_cutting(cuts: list[int]) -> None:
    data = b"".join(map(messages.frame, EVENTS))
    reader, bodies = messages.FrameReader(), []
    for cut in [*cuts, len(data)]:
        piece, data = data[:cut], data[cut:]
        bodies += reader.push(piece)
    assert list(map(messages.decode_event, bodies)) == EVENTS


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_survive_the_socket(command: messages.Command) -> None:
    [body] = messages.FrameReader().push(messages.frame(command))
    assert messages.decode_command(body) == command


def test_a_frame_no_peer_of_ours_would_send_is_refused() -> None:
    with pytest.raises(Unavailable, match="frame"):
        list(messages.FrameReader().push(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize(
    "error",
    [ModelError("a", hint="b"), ContextTooLong("a"), QueueFull("a", retry_after_s=3.0), Unavailable("a", hint="b")],
)
def test_errors_survive_the_socket(error: RoseError) -> None:
    found = messages.error_of(messages.fault_of(error))
    assert type(found) is type(error)
    assert vars(found) == vars(error)


def test_a_foreign_error_becomes_unavailable() -> None:
    found = messages.error_of(messages.fault_of(ZeroDivisionError("oops")))
    assert isinstance(found, Unavailable)
    assert "ZeroDivisionError: oops" in found.what
