"""Connections and processes of a simulated network."""

from __future__ import annotations

import asyncio
import random

import pytest

from rose.clock import VirtualClock, run_virtual
from rose.sim.network import Frame, NetworkGate, NetworkPlace, Wire


def heard_by_the_gateway(*frames: Frame, cut_s: float = 0.0, ends_by: str = "") -> list[Frame]:
    heard: list[Frame] = []

    async def talk() -> None:
        place = NetworkPlace()
        wire = Wire(place, random.Random(1), heard.append, lambda frame: None)
        if cut_s:
            place.cut_off()
            asyncio.get_running_loop().call_later(cut_s, place.heal)
        for frame in frames:
            wire.up.send(frame)
        if ends_by == "agent":
            wire.close_by_agent()
        elif ends_by == "power":
            wire.close_by_agent(silently=True)
        elif ends_by == "gateway":
            wire.close_by_gateway()
        await asyncio.sleep(10)

    run_virtual(talk(), VirtualClock())
    return heard


def test_a_stopped_process_handles_events_later_in_order():
    gate, done = NetworkGate(), []
    gate.enter(lambda: done.append(1))
    gate.stop()
    gate.enter(lambda: done.append(2))
    gate.enter(lambda: done.append(3))
    assert done == [1]
    gate.go_on()
    assert done == [1, 2, 3]


def test_a_dead_process_handles_no_events():
    gate, done = NetworkGate(), []
    gate.stop()
    gate.enter(lambda: done.append(1))
    gate.clear()
    gate.go_on()
    assert done == []


@pytest.mark.parametrize(
    "cut_s, ends_by, heard",
    [
        (0.0, "", [b"a", b"b", b"c"]),
        (5.0, "", [b"a", b"b", b"c"]),
        (50.0, "", []),
        (0.0, "agent", [b"a", b"b", b"c", None]),
        (0.0, "power", [b"a", b"b", b"c"]),
        (0.0, "gateway", []),
    ],
)
def test_frames_arrive_in_order_while_the_connection_lives(cut_s, ends_by, heard):
    assert heard_by_the_gateway(b"a", b"b", b"c", cut_s=cut_s, ends_by=ends_by) == heard
