"""Commands of one connection, over a real socket, with the scripted engine in a thread of this process."""

from __future__ import annotations

import itertools
import socket
import threading
from pathlib import Path

from tests.integration.scripted_engine import ScriptedEngine
from tests.unit.device import engine_loop
from tests.unit.device.engine_loop import STANDING_STILL, Start, finishes, request

from rose.api.faults import error_of
from rose.config.server_settings import EngineSettings
from rose.device import engine_messages, engine_server, transport
from rose.engines.base import Stepped
from rose.errors import ContextTooLong

start = engine_loop.start


def test_a_refused_request_harms_no_other(start: Start) -> None:
    peer = start()
    peer.send(engine_messages.Add(request("long", max_tokens=10**6)), engine_messages.Add(request("good")))
    events = peer.until(finishes("good"))
    [refusal] = [event for event in events if isinstance(event, engine_messages.RequestRejected)]
    assert refusal.request_id == "long"
    assert isinstance(error_of(refusal.fault), ContextTooLong)


def test_cancel_is_followed_by_facts_without_a_step(start: Start) -> None:
    peer = start(budget=STANDING_STILL)
    peer.send(engine_messages.Add(request()))
    assert peer.ask(engine_messages.GetFacts(1)).facts.waiting == 1
    peer.send(engine_messages.CancelRequest("r"))
    event = peer.until(lambda event: isinstance(event, Stepped) and event.facts.waiting == 0)[-1]
    assert isinstance(event, Stepped)
    assert (event.events, event.step_tokens) == ((), 0)


def test_log_probabilities_of_prompts_come_in_messages_of_their_own(start: Start) -> None:
    peer = start()
    peer.send(*(engine_messages.Add(request(name, max_tokens=1, prompt_logprobs=1)) for name in ("a", "b")))
    ended: set[str] = set()
    while len(ended) < 2:
        for event in peer.until(lambda event: isinstance(event, Stepped) and bool(event.events)):
            if isinstance(event, Stepped):
                assert len(event.events) <= 1 and (not event.events or event.step_tokens == 0)
                ended |= {one.request_id for one in event.events if one.prompt_logprobs}


def test_evict_ends_with_abort_and_an_unknown_id_is_no_error(start: Start) -> None:
    peer = start(budget=STANDING_STILL)
    peer.send(engine_messages.Add(request()))
    peer.send(engine_messages.EvictRequest("r"), engine_messages.EvictRequest("never here", 7))
    events = peer.until(lambda event: isinstance(event, engine_messages.Reply))
    assert finishes("r")(next(event for event in events if isinstance(event, Stepped) and event.events))
    assert events[-1].fault is None  # type: ignore[union-attr]


def test_steps_go_on_while_weights_are_staged(start: Start, tmp_path: Path) -> None:
    peer = start()
    entered, leave = threading.Event(), threading.Event()
    stage = peer.engine.stage

    def slow(version: str, source: str) -> str:
        entered.set()
        assert leave.wait(30)
        return stage(version, source)

    peer.engine.stage = slow  # type: ignore[method-assign]
    peer.send(engine_messages.Stage("v1", str(tmp_path), 1))
    assert entered.wait(30)
    peer.send(engine_messages.Stage("v2", str(tmp_path), 2), engine_messages.Add(request()))
    events = peer.until(finishes("r"))
    [refusal] = [event for event in events if isinstance(event, engine_messages.Reply)]
    assert refusal.tag == 2
    assert refusal.fault is not None
    leave.set()
    *_, staged = peer.until(lambda event: isinstance(event, engine_messages.Reply))
    assert (staged.tag, staged.fault) == (1, None)  # type: ignore[union-attr]
    committed = peer.ask(engine_messages.Commit("v1", 3))
    assert committed.facts.version == "v1"
    assert peer.ask(engine_messages.Commit("v1", 4)).fault is not None


def test_a_flood_of_commands_is_taken_a_little_at_a_time() -> None:
    ours, theirs = socket.socketpair()
    clock, engine, end = itertools.count(), ScriptedEngine(EngineSettings()), transport.EngineLink(theirs)
    server = engine_server.EngineServer(engine, end, now_s=lambda: float(next(clock)))
    ours.sendall(b"".join(engine_messages.frame(engine_messages.Add(request(f"r{number}"))) for number in range(20)))
    taken = [0]
    while taken[-1] < 20:
        transport.wait_any([end])  # returns at once while anything is left
        server.handle_commands(3.0)
        taken.append(engine.facts().waiting)
    assert taken == [0, 3, 6, 9, 12, 15, 18, 20]
    end.close()
    ours.close()
