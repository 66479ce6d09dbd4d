"""Messages on their way into a WebSocket: put without waiting, sent in one frame with whatever else is there by then.

Both ends have one per connection. What is put while a frame is on its way goes with the next one, so a slow connection
makes fewer and larger frames instead of a longer queue of small ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rose.rollout.messages import ToAgent, ToGateway, encode

FRAME_MESSAGES_MAX = 1024


class Outbox:
    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._messages: list[ToGateway | ToAgent] = []
        self._news = asyncio.Event()

    def put(self, message: ToGateway | ToAgent) -> None:
        self._messages.append(message)
        self._news.set()

    async def run(self) -> None:
        """Send what is put, until cancelled. Raises ConnectionError when the connection is gone."""
        while True:
            await self._news.wait()
            await self.flush()

    async def flush(self) -> None:
        self._news.clear()
        while self._messages:
            frame, self._messages = self._messages[:FRAME_MESSAGES_MAX], self._messages[FRAME_MESSAGES_MAX:]
            await self._send(encode(frame))
