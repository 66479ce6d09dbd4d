"""The agent's end of a simulated connection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from rose.clock import VirtualClock, run_virtual
from rose.sim.network import Frame, NetworkGate, NetworkPlace, Wire
from rose.sim.simulated_agent import CONNECT_S, PING, PONG, SimulatedConnection
from rose.worker.agent import SILENCE_S


class Gateway:
    """Accepts connections, records frames, and answers pings unless it is silent."""

    def __init__(self, *, is_up: bool = True, is_silent: bool = False) -> None:
        self.is_up, self.is_silent = is_up, is_silent
        self.frames: list[Frame] = []
        self.wire: Wire

    def accept(self, name: str, place: NetworkPlace, to_agent: Callable[[Frame], None]) -> Wire | None:
        if not self.is_up:
            return None
        self.wire = Wire(place, random.Random(1), self._receive, to_agent)
        return self.wire

    def _receive(self, frame: Frame) -> None:
        self.frames.append(frame)
        if frame == PING and not self.is_silent:
            self.wire.down.send(PONG)


def run(gateway: Gateway, story: Callable[[SimulatedConnection, Any], Awaitable[None]], *, cut: bool = False) -> None:
    async def live() -> None:
        agent: Any = SimpleNamespace(
            name="a", place=NetworkPlace(), gate=NetworkGate(), accept=gateway.accept, has_no_power=False
        )
        if cut:
            agent.place.cut_off()
        await story(SimulatedConnection(agent), agent)

    run_virtual(live(), VirtualClock())


def test_frames_go_both_ways_and_the_end_is_seen() -> None:
    gateway = Gateway()

    async def story(connection: SimulatedConnection, agent: Any) -> None:
        async with connection:
            await connection.send_bytes(b"up")
            gateway.wire.down.send(b"down")
            assert (await connection.receive()).data == b"down"
            gateway.wire.close_by_gateway(reads_the_rest=True)
            assert (await connection.receive()).type is aiohttp.WSMsgType.CLOSED
        await asyncio.sleep(1)
        assert gateway.frames == [b"up", None]

    run(gateway, story)


def test_a_gateway_that_is_down_refuses_at_once() -> None:
    async def story(connection: SimulatedConnection, agent: Any) -> None:
        with pytest.raises(ConnectionRefusedError):
            await connection.__aenter__()
        assert asyncio.get_running_loop().time() < 0.1

    run(Gateway(is_up=False), story)


def test_a_cut_network_gives_no_answer() -> None:
    async def story(connection: SimulatedConnection, agent: Any) -> None:
        with pytest.raises(ConnectionError, match="no answer"):
            await connection.__aenter__()
        assert asyncio.get_running_loop().time() == pytest.approx(CONNECT_S)

    run(Gateway(), story, cut=True)


@pytest.mark.parametrize("is_silent", [True, False])
def test_silence_ends_the_connection_and_pongs_keep_it(is_silent: bool) -> None:
    gateway = Gateway(is_silent=is_silent)

    async def story(connection: SimulatedConnection, agent: Any) -> None:
        async with connection:
            try:
                async with asyncio.timeout(5 * SILENCE_S):
                    message = await connection.receive()
                assert is_silent and message.type is aiohttp.WSMsgType.CLOSED
            except TimeoutError:
                assert not is_silent
        assert PING in gateway.frames

    run(gateway, story)


def test_without_power_the_gateway_sees_no_end() -> None:
    gateway = Gateway()

    async def story(connection: SimulatedConnection, agent: Any) -> None:
        async with connection:
            agent.has_no_power = True
        await asyncio.sleep(1)
        assert gateway.frames == []

    run(gateway, story)
