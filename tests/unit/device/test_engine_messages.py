"""Every message survives its frame, however it is cut, and so does every error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.scripted_engine import ScriptedEngine
from tests.unit.device.engine_loop import request

from rose.api.faults import Fault, error_of, fault_of
from rose.api.frames import FrameReader
from rose.config.server_settings import EngineSettings, LendSettings
from rose.device import engine_messages
from rose.engines.base import Stepped, TokenEvent
from rose.errors import ContextTooLong, ModelError, QueueFull, RoseError, Unavailable

FACTS = ScriptedEngine(EngineSettings()).facts()


TOKEN = TokenEvent("r", (1, 2), (-0.5, -1.5), "v0", "stop", (((1, -0.5), (3, -2.0)),), 16)


LEND = engine_messages.Lend(
    "folder",
    LendSettings(),
    (engine_messages.AdminCommand("limits", 0.5), engine_messages.AdminCommand("drain")),
    "why",
)


COMMANDS = [
    engine_messages.StartEngine("m:f", "folder", "cpu:0", EngineSettings()),
    engine_messages.StartEngine("m:f", "folder", "cpu:0", EngineSettings(), lend=LEND),
    engine_messages.Add(request()),
    engine_messages.CancelRequest("r"),
    engine_messages.EvictRequest("r", 1),
    engine_messages.Stage("v", "folder", 7),
    engine_messages.Commit("v", 8),
    engine_messages.GetFacts(9),
    engine_messages.Shutdown(),
]


EVENTS = [
    engine_messages.StartProgress("loading"),
    engine_messages.Ready(FACTS),
    Stepped((TOKEN,), FACTS, 3, 0.25, ("r",)),
    engine_messages.RequestRejected("r", Fault("QueueFull", "full", None, 2.0)),
    engine_messages.Reply(1, FACTS, Fault("ModelError", "bad", "look")),
    engine_messages.EngineFailed(Fault("Unavailable", "gone")),
]


@given(st.lists(st.integers(1, 400)))
def test_frames_survive_any_cutting(cuts: list[int]) -> None:
    data = b"".join(map(engine_messages.frame, EVENTS))
    reader, bodies = FrameReader(), []
    for cut in [*cuts, len(data)]:
        piece, data = data[:cut], data[cut:]
        bodies += reader.push(piece)
    assert list(map(engine_messages.decode_event, bodies)) == EVENTS


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_survive_the_socket(command: engine_messages.Command) -> None:
    [body] = FrameReader().push(engine_messages.frame(command))
    assert engine_messages.decode_command(body) == command


def test_a_frame_with_an_impossible_length_is_refused() -> None:
    with pytest.raises(Unavailable, match="frame"):
        list(FrameReader().push(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize(
    "error",
    [ModelError("a", hint="b"), ContextTooLong("a"), QueueFull("a", retry_after_s=3.0), Unavailable("a", hint="b")],
)
def test_errors_survive_the_socket(error: RoseError) -> None:
    found = error_of(fault_of(error))
    assert type(found) is type(error)
    assert vars(found) == vars(error)


def test_a_foreign_error_becomes_unavailable() -> None:
    found = error_of(fault_of(ZeroDivisionError("oops")))
    assert isinstance(found, Unavailable)
    assert "ZeroDivisionError: oops" in found.what
