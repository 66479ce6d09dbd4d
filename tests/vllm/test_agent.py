"""The agent's own engine on vLLM: turns through a mailbox, new weights, the owner's word, and a death it survives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from tests.vllm.engines import rollout_engine

from rose.coserve import messages
from rose.coserve.mailbox import Mailbox
from rose.coserve.owner import PAUSED
from rose.engines.base import Request, Sampling
from rose.errors import RequestRefused, RoseError
from rose.rollout.vllm_agent import VllmLending, VllmSeat
from rose.rollout.vllm_owner import VllmOwner

TOKEN = "an-owner's-token"
STORY_S = 240


def turn(name: str, max_tokens: int = 8) -> Request:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tuple(range(40)), sampling)


async def whole(seat: VllmSeat, request: Request) -> tuple[list[int], set[str]]:
    mailbox = seat.submit([request])
    tokens: list[int] = []
    versions: set[str] = set()
    while True:
        for event in await mailbox.take():
            tokens += event.token_ids
            versions |= {event.version} if event.token_ids else set()
            if event.finish_reason is not None:
                return tokens, versions


async def asked(port: int, action: str, **body: float) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with ClientSession(f"http://127.0.0.1:{port}", headers=headers) as http:
        async with http.post(f"/rose/lending/{action}", json=body) as reply:
            found: dict[str, object] = await reply.json()
            return found


async def obeys_its_owner(seat: VllmSeat) -> None:
    runner = web.AppRunner(VllmOwner(seat, TOKEN).application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with ClientSession() as http, http.get(f"http://127.0.0.1:{port}/rose/lending") as reply:
            assert reply.status == 401
        assert (await asked(port, "pause"))["state"] == "paused"
        assert seat.trouble is not None and seat.trouble.what == PAUSED
        waiting = asyncio.create_task(whole(seat, turn("paused")))
        halved = await asked(port, "limits", memory_share=0.5, compute_share=0.5)
        assert (halved["memory_share"], halved["compute_share"], waiting.done()) == (0.5, 0.5, False)
        drained = await asked(port, "drain")
        assert (drained["state"], drained["rollout_pages_max"]) == ("drained", 0)
        assert len((await waiting)[0]) == 0, "evicted before its first token"
        resumed = await asked(port, "resume")
        assert resumed["state"] == "lending"
        assert resumed["rollout_pages_max"] == int(str(resumed["pages"])) // 2
        assert "error" in await asked(port, "nonsense")
    finally:
        await runner.cleanup()


async def ended(mailbox: Mailbox) -> None:
    while await mailbox.take():
        pass


async def is_restarted_with_its_weights(seat: VllmSeat, version: str) -> None:
    running = seat.submit([turn("cut short", 900)])
    process = seat._process
    assert process is not None
    process.kill()
    with pytest.raises(RoseError):
        await ended(running)
    while seat.restarts == 0:
        await asyncio.sleep(0.05)
    assert seat.facts.version == version
    assert (await whole(seat, turn("after")))[1] == {version}


def test_the_life_of_a_dedicated_worker(model_folders: list[Path]) -> None:
    async def story() -> None:
        seat = VllmSeat(VllmLending(rollout_engine(model_folders[0])))
        steps: list[messages.Stepped] = []
        seat.on_step = steps.append
        try:
            await seat.start()
            before = await whole(seat, turn("before"))
            assert len(before[0]) == 8
            assert sum(len(event.token_ids) for step in steps for event in step.events) == 8
            await seat.ask(messages.Stage("next", str(model_folders[1])))
            await seat.ask(messages.Commit("next"))
            after = await whole(seat, turn("behind it"))
            assert after[0] != before[0] and after[1] == {"next"}
            with pytest.raises(RequestRefused):
                await seat.ask(messages.SetGrant(1, 1, 0.0))
            await obeys_its_owner(seat)
            await is_restarted_with_its_weights(seat, "next")
        finally:
            await seat.close()

    async def bounded() -> None:
        async with asyncio.timeout(STORY_S):
            await story()

    asyncio.run(bounded())
