"""The engine's loop over a real socket, with the scripted engine, in a thread of this process."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from tests.integration.scripted_engine import CRASH
from tests.unit.device import engine_loop
from tests.unit.device.engine_loop import Start, finishes, request

from rose.api.frames import FrameReader
from rose.config.server_settings import EngineSettings
from rose.device import engine_messages, executor, transport
from rose.engines.base import Budget, Stepped, StepPlan
from rose.errors import ConfigError

start = engine_loop.start


def test_one_message_per_step_with_all_tokens(start: Start) -> None:
    peer = start()
    peer.send(*(engine_messages.Add(request(name)) for name in "abc"))
    events = peer.until(finishes("c"))
    steps = [event for event in events if isinstance(event, Stepped) and event.step_tokens]
    assert len(steps) == 5
    assert [len(step.events) for step in steps] == [3] * 5
    assert steps[0].started == ("a", "b", "c")
    assert steps[0].step_tokens == 9
    assert steps[-1].facts.running == 0


def test_an_idle_loop_sleeps(start: Start) -> None:
    peer = start()
    peer.send(engine_messages.Add(request()))
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


@pytest.mark.parametrize("budget, expected", [(Budget(4, 64), 4), (Budget(512, 64), 6), (Budget(512, 1), 3)])
def test_a_step_keeps_its_budget(start: Start, budget: Budget, expected: int) -> None:
    peer = start(budget=budget)
    peer.send(engine_messages.Add(request("a")), engine_messages.Add(request("b")))
    steps = [event for event in peer.until(finishes("b")) if isinstance(event, Stepped) and event.step_tokens]
    assert max(step.step_tokens for step in steps) <= expected


def test_an_error_in_a_step_ends_the_loop(start: Start) -> None:
    peer = start()
    peer.send(engine_messages.Add(request(prompt=(CRASH,))))
    assert isinstance(peer.end(), RuntimeError)


def test_shutdown_ends_the_loop_with_work_left(start: Start) -> None:
    peer = start()
    peer.send(engine_messages.Add(request(max_tokens=3000)), engine_messages.Shutdown())
    assert peer.end() is None


def test_without_a_front_the_loop_ends(start: Start) -> None:
    peer = start()
    peer.send(engine_messages.Add(request(max_tokens=3000)))
    peer.connection.close()
    assert isinstance(peer.end(), transport.Closed)


def test_the_engine_process_reports_why_it_cannot_start(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    factory = "tests.integration.scripted_engine:ScriptedEngine.load"
    start = engine_messages.StartEngine(factory, str(tmp_path / "nowhere"), "cpu:4095", EngineSettings())
    ours.sendall(engine_messages.frame(start))
    assert executor.serve(theirs) == ConfigError.exit_code
    [failed] = map(engine_messages.decode_event, FrameReader().push(ours.recv(1 << 16)))
    assert isinstance(failed, engine_messages.EngineFailed)
    assert "4095" in failed.fault.what
    ours.close()
    theirs.close()


# Messages
