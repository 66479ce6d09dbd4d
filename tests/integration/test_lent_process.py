"""A lent device as it runs: one engine process, two models, a socket for each side."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose.config.server_settings import EngineSettings, LendSettings
from rose.device import engine_messages
from rose.device.engine_channel import EMBEDDED, Channel, DeviceChannel
from rose.device.transport import address_of, open_rollout_listener
from rose.engines.base import Request, Sampling, TokenEvent
from rose.engines.token_stream import TokenStream
from rose.errors import RoseError, Unavailable
from rose.models.presets import write_preset

SETTINGS = EngineSettings(kv_memory_mb=64, max_context_tokens=1024, max_sequences=16)
TERMS = LendSettings(ttft_ms=2000.0, tpot_ms=1000.0, max_context_tokens=1024, max_sequences=16)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> engine_messages.StartEngine:
    place = tmp_path_factory.mktemp("models")
    for name in ("qwen3-3m", "frozenlake-1m"):
        write_preset(name, place / name, seed=1)
    lend = engine_messages.Lend(str(place / "frozenlake-1m"), TERMS)
    return engine_messages.StartEngine(EMBEDDED, str(place / "qwen3-3m"), "cpu:0", SETTINGS, lend=lend)


def request(name: str, max_tokens: int = 20) -> Request:
    return Request(name, tuple(range(30)), Sampling(max_tokens=max_tokens, ignore_eos=True))


async def answer(channel: Channel, asked: Request) -> list[TokenEvent]:
    stream = TokenStream()
    channel.submit([asked], stream)
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        events += await stream.take()
    return events


@asynccontextmanager
async def both_sides(start: engine_messages.StartEngine) -> AsyncIterator[tuple[DeviceChannel, Channel]]:
    with open_rollout_listener() as listener:
        device = await DeviceChannel.start(start, listener=listener)
        rollout = await Channel.attach(address_of(listener))
        yield device, rollout
        await device.close()


def test_both_sides_are_answered_and_know_nothing_of_each_other(start: engine_messages.StartEngine) -> None:
    async def story() -> None:
        async with both_sides(start) as (serving, rollout):
            before = [side.facts.generated_tokens for side in (serving, rollout)]
            same_name = await asyncio.gather(*(answer(side, request("same name")) for side in (serving, rollout)))
            assert [len(events) for events in same_name] == [20, 20]
            facts = [(await side.call(engine_messages.GetFacts(0))).facts for side in (serving, rollout)]
            assert [fact.generated_tokens - base for fact, base in zip(facts, before, strict=True)] == [20, 20]
            assert facts[0].block_bytes != facts[1].block_bytes
        with pytest.raises(Unavailable):
            await answer(rollout, request("late"))

    asyncio.run(story())


def test_a_killed_engine_ends_both_sides(start: engine_messages.StartEngine) -> None:
    async def story() -> None:
        async with both_sides(start) as (serving, rollout):
            waiting = [asyncio.create_task(answer(side, request("long", 900))) for side in (serving, rollout)]
            await asyncio.sleep(0.01)  # a fast machine answers in a tenth of a second
            os.kill(serving.process_id, signal.SIGKILL)
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(end, Unavailable) for end in ended)

    asyncio.run(story())


def test_an_engine_process_gets_no_secrets_of_its_front(
    start: engine_messages.StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("ROSE_OWNER_TOKEN", "ROSE_WORKER_TOKEN", "ROSE_RELAY_SECRET", "ROSE_API_KEY"):
        monkeypatch.setenv(variable, "not-for-the-engine")

    async def story() -> None:
        async with both_sides(start) as (serving, _):
            environment = Path(f"/proc/{serving.process_id}/environ").read_bytes()
            assert b"PATH=" in environment and b"not-for-the-engine" not in environment

    asyncio.run(story())


def test_the_seat_is_taken_again_after_its_holder_left(start: engine_messages.StartEngine) -> None:
    async def story() -> None:
        with open_rollout_listener() as listener:
            device = await DeviceChannel.start(start, listener=listener)
            for turn in range(2):
                rollout = await Channel.attach(address_of(listener))
                assert len(await answer(rollout, request(f"turn {turn}"))) == 20
                unfinished = asyncio.create_task(answer(rollout, request("unfinished", 900)))
                await asyncio.sleep(0.05)
                await rollout.close()
                assert isinstance((await asyncio.gather(unfinished, return_exceptions=True))[0], Unavailable)
            await device.close()

    asyncio.run(story())


@pytest.mark.parametrize("broken", ["no-such-folder", ""])
def test_a_rollout_model_that_cannot_load_is_said_at_start(
    start: engine_messages.StartEngine, tmp_path: Path, broken: str
) -> None:
    async def story() -> None:
        lend = engine_messages.Lend(str(tmp_path / broken), TERMS)
        with open_rollout_listener() as listener, pytest.raises(RoseError, match=r"config\.json"):
            await DeviceChannel.start(
                engine_messages.StartEngine(EMBEDDED, start.folder, "cpu:0", SETTINGS, lend=lend), listener=listener
            )

    asyncio.run(story())


@pytest.mark.parametrize(
    "settings, terms, words",
    [
        ({"kv_memory_mb": 4}, {}, "too few to share"),
        ({"kv_memory_mb": 16}, {"page_kb": 3000}, "evenly only 8 at a time"),
        (
            {"kv_memory_mb": 12},
            {"headroom_share": 0.8, "max_context_tokens": 4096},
            r"(?s)frozenlake-1m .* less than one context of 4096.* lend\.headroom_share$",
        ),
        (
            {"kv_memory_mb": 9, "max_context_tokens": 2200},  # the last MiB is no whole page
            {},
            r"(?s)qwen3-3m .* less than one context of 2200.* engine\.max_context_tokens$",
        ),
        ({}, {"ttft_ms": 1e-3, "tpot_ms": 1e-6}, "no request can keep"),  # no machine is as fast
    ],
)
def test_terms_that_cannot_work_are_refused_with_figures(
    start: engine_messages.StartEngine, settings: dict[str, Any], terms: dict[str, Any], words: str
) -> None:
    async def story() -> None:
        assert start.lend is not None
        lend = engine_messages.Lend(start.lend.folder, replace(TERMS, **terms))
        command = engine_messages.StartEngine(EMBEDDED, start.folder, "cpu:0", replace(SETTINGS, **settings), lend=lend)
        with open_rollout_listener() as listener, pytest.raises(RoseError, match=words):
            await DeviceChannel.start(command, listener=listener)

    asyncio.run(story())


def test_serving_may_have_a_context_that_its_headroom_does_not_hold(start: engine_messages.StartEngine) -> None:
    """Of four pages one is its headroom, and this context takes two: rollouts give way."""

    async def story() -> None:
        small = msgspec.structs.replace(start, settings=replace(SETTINGS, kv_memory_mb=8))
        async with both_sides(small) as (serving, rollout):
            assert len(await answer(serving, request("long", 900))) == 900
            assert len(await answer(rollout, request("short"))) == 20

    asyncio.run(story())


def test_terms_that_will_disappoint_are_said_with_figures(start: engine_messages.StartEngine) -> None:
    said: list[str] = []

    async def story() -> None:
        assert start.lend is not None
        lend = engine_messages.Lend(start.lend.folder, replace(TERMS, ttft_ms=0.4, tpot_ms=0.5))
        command = engine_messages.StartEngine(EMBEDDED, start.folder, "cpu:0", SETTINGS, lend=lend)
        with open_rollout_listener() as listener:
            device = await DeviceChannel.start(command, listener=listener, on_progress=said.append)
            await device.close()

    asyncio.run(story())
    warnings = "\n".join(line for line in said if line.startswith("warning"))
    for words in ("more than its TTFT budget", "swapped", "nothing will be lent"):
        assert words in warnings
