"""What the routes need of an engine, whoever keeps it running: a supervisor of its process, or a seat at its door."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from rose.coserve.mailbox import Mailbox
from rose.engines.base import EngineFacts, Request
from rose.errors import Unavailable


class EngineHandle(Protocol):
    gave_up: asyncio.Future[Unavailable]  # set when there will be no engine any more

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def trouble(self) -> Unavailable | None:
        """Why requests cannot be taken now."""

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        """Raises Unavailable while there is no engine, QueueFull when too much is under way already."""

    def cancel(self, request_ids: Iterable[str]) -> None: ...

    async def close(self) -> None: ...
