"""A simulated device's engine behaves, to its agent, as an engine in a process does: one script, two engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.integration.scripted_engine import SLOW

from rose.clock import VirtualClock, run_virtual
from rose.config.server_settings import DeviceSettings
from rose.device.engine_channel import start_command
from rose.device.engine_supervisor import Supervisor
from rose.engines.base import EngineClient, Request, Sampling, TokenEvent
from rose.engines.token_stream import TokenStream
from rose.errors import ContextTooLong, RequestRefused, RoseError, Unavailable
from rose.sim.network import NetworkGate
from rose.sim.simulated_handle import CoarseDevice, DedicatedDevice, folder_of

FACTORY = "tests.integration.scripted_engine:ScriptedEngine.load"
LONG = 400


class Bench:
    """An engine, what its steps told, and how to kill it."""

    def __init__(self, engine: EngineClient, kill: Callable[[], None], folder: str) -> None:
        self.engine, self.kill, self.folder = engine, kill, folder
        self.told: list[TokenEvent] = []
        engine.events.steps.subscribe(lambda stepped: self.told.extend(stepped.events))

    def submit(self, name: str, tokens: int = 5, prompt: int = 3) -> TokenStream:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        stream = TokenStream()
        self.engine.submit([Request(name, (SLOW,) * prompt, sampling)], stream)
        return stream

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():
                await asyncio.sleep(0.001)

    def ends(self, name: str) -> list[str]:
        return [e.finish_reason for e in self.told if e.request_id == name and e.finish_reason is not None]

    def tokens(self, name: str) -> int:
        return sum(len(event.token_ids) for event in self.told if event.request_id == name)


async def tokens_come_by_steps_and_the_stream(bench: Bench) -> Any:
    stream = bench.submit("a")
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        events += await stream.take(ends=1)
    assert events == [event for event in bench.told if event.request_id == "a"]
    return bench.tokens("a"), bench.ends("a"), [event.cached_tokens is not None for event in events]


async def a_request_that_cannot_run_is_refused_in_its_stream(bench: Bench) -> Any:
    stream = bench.submit("a", prompt=5000)
    with pytest.raises(ContextTooLong):
        await stream.take()
    return bench.told


async def an_evicted_request_ends_once(bench: Bench) -> Any:
    stream = bench.submit("a", LONG)
    await bench.until(lambda: bench.tokens("a") > 0)
    await bench.engine.evict("a")
    await bench.engine.evict("a")
    await bench.until(lambda: bool(bench.ends("a")))
    assert sum(len(event.token_ids) for event in await stream.take(ends=1)) == bench.tokens("a") < LONG
    return bench.ends("a")


async def nobody_is_evicted_in_peace(bench: Bench) -> Any:
    await bench.engine.evict("nobody")
    return bench.told


async def a_cancelled_request_is_not_heard_of_again(bench: Bench) -> Any:
    bench.submit("a", LONG)
    await bench.until(lambda: bench.tokens("a") > 0)
    bench.engine.cancel(["a", "nobody"])
    bench.submit("b")
    await bench.until(lambda: bool(bench.ends("b")))
    return bench.ends("a"), bench.ends("b")


async def new_weights_show_in_the_next_tokens(bench: Bench) -> Any:
    before = bench.engine.facts.version
    bench.submit("a", LONG)
    await bench.until(lambda: bench.tokens("a") > 0)
    await bench.engine.stage("7", bench.folder)
    await bench.engine.commit("7")
    assert bench.engine.facts.version == "7"
    count = len(bench.told)
    await bench.until(lambda: len(bench.told) > count + 2)
    versions = [event.version for event in bench.told]
    assert versions == sorted(versions, key=lambda version: version == "7")
    return set(versions) - {before}


async def weights_that_were_not_staged_are_refused(bench: Bench) -> Any:
    with pytest.raises(RequestRefused):
        await bench.engine.commit("7")
    return None


async def a_death_is_told_to_all_who_wait(bench: Bench) -> Any:
    stream = bench.submit("a", LONG)
    await bench.until(lambda: bench.tokens("a") > 0)
    bench.kill()
    with pytest.raises(Unavailable):
        await _read_all(stream)
    await bench.until(lambda: bench.engine.trouble is not None)
    with pytest.raises(Unavailable):
        bench.submit("b")
    with pytest.raises(Unavailable):
        await bench.engine.evict("a")
    return bench.ends("a")


async def _read_all(stream: TokenStream) -> None:
    while True:
        await stream.take(ends=1)


SCRIPTS = [
    tokens_come_by_steps_and_the_stream,
    a_request_that_cannot_run_is_refused_in_its_stream,
    an_evicted_request_ends_once,
    nobody_is_evicted_in_peace,
    a_cancelled_request_is_not_heard_of_again,
    new_weights_show_in_the_next_tokens,
    weights_that_were_not_staged_are_refused,
    a_death_is_told_to_all_who_wait,
]
Script = Callable[[Bench], Awaitable[Any]]


async def in_a_process(script: Script, folder: Path) -> Any:
    supervisor = Supervisor(start_command(folder, DeviceSettings(), factory=FACTORY), on_progress=lambda what: None)
    await supervisor.start()
    try:
        channel = supervisor.client.channel
        assert channel is not None
        return await script(Bench(supervisor.client, channel.kill, str(folder)))
    finally:
        await supervisor.client.close()


async def simulated(script: Script) -> Any:
    device = DedicatedDevice(NetworkGate(), random.Random(0), kv_blocks=256)
    running = asyncio.create_task(device.run())

    def kill() -> None:
        running.cancel()
        device.die("killed")

    try:
        return await script(Bench(device, kill, folder_of(7)))
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, RoseError):
            await running


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_both_engines_report_the_same(script, tmp_path):
    assert run_virtual(simulated(script), VirtualClock()) == asyncio.run(in_a_process(script, tmp_path))


def test_a_coarse_device_samples_the_same_tokens_in_fewer_events_and_more_time():
    async def play(device: DedicatedDevice) -> tuple[list[TokenEvent], int, float]:
        loop, times_s = asyncio.get_running_loop(), set[float]()
        device.events.steps.subscribe(lambda stepped: times_s.add(loop.time()))
        running = asyncio.create_task(device.run())
        streams = {name: TokenStream() for name in ("a", "b")}
        for number, (name, stream) in enumerate(streams.items()):
            sampling = Sampling(max_tokens=20 + number, ignore_eos=True, seed=number)
            device.submit([Request(name, (3, 4, 5), sampling)], stream)
        events = [event for stream in streams.values() for event in await whole(stream)]
        running.cancel()
        return events, len(times_s), loop.time()

    async def whole(stream: TokenStream) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        while not events or events[-1].finish_reason is None:
            events += await stream.take(ends=1)
        return events

    async def fine() -> tuple[list[TokenEvent], int, float]:
        return await play(DedicatedDevice(NetworkGate(), random.Random(0), kv_blocks=256))

    async def coarse() -> tuple[list[TokenEvent], int, float]:
        return await play(CoarseDevice(NetworkGate(), random.Random(0), kv_blocks=256, coarseness=8))

    (tokens, times, seconds), (tokens_coarse, times_coarse, seconds_coarse) = (
        run_virtual(run(), VirtualClock()) for run in (fine, coarse)
    )
    assert tokens_coarse == tokens
    assert times_coarse < times / 4
    assert 7 < seconds_coarse / seconds < 9
