"""A worker connection that sends whatever a test wants."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
from tests.unit.rollout_world import TOKENS, World, eventually

from rose.api.worker_messages import (
    CONNECT_PATH,
    Join,
    Leave,
    Turn,
    decode_to_agent,
)


class HostileWorker:
    """A connection with a worker's token that says whatever it is told to say."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        self._connection = connection
        self.turns: list[Turn] = []
        self.why = ""

    async def say(self, *messages: Any) -> None:
        await self._connection.send_bytes(msgspec.msgpack.encode(messages))

    async def send(self, frame: bytes) -> None:
        await self._connection.send_bytes(frame)

    async def turn(self) -> Turn:
        """The next turn that it gets."""
        while not self.turns:
            for message in await self._next():
                if isinstance(message, Turn):
                    self.turns.append(message)
        return self.turns.pop(0)

    async def is_cut_off(self) -> str:
        """Wait for the end; what the gateway said."""
        while True:
            messages = await self._next()
            if not messages:
                return self.why
            self.why = next((message.why for message in messages if isinstance(message, Leave)), self.why)

    async def _next(self) -> list[Any]:
        frame = await self._connection.receive(timeout=20)
        return decode_to_agent(frame.data) if frame.type is aiohttp.WSMsgType.BINARY else []


async def hostile(found: World, name: str = "hostile", **join: Any) -> HostileWorker:
    headers = {"Authorization": f"Bearer {TOKENS.worker}"}
    connection = await found.http.ws_connect(found.url + CONNECT_PATH, headers=headers)
    worker = HostileWorker(connection)
    await worker.say(Join(name, "dedicated", found.gateway.context.model_name, "v0", 8, 100_000, 4096, **join))
    await eventually(lambda: found.gateway.core.pool.get(name) is not None)
    return worker


async def begin(found: World, token: str = TOKENS.agent, **body: Any) -> tuple[int, Any]:
    return await found.ask("POST", "/v1/trajectories", body, token=token)
