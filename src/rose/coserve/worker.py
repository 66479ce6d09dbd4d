"""The embedded engine as a `Worker`: its own engine process, gated, behind a `DeviceChannel`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

from rose.config.device import DeviceSettings
from rose.coserve import messages
from rose.coserve.channel import EMBEDDED, DeviceChannel, start_command
from rose.engines.base import Request, TokenEvent, WorkerFacts


class EmbeddedWorker:
    """One engine process. When it dies, iterators and calls end with `Unavailable`; make a new worker."""

    def __init__(self, channel: DeviceChannel) -> None:
        self._channel = channel

    @classmethod
    async def start(cls, model_folder: Path, *, settings: DeviceSettings, factory: str = EMBEDDED) -> EmbeddedWorker:
        """Start the process and wait until the model is loaded."""
        command = start_command(model_folder, settings, factory=factory, gated=True)
        return cls(await DeviceChannel.start(command))

    @property
    def process_id(self) -> int:
        return self._channel.process_id

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        # Bounded by the request's own max_tokens: a worker's reader may be slow, and must still get everything.
        mailbox = self._channel.submit([request], unread_tokens_max=math.inf)
        try:
            while events := await mailbox.take():
                for event in events:
                    if mailbox.closed:  # cancelled while some of these were unread
                        return
                    yield event
                    if event.finish_reason is not None:
                        return
        finally:
            self._channel.cancel([request.request_id])

    async def evict(self, request_id: str) -> None:
        await self._channel.ask(messages.Evict(request_id))

    async def cancel(self, request_id: str) -> None:
        self._channel.forget(request_id)

    async def grant(self, tokens: int, sequences: int, until_s: float) -> None:
        await self._channel.ask(messages.SetGrant(tokens, sequences, until_s))

    async def kv_budget(self, budget_bytes: int) -> None:
        await self._channel.ask(messages.KvBudget(budget_bytes))

    async def stage(self, version: str, source: str) -> None:
        await self._channel.ask(messages.Stage(version, source))

    async def commit(self, version: str) -> None:
        await self._channel.ask(messages.Commit(version))

    async def facts(self) -> WorkerFacts:
        reply = await self._channel.ask(messages.GetFacts(0))
        return WorkerFacts(reply.facts, reply.gate_open, reply.staged_version)

    async def close(self) -> None:
        await self._channel.close()
