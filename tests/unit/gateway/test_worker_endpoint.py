"""The WebSocket of workers: protocol errors, impossible tokens and slow readers cost only their connection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.unit.hostile_worker import hostile
from tests.unit.rollout_world import PROMPT, TOKENS, World, eventually, scripted, tell

from rose.api import worker_messages
from rose.api.worker_messages import (
    CONNECT_PATH,
    FRAME_MESSAGES_MAX,
    Heartbeat,
    Join,
    Leave,
    TokensAdded,
    decode_to_agent,
    encode,
)
from rose.api.worker_messages import TurnTokens as PieceOf
from rose.gateway import pool
from rose.gateway.gateway_server import Gateway
from rose.gateway.worker_endpoint import WORK_AT_ONCE, WORK_OF_OTHERS
from rose.models.model_folder import ModelFolder

NAN = float("nan")


@pytest.mark.parametrize(
    "frame, words",
    [
        (b"nonsense", "unreadable"),
        (encode([Join("n", "dedicated", "other model", "0", 1, 1, 1)]), "other model"),
        (encode([]), None),
    ],
)
def test_a_connection_that_breaks_the_protocol_is_closed(folder: ModelFolder, frame: bytes, words: str | None) -> None:
    async def story(found: World) -> None:
        headers = {"Authorization": f"Bearer {TOKENS.worker}"}
        async with found.http.ws_connect(found.url + CONNECT_PATH, headers=headers) as connection:
            await connection.send_bytes(frame)
            if words is None:
                await connection.close()
            else:
                said = str([decode_to_agent(m.data) async for m in connection if m.type is aiohttp.WSMsgType.BINARY])
                assert "Leave" in said and words in said
        assert len(found.gateway.core.pool) == 0

    tell(folder, story)


def test_a_second_worker_of_the_same_name_waits_for_the_first_to_go(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        first = found.gateway.core.pool.get("a")
        await found.worker("a2", name="a")
        await asyncio.sleep(0.3)
        assert found.gateway.core.pool.get("a") is first
        await found.stop("a")
        await eventually(lambda: found.gateway.core.pool.get("a") not in (None, first))

    tell(folder, story)


def test_an_agent_that_is_cancelled_just_as_it_is_welcomed_ends(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = aiohttp.ClientWebSocketResponse.receive

    async def story(found: World) -> None:
        async def cancelled_meanwhile(self: aiohttp.ClientWebSocketResponse) -> aiohttp.WSMessage:
            message = await receive(self)
            monkeypatch.undo()
            found.agent("a").cancel()
            return message

        monkeypatch.setattr(aiohttp.ClientWebSocketResponse, "receive", cancelled_meanwhile)
        await found.worker("a", name="b")
        await eventually(found.agent("a").done)

    tell(folder, story)


def test_a_worker_with_a_wrong_token_never_joins(folder: ModelFolder, caplog: pytest.LogCaptureFixture) -> None:
    async def story(found: World) -> None:
        await found.worker("a", token="wrong-token")
        await eventually(lambda: "ROSE_WORKER_TOKEN" in caplog.text)
        assert len(found.gateway.core.pool) == 0

    tell(folder, story)


@pytest.mark.parametrize("piece", [
    {"token_ids": (1, 2, 3), "logprobs": (-1.0, -1.0)},
    {"token_ids": (1 << 40,), "logprobs": (-1.0,)},
    {"token_ids": (-7,), "logprobs": (-1.0,)},
    {"token_ids": (100_000,), "logprobs": (-1.0,)},
    {"token_ids": (1,), "logprobs": (NAN,)},
    {"token_ids": (1,), "logprobs": (1e300,)},
    {"token_ids": (1,), "logprobs": (float("-inf"),)},
    {"token_ids": (1,) * 100, "logprobs": (-1.0,) * 100},
    {"token_ids": (1,), "logprobs": (-1.0,), "cached_tokens": 2**64 - 1},
    {"token_ids": (1,), "logprobs": (-1.0,), "top_logprobs": (((1, -1.0),), ((2, -1.0),))},
    {"token_ids": (1,), "logprobs": (-1.0,), "top_logprobs": (((999_999, -1.0),),)},
    {"token_ids": (), "logprobs": (), "finish_reason": "length"},
    {"token_ids": (1,), "logprobs": (-1.0,), "version": "v" * 1000},
    {"token_ids": (1,), "logprobs": (-1.0,), "attempt_id": 2**64 - 1},
])  # fmt: skip
def test_impossible_tokens_end_the_connection_and_the_turn_continues(
    folder: ModelFolder, piece: dict[str, Any], tmp_path: Path
) -> None:
    async def story(found: World) -> None:
        worker = await hostile(found)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=2))
        attempt_id = (await worker.turn()).attempt_id
        values = {"attempt_id": attempt_id, "version": "v0", "finish_reason": "stop"} | piece
        names = PieceOf.__struct_fields__
        defaults = {"cached_tokens": None, "top_logprobs": (), "prompt_logprobs": ()}
        said = [values.get(name, defaults.get(name)) for name in names]
        await worker.send(msgspec.msgpack.encode([{"type": "Tokens", "pieces": [said]}]))
        assert await worker.is_cut_off()
        await found.worker("honest")
        assert (await turn)["token_ids"] == scripted(PROMPT, 2)
        assert found.gateway.core.pool.get("hostile") is None and found.gateway.core.ledger.trouble is None

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))


@pytest.mark.parametrize("finish", [None, "abort", "length"])
def test_a_turn_with_all_its_tokens_has_ended_whatever_its_worker_says(folder: ModelFolder, finish: Any) -> None:
    async def story(found: World) -> None:
        worker = await hostile(found)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=2))
        attempt_id = (await worker.turn()).attempt_id
        await worker.say(TokensAdded((PieceOf(attempt_id, (3, 4), (-1.0, -1.0), "v0", finish),)))
        async with asyncio.timeout(20):
            answer = await turn
        assert (answer["token_ids"], answer["finish_reason"]) == ([3, 4], "length")

    tell(folder, story)


def test_a_worker_cannot_add_tokens_to_the_turn_of_another(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        owner = await hostile(found, "owner")
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=2))
        attempt_id = (await owner.turn()).attempt_id
        stranger = await hostile(found, "stranger")
        late = found.gateway.core.scheduler.counts.late
        await stranger.say(TokensAdded((PieceOf(attempt_id, (9, 9), (-1.0, -1.0), "v0", "length"),)))
        await eventually(lambda: found.gateway.core.scheduler.counts.late == late + 1)
        assert not turn.done()
        await owner.say(TokensAdded((PieceOf(attempt_id, (3, 4), (-1.0, -1.0), "v0", "length"),)))
        assert (await turn)["token_ids"] == [3, 4]

    tell(folder, story)


@pytest.mark.parametrize("frame", [
    msgspec.msgpack.encode([{"type": "Beat", "why": b"", "running": 0}]),
    b"\x91\x82\xa4type\xa6Beat\xa3why\xa1\xff",
    b"\x91" * 100_000,
    b"",
    b"\xc1",
    msgspec.msgpack.encode([Heartbeat(0, 0, 0, 0, "v0", True)] * (FRAME_MESSAGES_MAX + 1)),
    msgspec.msgpack.encode([Heartbeat(-1, 0, 0, 0, "v0", True)]),
    msgspec.msgpack.encode([Heartbeat(0, 0, 0, 0, "v0", True, NAN)]),
    msgspec.msgpack.encode([{"type": "VersionReady", "version": "v0", "size_bytes": -5}]),
    msgspec.msgpack.encode([{"type": "VersionReady", "version": "v", "seconds": {str(n): 1.0 for n in range(999)}}]),
    msgspec.msgpack.encode([{"type": "z" * 10_000}]),
], ids=["types", "utf-8", "deep", "empty", "reserved", "many", "negative", "nan", "size", "phases", "tag"])  # fmt: skip
def test_an_invalid_frame_ends_only_its_own_connection(folder: ModelFolder, frame: bytes) -> None:
    async def story(found: World) -> None:
        worker = await hostile(found)
        await worker.send(frame)
        await worker.is_cut_off()
        await found.worker("honest")
        assert (await found.turn(PROMPT, max_tokens=3))["token_ids"] == scripted(PROMPT, 3)

    tell(folder, story)


def test_others_are_answered_between_the_messages_of_one_frame(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns_of_loop: list[int] = []

    async def story(found: World) -> None:
        worker = await hostile(found)
        loop, ticks = asyncio.get_running_loop(), 0

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            loop.call_soon(tick)

        receive = Gateway.receive

        def counted(gateway: Gateway, *said: Any) -> None:
            turns_of_loop.append(ticks)
            receive(gateway, *said)

        monkeypatch.setattr(Gateway, "receive", counted)
        loop.call_soon(tick)
        for message, work in ((Heartbeat(0, 0, 0, 0, "v0", True), WORK_OF_OTHERS), (TokensAdded(()), 1)):
            turns_of_loop.clear()
            await worker.say(*[message] * 256)
            await eventually(lambda: len(turns_of_loop) >= 256)
            assert turns_of_loop[255] - turns_of_loop[0] >= 256 * work // WORK_AT_ONCE - 1

    tell(folder, story)


def test_a_worker_that_does_not_read_is_cut_off(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_messages, "WAITING_MAX", 50)

    async def story(found: World) -> None:
        await hostile(found)
        member = found.gateway.core.pool.get("hostile")
        assert member is not None
        for _ in range(200):
            member.send(Leave("x" * 4000, 1.0))
        await eventually(lambda: found.gateway.core.pool.get("hostile") is None)

    tell(folder, story)


def test_tokens_that_wait_for_a_hash_are_bounded(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WITHHELD_MAX", 10)

    async def story(found: World) -> None:
        version = {"version": "v1", "folder": str(folder.path), "hash": "right"}
        assert (await found.ask("POST", "/v1/versions", version))[0] == 200
        worker = await hostile(found)
        await worker.say(*(TokensAdded((PieceOf(number, (1,), (-1.0,), "v1"),)) for number in range(20)))
        assert "hash" in await worker.is_cut_off()

    tell(folder, story)
