"""Keeps one engine process running behind the front.

The first start may fail, and then the device does not start at all: a bad model folder is the user's to mend. Later an
engine that dies is started again, after a pause that doubles with every quick death; after `QUICK_DEATHS_MAX` of them
in a row the supervisor gives up, and so does the device. In between, requests are refused with the reason. An engine
that no longer answers is killed and then treated like any other dead one. Of a device that is lent, a new engine has
the owner's word and its limits from its start on, and deaths that rollouts may have caused do not count; one that does
not start with the rollout model is started without (standing.py), and rollouts' fronts are told why at the door.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from rose.coserve import messages
from rose.coserve.channel import DeviceChannel
from rose.coserve.door import turn_away
from rose.coserve.mailbox import Mailbox
from rose.coserve.supervision import settle, supervise
from rose.engines.base import EngineFacts, Request
from rose.errors import QueueFull, RoseError, Unavailable
from rose.front.standing import StandingOrders
from rose.front.tally import Tally

logger = logging.getLogger("rose.front")

QUICK_DEATH_S = 20.0  # an engine that lived longer had worked: its death starts a new count
QUICK_DEATHS_MAX = 5
PAUSE_FIRST_S = 0.25
PAUSE_LONGEST_S = 10.0
QUESTION_EVERY_S = 10.0
ANSWER_WITHIN_S = 60.0  # many times the longest step; a process that is silent for longer is stuck


class Supervisor:
    """One per device. `gave_up` is set when the engine cannot be kept running."""

    def __init__(
        self, command: messages.Start, *, on_progress: Callable[[str], None], door: socket.socket | None = None
    ) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.on_step: Callable[[messages.Stepped], None] = lambda stepped: None
        self.on_word: Callable[[messages.Breached | messages.Noted], None] = lambda word: None
        self.on_lending: Callable[[], None] = lambda: None
        self.orders = StandingOrders(command.lend)
        self._command = command
        self._door = door
        self._on_progress = on_progress
        self._channel: DeviceChannel | None = None
        self._tally = Tally()
        self._reason = Unavailable("the engine is starting")
        self._closing = False
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """The first engine; raises what keeps it from starting."""
        await self._start_engine()
        self._keeper = supervise(self._keep(), "the supervisor of the engine", self._give_up)

    @property
    def trouble(self) -> Unavailable | None:
        """Why requests cannot be taken now."""
        return self._reason if self._channel is None else None

    @property
    def lending_status(self) -> messages.LendingStatus | None:
        """How the device is lent, as far as it is known; None if it is not."""
        return self._channel.lending if self._channel is not None else None

    @property
    def process_id(self) -> int | None:
        return self._channel.process_id if self._channel is not None else None

    @property
    def facts(self) -> EngineFacts:
        """The newest facts, with counters over all engines so far."""
        return self._tally.total(self._channel.facts if self._channel is not None else None)

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        """Raises Unavailable while there is no engine, QueueFull when too much is under way already."""
        if self._channel is None or self._closing:
            raise messages.error_of(messages.fault_of(self._reason))
        settings = self._command.settings
        room = settings.max_sequences + settings.max_waiting - self._channel.in_flight
        if len(requests) > room:
            raise QueueFull(
                f"{self._channel.in_flight} requests are running or waiting, and {len(requests)} more are too many",
                hint="retry a little later",
            )
        return self._channel.submit(requests)

    def cancel(self, request_ids: Iterable[str]) -> None:
        if self._channel is not None:
            self._channel.cancel(request_ids)

    async def ask(self, command: messages.Command) -> messages.Reply:
        """A question to the engine; raises Unavailable while there is none, and what it replies with."""
        if self._channel is None or self._closing:
            raise messages.error_of(messages.fault_of(self._reason))
        return await self._channel.ask(command)

    async def close(self) -> None:
        """Stop for good: what is under way ends with Unavailable."""
        self._closing = True
        self._reason = Unavailable("the device is shutting down")
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
        if self._door is not None:
            asyncio.get_running_loop().remove_reader(self._door)

    async def _start_engine(self) -> None:
        lend = self.orders.lend
        command, door = msgspec.structs.replace(self._command, lend=lend), self._door if lend is not None else None
        if self._door is not None:
            self._doorman(self._door)
        channel = await DeviceChannel.start(command, door=door, on_progress=self._on_progress)
        channel.on_step = lambda stepped: self.on_step(stepped)
        channel.on_word = lambda word: self.on_word(word)
        channel.on_lending = lambda: self.on_lending()
        self._tally.started(channel.facts)
        self._channel = channel

    def _doorman(self, door: socket.socket) -> None:
        """While the engine runs without rollouts nobody else opens to their front; then it is told why here."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(door)
        if self.orders.removed:
            door.setblocking(False)
            loop.add_reader(door, turn_away, door, self.orders.removed)

    def _give_up(self, reason: Unavailable) -> None:
        """End the device; its parent starts it again."""
        settle(self.gave_up, reason)

    async def _keep(self) -> None:
        deaths = own_deaths = 0
        unready = ""  # why the last engine did not start
        while True:
            born_s = time.monotonic()
            if self._channel is not None:
                self._mourn(await self._until_gone(self._channel))
            is_quick = time.monotonic() - born_s < QUICK_DEATH_S
            deaths = deaths + 1 if is_quick else 1
            was_lent = self.orders.died(is_quick=is_quick, unready=unready)
            own_deaths = (own_deaths if is_quick else 0) + (not was_lent)
            if own_deaths >= QUICK_DEATHS_MAX:
                self._give_up(
                    Unavailable(
                        f"the engine died {deaths} times in a row, the last time because: {self._reason.what}",
                        hint="the lines above say more; `rose doctor` checks the machine",
                    )
                )
                return
            await asyncio.sleep(min(PAUSE_LONGEST_S, PAUSE_FIRST_S * 2 ** (deaths - 1)))
            unready = await self._try_again()

    async def _until_gone(self, channel: DeviceChannel) -> Unavailable:
        """Wait for the engine's end, asking now and then whether it is still there."""
        while True:
            await asyncio.wait([channel.gone], timeout=QUESTION_EVERY_S)
            if channel.gone.done():
                return channel.gone.result()
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    await channel.ask(messages.GetFacts(0))
            except TimeoutError:
                logger.error("the engine process has not answered for %.0f s; killing it", ANSWER_WITHIN_S)
                channel.kill()
            except RoseError:
                pass  # it just went

    def _mourn(self, reason: Unavailable) -> None:
        logger.error("the engine is gone: %s; restarting it", reason.what)
        if self._channel is not None:
            self._tally.gone(self._channel.facts)
        self._channel = None
        self._reason = Unavailable(f"{reason.what}; it is being restarted", hint="retry a little later")

    async def _try_again(self) -> str:
        """Why it did not work, or nothing."""
        try:
            await self._start_engine()
        except RoseError as error:
            logger.error("the engine cannot be restarted: %s", error.what)
            self._reason = Unavailable(f"the engine cannot be restarted: {error.what}")
            return error.what
        logger.warning("the engine is running again")
        return ""
