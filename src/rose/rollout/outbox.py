"""Messages on their way into a WebSocket: put without waiting, sent in one frame with whatever else is there by then.

Both ends have one per connection. What is put while a frame is on its way goes with the next one, so a slow connection
makes fewer and larger frames instead of a longer queue of small ones. A frame is closed at `FRAME_BYTES`, so that the
peer reads it in a few milliseconds. A peer for which `WAITING_MAX` messages wait loses its connection: what waits for
it must not grow without a bound. One that takes nothing at all is cut off by the connection itself, at both ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from rose.rollout.messages import FRAME_BYTES, FRAME_MESSAGES_MAX, ToAgent, ToGateway, encode, encode_one, join_frame

WAITING_MAX = 1 << 17  # twice the turns that a worker can have at once
AT_ONCE = 32  # messages that are encoded together; if that is too much for a frame, one by one


class Outbox:
    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._messages: deque[ToGateway | ToAgent] = deque()
        self._news = asyncio.Event()
        self._is_full = False

    def put(self, message: ToGateway | ToAgent) -> None:
        if len(self._messages) >= WAITING_MAX:
            self._is_full = True
        else:
            self._messages.append(message)
        self._news.set()

    async def run(self) -> None:
        """Send what is put, until cancelled. Raises ConnectionError when the peer is gone or does not read."""
        while True:
            await self._news.wait()
            await self.flush()

    async def flush(self) -> None:
        self._news.clear()
        while self._messages:
            await self._send(self._next_frame())
            if self._is_full:
                raise ConnectionResetError(f"{WAITING_MAX} messages wait for a peer that does not read")

    def _next_frame(self) -> bytes:
        messages = self._messages
        if len(messages) <= AT_ONCE:
            frame = encode(list(messages))
            if len(frame) <= FRAME_BYTES or len(messages) == 1:
                messages.clear()
                return frame
        parts: list[msgspec.Raw] = []
        size = 0
        while messages and len(parts) < FRAME_MESSAGES_MAX and size < FRAME_BYTES:
            part = encode_one(messages.popleft())
            parts.append(part)
            size += len(memoryview(part))
        return join_frame(parts)
