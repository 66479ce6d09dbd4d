"""The network of a simulated world.

A `Wire` is one connection. Frames arrive complete and in order, each after a delay, as TCP guarantees. A partition
holds frames back until it heals. A process that dies closes its connections, and the other end sees that after all
earlier frames. A machine that loses power closes nothing, so the other end must detect it by itself.

A `ClientLine` carries one client's requests to the gateway; requests and replies may be lost or duplicated.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar


class NetworkGate:
    """The boundary of a process; everything that enters or leaves it passes here."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._held: list[Callable[[], None]] = []

    def enter(self, do: Callable[[], None]) -> None:
        if self.is_stopped or self._held:
            self._held.append(do)
        else:
            do()

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        while self._held and not self.is_stopped:
            self._held.pop(0)()

    def clear(self) -> None:
        """Drop what waits: the process has died."""
        self.is_stopped = False
        self._held.clear()


DELAY_S = (0.0005, 0.004)

Answer = TypeVar("Answer")
Frame = bytes | None
"""None is the end of the connection."""


class NetworkPlace:
    """A process in the network; while it is cut off, its frames are held back."""

    def __init__(self) -> None:
        self.is_cut_off = False
        self._held: list[Callable[[], None]] = []

    def cut_off(self) -> None:
        self.is_cut_off = True

    def heal(self) -> None:
        self.is_cut_off = False
        held, self._held = self._held, []
        for deliver in held:
            deliver()

    def pass_on(self, deliver: Callable[[], None]) -> None:
        if self.is_cut_off:
            self._held.append(deliver)
        else:
            deliver()


class Direction:
    """One direction of a wire."""

    def __init__(self, place: NetworkPlace, chance: random.Random, deliver: Callable[[Frame], None]) -> None:
        self._place, self._chance, self._deliver = place, chance, deliver
        self._last_s = 0.0
        self._frames: deque[Frame] = deque()  # in transit; timers of one moment fire in any order
        self.is_dead = False  # the receiver has closed

    def send(self, frame: Frame) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s, loop.time() + self._chance.uniform(*DELAY_S))
        self._frames.append(frame)
        loop.call_at(self._last_s, self._place.pass_on, self._arrive)

    def _arrive(self) -> None:
        frame = self._frames.popleft()
        if not self.is_dead:
            self._deliver(frame)


class Wire:
    """One connection between an agent's place and the gateway."""

    def __init__(
        self,
        place: NetworkPlace,
        chance: random.Random,
        to_gateway: Callable[[Frame], None],
        to_agent: Callable[[Frame], None],
    ) -> None:
        self.up = Direction(place, chance, to_gateway)
        self.down = Direction(place, chance, to_agent)

    def close_by_agent(self, *, silently: bool = False) -> None:
        self.down.is_dead = True
        if not silently:
            self.up.send(None)

    def close_by_gateway(self, *, reads_the_rest: bool = False) -> None:
        """Close the gateway's end; with `reads_the_rest` it still reads frames in transit."""
        self.up.is_dead = not reads_the_rest
        self.down.send(None)


class NetworkFaults:
    """The current probabilities that a client's request or reply is lost or duplicated."""

    def __init__(self) -> None:
        self.lost_requests = self.lost_replies = self.doubled = 0.0

    def clear(self) -> None:
        self.lost_requests = self.lost_replies = self.doubled = 0.0


class ClientLine:
    """One client's HTTP connection to the gateway."""

    def __init__(self, host: NetworkHost, network_faults: NetworkFaults, chance: random.Random) -> None:
        self._host, self._network_faults, self._chance = host, network_faults, chance

    async def ask(self, do: Callable[[], Awaitable[Answer]], timeout_s: float) -> Answer:
        """Return the gateway's answer. Raises its errors, ConnectionError or TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._travel(self._network_faults.lost_requests)
            if self._chance.random() < self._network_faults.doubled:
                self._host.work(do)
            answer = await self._host.work(do)
            await self._travel(self._network_faults.lost_replies)
            return answer

    async def _travel(self, lost: float) -> None:
        await asyncio.sleep(self._chance.uniform(*DELAY_S))
        if self._chance.random() < lost:
            await asyncio.get_running_loop().create_future()  # until the client gives up


class NetworkHost(Protocol):
    """A process that answers requests."""

    def work(self, do: Callable[[], Awaitable[Answer]]) -> asyncio.Future[Answer]:
        """Begin a request; the future fails with ConnectionError if the process is down or dies."""
