"""A borrowed device serves users, lends the rest, and obeys its owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rose.clock import VirtualClock, run_virtual
from rose.engines.base import Request, Sampling
from rose.engines.token_stream import TokenStream
from rose.errors import Unavailable
from rose.sim.borrowed_device import LentDevice, SimulatedLending
from rose.sim.network import NetworkGate
from rose.sim.scenario import Traffic

LONG = Sampling(max_tokens=400, ignore_eos=True)


def run(story: Callable[[LentDevice, asyncio.Task[None]], Awaitable[None]], requests_per_s: float = 1.0) -> None:
    async def live() -> None:
        device = LentDevice(NetworkGate(), SimulatedLending("decode", Traffic(requests_per_s, 24, 5), 120, 3, 30.0))
        running = asyncio.create_task(device.run())
        try:
            await story(device, running)
        finally:
            running.cancel()
            device.close_memory()  # checks that every page came back

    run_virtual(live(), VirtualClock())


def submit(device: LentDevice, name: str = "a") -> TokenStream:
    stream = TokenStream()
    device.submit([Request(name, (9, 9, 9), LONG)], stream)
    return stream


async def read_all(stream: TokenStream) -> None:
    while True:
        await stream.take(ends=1)


def test_users_are_served_beside_rollouts() -> None:
    async def story(device: LentDevice, running: asyncio.Task[None]) -> None:
        device.attach()
        submit(device)
        await asyncio.sleep(20)
        assert device.served > 10 and device.lent_steps > 100
        assert device.lending_status is not None and device.lending_status.state == "lending"

    run(story)


def test_a_paused_device_lends_nothing_until_it_resumes() -> None:
    async def story(device: LentDevice, running: asyncio.Task[None]) -> None:
        device.attach()
        submit(device)
        await asyncio.sleep(2)
        device.control("pause")
        await asyncio.sleep(0.5)
        before = device.lent_steps
        await asyncio.sleep(5)
        assert before == device.lent_steps > 0
        device.control("resume")
        await asyncio.sleep(5)
        assert device.lent_steps > before

    run(story)


def test_a_drained_device_hands_its_rollouts_back() -> None:
    async def story(device: LentDevice, running: asyncio.Task[None]) -> None:
        device.attach()
        stream = submit(device)
        await asyncio.sleep(2)
        device.control("drain")
        events = await stream.take(ends=1)
        assert events[-1].finish_reason == "abort"
        await asyncio.sleep(1)
        assert device.requests == 0

    run(story)


def test_a_dead_engine_fails_rollouts_and_a_new_one_serves_again() -> None:
    async def story(device: LentDevice, running: asyncio.Task[None]) -> None:
        device.attach()
        stream = submit(device)
        await asyncio.sleep(2)
        running.cancel()
        device.die("killed by a test")
        with pytest.raises(Unavailable):
            await read_all(stream)
        with pytest.raises(Unavailable):
            submit(device, "b")
        device.restart()
        served, restarted = device.served, asyncio.create_task(device.run())
        await asyncio.sleep(10)
        assert device.served > served and device.requests == 0
        restarted.cancel()

    run(story)
