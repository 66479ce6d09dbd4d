"""The network of a simulated world.

A `Wire` is one connection: frames arrive whole and in order, each after a delay, for as long as the connection lives.
Nothing is lost in the middle, as TCP promises; a partition only holds frames back, and when it heals whatever both ends
still believe in arrives. A process that dies, or is told to, ends its connections, and the other end hears of it,
after all that was said before; a machine that loses its power says nothing, and the other end must notice by itself.

`Line` is the way of one client's requests to the gateway: there a request or its reply may get lost, and a request may
come twice.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

DELAY_S = (0.0005, 0.004)

Answer = TypeVar("Answer")
Frame = bytes | None
"""None is the end of the connection."""


class Place:
    """Where a process stands in the network; a place that is cut off reaches nobody."""

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
    """One way of a wire."""

    def __init__(self, place: Place, chance: random.Random, deliver: Callable[[Frame], None]) -> None:
        self._place, self._chance, self._deliver = place, chance, deliver
        self._last_s = 0.0
        self._frames: deque[Frame] = deque()  # on their way; timers of one moment go off in any order
        self.is_dead = False  # the receiver does not listen any more

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
        place: Place,
        chance: random.Random,
        to_gateway: Callable[[Frame], None],
        to_agent: Callable[[Frame], None],
    ) -> None:
        self.up = Direction(place, chance, to_gateway)
        self.down = Direction(place, chance, to_agent)

    def ended_by_agent(self, *, silently: bool = False) -> None:
        self.down.is_dead = True
        if not silently:
            self.up.send(None)

    def ended_by_gateway(self, *, hears_the_rest: bool = False) -> None:
        """With `hears_the_rest` the gateway still reads what is on its way."""
        self.up.is_dead = not hears_the_rest
        self.down.send(None)


class Weather:
    """How clients' requests fare just now."""

    def __init__(self) -> None:
        self.lost_requests = self.lost_replies = self.doubled = 0.0

    def clear(self) -> None:
        self.lost_requests = self.lost_replies = self.doubled = 0.0


class Line:
    """One client's way to the gateway, over HTTP."""

    def __init__(self, host: Host, weather: Weather, chance: random.Random) -> None:
        self._host, self._weather, self._chance = host, weather, chance

    async def ask(self, do: Callable[[], Awaitable[Answer]], timeout_s: float) -> Answer:
        """What the gateway answers. Raises what it raises; ConnectionError; TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._travel(self._weather.lost_requests)
            if self._chance.random() < self._weather.doubled:
                self._host.work(do)
            answer = await self._host.work(do)
            await self._travel(self._weather.lost_replies)
            return answer

    async def _travel(self, lost: float) -> None:
        await asyncio.sleep(self._chance.uniform(*DELAY_S))
        if self._chance.random() < lost:
            await asyncio.get_running_loop().create_future()  # until the client gives up


class Host(Protocol):
    """Whoever answers requests."""

    def work(self, do: Callable[[], Awaitable[Answer]]) -> asyncio.Future[Answer]:
        """Begin with it; the result is a ConnectionError if nobody listens, or it dies in the middle."""
