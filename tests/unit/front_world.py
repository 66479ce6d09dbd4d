"""A device's HTTP server in this process, with an engine that answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from rose.config.server_settings import FrontSettings
from rose.engines.base import EngineEvents, EngineFacts, LendingStatus, Request, TokenEvent
from rose.engines.token_stream import TokenSink
from rose.errors import Unavailable
from rose.models.model_folder import ModelFolder
from rose.observe.metrics import Metrics
from rose.openai.application import application
from rose.openai.http_context import HttpContext
from rose.openai.http_server import HttpServer, InFlight, take_port

TOKEN = 97


class InstantEngine:
    """Every request ends at once, with as many tokens as it asked for."""

    def __init__(self, context_tokens: int = 8192) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.events = EngineEvents()
        self.trouble: Unavailable | None = None
        self.lending_status: LendingStatus | None = None
        self.facts = EngineFacts("v0", 0, 0, 100, 0, 0, 16, 1024, context_tokens)
        self.requests: list[Request] = []

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        self.requests += requests
        for request in requests:
            most, top = request.sampling.max_tokens, request.sampling.top_logprobs
            alternatives = tuple((TOKEN + rank, -float(rank + 1)) for rank in range(top))
            shown = (alternatives,) * most if top else ()
            sink.put(TokenEvent(request.request_id, (TOKEN,) * most, (-1.0,) * most, "v0", "length", shown, 0, ("w",)))

    def cancel(self, request_ids: Iterable[str]) -> None:
        return

    async def evict(self, request_id: str) -> None:
        return

    async def stage(self, version: str, folder: str) -> None:
        return

    async def commit(self, version: str) -> None:
        return

    async def set_wanted(self, is_wanted: bool) -> None:
        return

    async def query(self) -> EngineFacts:
        return self.facts

    async def close(self) -> None:
        return


class FrontWorld:
    """A running server, its engine, and a client of it."""

    def __init__(self, front: HttpContext, engine: InstantEngine, in_flight: InFlight, port: int) -> None:
        self.front, self.engine, self.in_flight, self.port = front, engine, in_flight, port

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
    front = HttpContext.build(
        folder, None, settings, engine, metrics=Metrics(process_facts=False), token=token, api_key=api_key
    )
    in_flight = InFlight()
    server = HttpServer(application(front, in_flight), settings, "rose.test", most)
    listener = take_port(FrontSettings(port=0))
    await server.listen(listener)
    try:
        yield FrontWorld(front, engine, in_flight, listener.getsockname()[1])
    finally:
        await server.close()


def run_with_server(
    folder: ModelFolder,
    story: Callable[[FrontWorld], Awaitable[None]],
    settings: FrontSettings | None = None,
    **options: Any,
) -> None:
    """Run a story in an event loop of its own, with a server of this model."""

    async def run() -> None:
        async with front_world(folder, settings, **options) as world:
            await story(world)

    asyncio.run(run())


async def stream_of(world: FrontWorld, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a streamed response, which must end as streams do."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    data = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200") and b"text/event-stream" in answer
    events = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    return [msgspec.json.decode(event) for event in events]
