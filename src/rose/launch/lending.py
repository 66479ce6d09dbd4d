"""The owner's hand on the borrowed device: lend it, or hold it back for a while.

For a comparison the device is held back in every other pair of steps. It serves its users all the same, and takes new
weights as before, so that both kinds of steps differ in nothing but who plays. A restless owner takes it back every few
seconds, under running turns, and offers it again: what that costs is the allocation overhead.

A device whose users need all of it stops lending by itself (its circuit breaker) and says so; the gateway has its turns
go on elsewhere. One on which nothing ends any more and that does not say so would hold up a step for a minute and
longer. It is given a rest: its turns go on elsewhere, and it is asked again when the minute is over.

A device that is being started again is asked until it answers. It comes back lending, and counts its breaches from 0:
one that was held back is told so again, and what it had counted before is not forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Literal

import aiohttp

from rose.errors import Unavailable
from rose.launch.allocation import ASKED

SETTLE_S = 2.0  # the gateway hears at once that a device is lent again; this is for a device that is slow to say so
PATIENCE_S = 30.0
AGAIN_S = 0.2  # between two questions to a device that does not answer yet
LOOK_S = 2.0  # for what is read with every step, and can be read with the next
STARTING = 503  # of a front without an engine
STALL_S = 6.0  # many times what a turn takes
REST_S = 60.0  # as long as the device's own breaker rests at first


class Stall:
    """Tells when the borrowed device has turns and ends none of them."""

    def __init__(self) -> None:
        self._ended, self._since_s = -1, 0.0

    def observe(self, ended: int, running: int, now_s: float) -> bool:
        if ended != self._ended or not running:
            self._ended, self._since_s = ended, now_s
        return now_s - self._since_s > STALL_S


class BreachCount:
    """Breaches by kind, over restarts of the engine that counts them: if one count falls, all have begun anew."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._totals: dict[str, int] = {}

    def observe(self, told: dict[str, int]) -> dict[str, int]:
        is_anew = any(told.get(kind, 0) < count for kind, count in self._last.items())
        before = {} if is_anew else self._last
        for kind, count in told.items():
            self._totals[kind] = self._totals.get(kind, 0) + count - before.get(kind, 0)
        self._last = dict(told)
        return dict(self._totals)


class Lending:
    """One per lent device. Asking twice for the same changes nothing."""

    def __init__(self, url: str, owner_token: str, record: Callable[..., None] = lambda kind, **fields: None) -> None:
        self._url, self._record = url, record
        self._headers = {"Authorization": f"Bearer {owner_token}"}
        self._state: Literal["lent", "held_back"] = "lent"
        self._rests_until_s = 0.0
        self._telling = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None
        self._breaches = BreachCount()

    async def lend(self, settle_s: float = SETTLE_S) -> bool:
        """Whether it is lent now; a device at rest is not. Raises Unavailable, and then it counts as it did before."""
        async with self._telling:
            if time.monotonic() < self._rests_until_s:
                return False
            if self._state == "held_back":
                await self._told("/resume", is_lent=True)
                self._state = "lent"
                await asyncio.sleep(settle_s)
            return True

    async def come_and_go(self, lends_s: float, keeps_s: float) -> None:
        """A restless owner, for ever. A device that does not answer for the moment is asked the next time."""
        while True:
            await asyncio.sleep(lends_s)
            with contextlib.suppress(Unavailable):
                await self.hold_back()
            await asyncio.sleep(keeps_s)
            with contextlib.suppress(Unavailable):
                await self.lend(settle_s=0.0)

    async def rest(self) -> str:
        """Why the device does not lend, in its own words."""
        why = str((await self._ask("GET", "")).get("why", ""))
        await self.hold_back()
        self._rests_until_s = time.monotonic() + REST_S
        return why

    async def hold_back(self) -> None:
        """Raises Unavailable, and then it counts as lent."""
        async with self._telling:
            if self._state == "lent":
                await self._told("/drain", is_lent=False)
                self._state = "held_back"

    async def breaches(self) -> dict[str, int]:
        """By kind, of all engines that the device had since this was made. Raises Unavailable, without much waiting."""
        status = await self._ask("GET", "", LOOK_S)
        if status.get("state") == "lending":
            self.restarted()
        return self._breaches.observe(status.get("breaches", {}))

    def restarted(self) -> None:
        """It lends then by itself; one that is to be held back is told so again, as soon as it answers."""
        if self._state == "held_back" and (self._again is None or self._again.done()):
            self._again = asyncio.create_task(self._hold_back_again())

    async def _hold_back_again(self) -> None:
        while True:
            async with self._telling:
                if self._state == "lent":
                    return
                with contextlib.suppress(Unavailable):
                    await self._told("/drain", is_lent=False)
                    return
            await asyncio.sleep(AGAIN_S)

    async def _told(self, action: str, *, is_lent: bool) -> None:
        """Asks the owner, and writes down when that was and when it was done."""
        asked_s = time.monotonic()
        try:
            await self._ask("POST", action)
        finally:
            self._record(ASKED, at_s=asked_s, is_lent=is_lent, answered_s=time.monotonic())

    async def _ask(self, method: str, action: str, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """The device's status, after doing what was asked; one that is not there yet is asked again."""
        url, why = f"{self._url}/rose/lending{action}", f"nothing within {patience_s:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s), aiohttp.ClientSession(headers=self._headers) as session:
                while True:
                    try:
                        async with session.request(method, url) as reply:
                            if reply.status == 200:
                                found: dict[str, Any] = await reply.json()
                                return found
                            why = f"{reply.status}: {(await reply.read())[:200].decode(errors='replace')}"
                            if reply.status != STARTING:
                                break
                    except aiohttp.ClientError as error:
                        why = str(error) or type(error).__name__
                    await asyncio.sleep(AGAIN_S)
        what = f"the borrowed device does not answer its owner ({method} {url}): {why}"
        raise Unavailable(what, hint="see borrowed.log in the run's logs")
