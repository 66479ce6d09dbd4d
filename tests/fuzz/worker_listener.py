"""Fuzzes the gateway's WebSocket for workers: joins that are right or nearly so, then messages of all kinds.

A worker that joined with the right model is given turns. It answers some as it should, and spoils others: another
worker's attempt, an attempt that is over, more tokens than were asked for, log-probabilities that are no numbers. What
such a worker says is believed only within what the gateway can check, so the honest agent here checks the shape of its
answers and that it gets them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import aiohttp
from tests.fuzz import servers
from tests.fuzz.http_listeners import GENERATION, asked
from tests.fuzz.run import Listener
from tests.fuzz.servers import SERVING_MODEL, Server
from tests.fuzz.steps import Reply, Step
from tests.fuzz.values import Maker
from tests.integration.gateways import AGENT, TRAINER, WORKER

from rose.api import worker_messages as messages
from rose.api.worker_messages import CONNECT_PATH, ToGateway, decode_to_agent

VOCABULARY = 264
FRAMES_MAX = 25
MAX_TOKENS = GENERATION["sampling_params"]["max_tokens"]  # type: ignore[index]
KINDS = (messages.Heartbeat, messages.TokensAdded, messages.TurnRefused, messages.VersionReady, messages.Join)
BEAT = {"type": "Beat", "running": 0, "waiting": 0, "kv_used_tokens": 0, "kv_tokens": 4096, "version": "0",
        "gate_open": True}  # fmt: skip
ATTEMPT_IDS: deque[int] = deque(maxlen=64)  # of all workers of this process: some belong to others, some are over


async def play_worker(chance: random.Random, server: Server) -> Sequence[tuple[Step, Reply]]:
    """Be one worker for a moment; return its frames as steps."""
    maker = Maker(chance, "msgpack", bytes_max=chance.choice((1 << 10, 1 << 14, 1 << 18)))
    sent: list[tuple[Step, Reply]] = []

    async def send(value: Any) -> None:
        data = value if isinstance(value, bytes) else maker.encode(value)
        sent.append((Step(b"WS " + CONNECT_PATH.encode(), data), Reply(101, {}, b"")))
        await connection.send_bytes(data)

    url = f"http://127.0.0.1:{server.ports['gateway']}{CONNECT_PATH}"
    with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
        async with asyncio.timeout(10), aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {WORKER}"}
            async with http.ws_connect(url, headers=headers, max_msg_size=64 << 20) as connection:
                await send([_join(chance)] if chance.random() < 0.9 else maker.body(list[ToGateway]))
                for _ in range(chance.randrange(FRAMES_MAX)):
                    mine = await _turns(connection)
                    await send(_said(chance, maker, mine))
                if chance.random() < 0.3:
                    await connection.close()
    return sent


async def _turns(connection: aiohttp.ClientWebSocketResponse) -> list[messages.Turn]:
    """Return the turns that came in a moment."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.03):
            frame = await connection.receive()
            if frame.type is not aiohttp.WSMsgType.BINARY:
                raise ConnectionResetError
            found = [said for said in decode_to_agent(frame.data) if isinstance(said, messages.Turn)]
            ATTEMPT_IDS.extend(turn.attempt_id for turn in found)
            return found
    return []


def _join(chance: random.Random) -> dict[str, Any]:
    return {
        "type": "Join",
        "name": f"fuzz-{chance.randrange(6)}",
        "kind": chance.choice(("dedicated", "borrowed")),
        "model": SERVING_MODEL if chance.random() < 0.95 else "another",
        "version": chance.choice(("0", "0", "v9")),
        "seats": chance.choice((1, 4, 2**31 - 1)),
        "kv_tokens": chance.choice((0, 4096, 2**31 - 1)),
        "context_tokens": chance.choice((1, 1024, 2**31 - 1)),
    }


def _said(chance: random.Random, maker: Maker, mine: list[messages.Turn]) -> Any:
    match chance.randrange(6):
        case 0:
            return [BEAT]
        case 1:
            return maker.body(list[ToGateway])
        case 2:
            maker.known = {"ticket": [*ATTEMPT_IDS] or [1], "version": ("0",)}
            return maker.body(list[chance.choice(KINDS)])  # type: ignore[misc]
        case 3 if ATTEMPT_IDS:
            return [{"type": "Tokens", "pieces": [_piece(chance, maker, chance.choice(ATTEMPT_IDS), 4)]}]
        case 4 if ATTEMPT_IDS:
            return [
                {"type": "Refused", "ticket": chance.choice(ATTEMPT_IDS), "fault": {"kind": "Unavailable", "what": "x"}}
            ]
    pieces = [_piece(chance, maker, turn.attempt_id, turn.request.sampling.max_tokens) for turn in mine]
    return [BEAT, {"type": "Tokens", "pieces": pieces}]


def _piece(chance: random.Random, maker: Maker, attempt_id: int, count: int) -> list[Any]:
    """Return a piece that ends a turn as it should, or with one thing wrong in it."""
    count = min(count, 64)
    ids: list[Any] = [chance.randrange(VOCABULARY) for _ in range(count)]
    logprobs: list[Any] = [-0.5] * count
    finish, cached = "length", 0
    match chance.randrange(10):
        case 0 if ids:
            ids[0] = chance.choice((VOCABULARY, 2**31, 2**40, -1))
        case 1 if logprobs:
            logprobs[0] = chance.choice((maker.raw("nan"), maker.raw("infinity"), 1.0, 1e300))
        case 2:
            ids, logprobs = ids * 50, logprobs * 50
        case 3:
            logprobs = logprobs[1:]
        case 4:
            cached = chance.choice((2**63, 2**64 - 1, -1))
        case 5:
            finish = chance.choice(("abort", "stop", "x"))
        case 6:
            ids, logprobs = [], []
    return [attempt_id, ids, logprobs, "0", finish, cached, []]


async def honest(server: Server) -> str | None:
    """Ask for one turn without a trajectory; return what is wrong with the answer's shape."""
    found = await asked(server.ports["gateway"], "/inference/v1/generate", GENERATION, AGENT)
    if isinstance(found, str):
        return found
    [choice] = found["choices"]
    ids, content = choice["token_ids"], (choice.get("logprobs") or {"content": []})["content"]
    if any(not 0 <= token < VOCABULARY for token in ids):
        return "token ids outside the vocabulary"
    if not 1 <= len(ids) <= MAX_TOKENS:
        return "no tokens" if not ids else "more tokens than were asked for"
    if any(not math.isfinite(entry["logprob"]) for entry in content):
        return "log-probabilities that are no numbers"
    pool = await asked(server.ports["gateway"], "/v1/pool", None, TRAINER, "GET")
    return pool if isinstance(pool, str) else None


WORKERS = Listener("workers", servers.gateway, "gateway", None, honest, play_worker)


async def replay_frames(frames: Sequence[bytes], server: Server) -> None:
    """Send these frames as one worker, as far as it is let."""
    url = f"http://127.0.0.1:{server.ports['gateway']}{CONNECT_PATH}"
    with contextlib.suppress(aiohttp.ClientError, ConnectionError):
        async with aiohttp.ClientSession() as http:
            async with http.ws_connect(url, headers={"Authorization": f"Bearer {WORKER}"}) as connection:
                for frame in frames:
                    await connection.send_bytes(frame)
                    await asyncio.sleep(0.02)
