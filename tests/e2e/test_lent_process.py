"""A lent device as it runs: one engine process, two models, a socket for each side."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rose.config.device import EngineSettings
from rose.coserve import messages
from rose.coserve.channel import EMBEDDED, Channel, DeviceChannel
from rose.engines.base import Request, Sampling, TokenEvent
from rose.errors import RoseError, Unavailable
from rose.models.presets import write_preset

SETTINGS = EngineSettings(kv_memory_mb=64, max_context_tokens=1024, max_sequences=16)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> messages.Start:
    place = tmp_path_factory.mktemp("models")
    for name in ("qwen3-3m", "frozenlake-1m"):
        write_preset(name, place / name, seed=1)
    lend = messages.Lend(str(place / "frozenlake-1m"), SETTINGS, ttft_s=2.0, tpot_s=1.0)
    return messages.Start(EMBEDDED, str(place / "qwen3-3m"), "cpu:0", SETTINGS, lend=lend)


def request(name: str, max_tokens: int = 20) -> Request:
    return Request(name, tuple(range(30)), Sampling(max_tokens=max_tokens, ignore_eos=True))


async def answer(channel: Channel, asked: Request) -> list[TokenEvent]:
    mailbox = channel.submit([asked])
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        events += await mailbox.take()
    return events


async def both_sides(device: DeviceChannel) -> tuple[Channel, Channel]:
    assert device.rollout is not None
    return device, device.rollout


def test_both_sides_are_answered_and_know_nothing_of_each_other(start: messages.Start) -> None:
    async def story() -> None:
        device = await DeviceChannel.start(start)
        serving, rollout = await both_sides(device)
        before = [side.facts.generated_tokens for side in (serving, rollout)]
        same_name = await asyncio.gather(*(answer(side, request("same name")) for side in (serving, rollout)))
        assert [len(events) for events in same_name] == [20, 20]
        facts = [(await side.ask(messages.GetFacts(0))).facts for side in (serving, rollout)]
        assert [fact.generated_tokens - base for fact, base in zip(facts, before, strict=True)] == [20, 20]
        assert facts[0].block_bytes != facts[1].block_bytes
        await device.close()
        with pytest.raises(Unavailable):
            await answer(rollout, request("late"))

    asyncio.run(story())


def test_a_killed_engine_ends_both_sides(start: messages.Start) -> None:
    async def story() -> None:
        device = await DeviceChannel.start(start)
        serving, rollout = await both_sides(device)
        waiting = [asyncio.create_task(answer(side, request("long", 900))) for side in (serving, rollout)]
        await asyncio.sleep(0.2)
        os.kill(device.process_id, signal.SIGKILL)
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, Unavailable) for end in ended)
        await device.close()

    asyncio.run(story())


@pytest.mark.parametrize("broken", ["no-such-folder", ""])
def test_a_rollout_model_that_cannot_load_is_said_at_start(start: messages.Start, tmp_path: Path, broken: str) -> None:
    async def story() -> None:
        assert start.lend is not None
        lend = messages.Lend(str(tmp_path / broken), SETTINGS)
        with pytest.raises(RoseError, match=r"config\.json"):
            await DeviceChannel.start(messages.Start(EMBEDDED, start.folder, "cpu:0", SETTINGS, lend=lend))

    asyncio.run(story())
