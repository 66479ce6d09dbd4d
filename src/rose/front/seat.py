"""The rollouts' seat at a lent device's engine: connects to its door, and again whenever the engine was restarted.

The engine process belongs to the serving front; here is only a connection to it. While there is none, requests are
refused with the reason. It gives up only if keeping the connection fails by a defect: then its process ends, and the
serving front starts another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from rose.coserve import messages
from rose.coserve.channel import Channel
from rose.coserve.mailbox import Mailbox
from rose.coserve.supervision import settle, supervise
from rose.engines.base import EngineFacts, Request
from rose.errors import QueueFull, RoseError, Unavailable
from rose.front.tally import Tally

logger = logging.getLogger("rose.front")

PAUSE_S = 0.25


class Seat:
    """One per rollout front."""

    def __init__(self, address: str, requests_max: int) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.on_step: Callable[[messages.Stepped], None] = lambda stepped: None
        self.on_lending: Callable[[], None] = lambda: None
        self._address, self._requests_max = address, requests_max
        self._channel: Channel | None = None
        self._tally = Tally()
        self._reason = Unavailable("the device's engine is starting")
        self._closing = False
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the first connection."""
        while self._channel is None:
            await self._try()
        self._keeper = supervise(self._keep(), "the connection to the engine", lambda why: settle(self.gave_up, why))

    @property
    def trouble(self) -> Unavailable | None:
        return self._reason if self._channel is None else None

    @property
    def facts(self) -> EngineFacts:
        return self._tally.total(self._channel.facts if self._channel is not None else None)

    @property
    def lending_status(self) -> messages.LendingStatus | None:
        """How the device is lent, as far as it is known."""
        return self._channel.lending if self._channel is not None else None

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        channel = self._checked()
        if len(requests) > self._requests_max - channel.in_flight:
            raise QueueFull(f"{channel.in_flight} rollouts are running or waiting", hint="retry a little later")
        return channel.submit(requests)

    def cancel(self, request_ids: Iterable[str]) -> None:
        if self._channel is not None:
            self._channel.cancel(request_ids)

    async def ask(self, command: messages.Command) -> messages.Reply:
        return await self._checked().ask(command)

    async def close(self) -> None:
        self._closing = True
        self._reason = Unavailable("the device is shutting down")
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._channel is not None:
            await self._channel.leave()

    def _checked(self) -> Channel:
        if self._channel is None or self._closing:
            raise messages.error_of(messages.fault_of(self._reason))
        return self._channel

    async def _keep(self) -> None:
        while True:
            if self._channel is not None:
                reason = await asyncio.shield(self._channel.gone)
                self._tally.gone(self._channel.facts)
                self._channel, self._reason = None, Unavailable(reason.what, hint="retry a little later")
            await self._try()

    async def _try(self) -> None:
        try:
            channel = await Channel.attach(self._address)
        except RoseError as error:
            self._reason = Unavailable(error.what)
            await asyncio.sleep(PAUSE_S)
            return
        channel.on_step = lambda stepped: self.on_step(stepped)
        channel.on_lending = lambda: self.on_lending()
        self._tally.started(channel.facts)
        self._channel = channel
