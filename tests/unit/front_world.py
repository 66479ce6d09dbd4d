"""A device's HTTP server in this process, with an engine that answers at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from rose.config.device import FrontSettings
from rose.coserve.mailbox import Mailbox
from rose.engines.base import EngineFacts, Request, TokenEvent
from rose.errors import Unavailable
from rose.front.application import InFlight, application
from rose.front.building import build_front
from rose.front.connections import HttpServer
from rose.front.context import Front
from rose.front.ports import take_port
from rose.models.folder import ModelFolder
from rose.observe.metrics import Metrics

BEAT_S = 0.005
TOKEN = 97


class InstantEngine:
    """Every request ends at once, with as many tokens as it asked for."""

    def __init__(self, context_tokens: int = 8192) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.trouble: Unavailable | None = None
        self.facts = EngineFacts("v0", 0, 0, 100, 0, 0, 16, 1024, context_tokens)
        self.requests: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        self.requests += requests
        mailbox = Mailbox(float("inf"))
        for request in requests:
            most, top = request.sampling.max_tokens, request.sampling.top_logprobs
            alternatives = tuple((TOKEN + rank, -float(rank + 1)) for rank in range(top))
            shown = (alternatives,) * most if top else ()
            mailbox.put(
                TokenEvent(request.request_id, (TOKEN,) * most, (-1.0,) * most, "v0", "length", shown, 0, ("w",))
            )
        return mailbox

    def cancel(self, request_ids: Iterable[str]) -> None:
        return

    async def close(self) -> None:
        return


class Heartbeat:
    """Beats on the event loop; `longest_s` is the longest time between two beats."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def beat(self) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = time.monotonic()
            self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s


class FrontWorld:
    def __init__(self, front: Front, engine: InstantEngine, port: int) -> None:
        self.front, self.engine, self.port = front, engine, port

    async def send(self, raw: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to these bytes, which must end the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        writer.write(raw)
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            body = await reader.readexactly(size)
        writer.close()
        return int(head.split(b" ", 2)[1]), body

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str | bytes] | None = None
    ) -> tuple[int, Any]:
        status, answer = await self.ask_raw(method, path, body, headers)
        return status, msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else answer

    async def ask_raw(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str | bytes] | None = None
    ) -> tuple[int, bytes]:
        lines: dict[str, str | bytes] = {"Host": "localhost", "Content-Length": str(len(body))} | (headers or {})
        shown = (
            name.encode() + b": " + (value if isinstance(value, bytes) else value.encode())
            for name, value in lines.items()
        )
        raw = f"{method} {path} HTTP/1.1\r\n".encode() + b"\r\n".join(shown) + b"\r\n\r\n" + body
        return await self.send(raw)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self.ask("POST", path, data, dict(headers))


@asynccontextmanager
async def front_world(
    folder: ModelFolder,
    settings: FrontSettings | None = None,
    *,
    context_tokens: int = 8192,
    token: str | None = None,
    api_key: str | None = None,
    most: int = 64,
) -> AsyncIterator[FrontWorld]:
    settings = settings or FrontSettings()
    engine = InstantEngine(context_tokens)
    front = build_front(
        folder, None, settings, engine, metrics=Metrics(process_facts=False), token=token, api_key=api_key
    )
    server = HttpServer(application(front, InFlight()), settings, "rose.test", most)
    listener = take_port(FrontSettings(port=0))
    await server.listen(listener)
    try:
        yield FrontWorld(front, engine, listener.getsockname()[1])
    finally:
        await server.close()
