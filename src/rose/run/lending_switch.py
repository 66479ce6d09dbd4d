"""Admin commands to the borrowed device: lend it, or hold it back for a while.

For a comparison the device is held back in every other pair of steps. It serves its users all the same, and takes new
weights as before, so that both kinds of steps differ only in whether it plays. With `serving.owner_lends_s` it is taken
back every few seconds, under running turns, and lent again: what that costs is the allocation overhead.

A device whose users need all of it stops lending by itself (its circuit breaker) and says so; the gateway then moves
its turns. A device on which no turn ends any more, and that does not say so, would hold up a step for a minute and
longer. The run holds it back: its turns move elsewhere, and it is asked again when the minute is over.

A device that restarts is asked until it answers. It comes back lending, and counts its breaches from 0. So one that was
held back is held back again, and its earlier count is kept here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Literal

import aiohttp

from rose.errors import Unavailable
from rose.run.run_records import AskedRecord, RunRecord

SETTLE_S = 2.0  # the gateway learns at once that a device is lent again; this is for a slow device
PATIENCE_S = 30.0
AGAIN_S = 0.2  # between two questions to a device that does not answer yet
LOOK_S = 2.0  # for what is read with every step, and can be read with the next
STARTING = 503  # of a front without an engine
STALL_S = 6.0  # many times what a turn takes
REST_S = 60.0  # as long as the device's own breaker rests at first


class Stall:
    """Detector of a borrowed device that has turns and ends none of them."""

    def __init__(self) -> None:
        self._ended, self._since_s = -1, 0.0

    def observe(self, ended: int, running: int, now_s: float) -> bool:
        if ended != self._ended or not running:
            self._ended, self._since_s = ended, now_s
        return now_s - self._since_s > STALL_S


class BreachCount:
    """Counts by kind, over restarts of the engine that counts them: if one count falls, all begin at 0 again."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._totals: dict[str, int] = {}

    def observe(self, counts: dict[str, int]) -> dict[str, int]:
        has_restarted = any(counts.get(kind, 0) < count for kind, count in self._last.items())
        before = {} if has_restarted else self._last
        for kind, count in counts.items():
            self._totals[kind] = self._totals.get(kind, 0) + count - before.get(kind, 0)
        self._last = dict(counts)
        return dict(self._totals)


def lent_counts(status: dict[str, Any]) -> dict[str, int]:
    """Return what a device has lent, from its status, in whole numbers."""
    return {
        "steps": int(status["lent_steps"]),
        "tokens": int(status.get("lent_tokens", 0)),
        "milliseconds": round(1000 * status.get("lent_s", 0.0)),
        "evicted_tokens": int(status.get("evicted_tokens", 0)),
    }


class LendingSwitch:
    """The switch of one lent device. Asking twice for the same changes nothing."""

    def __init__(self, url: str, admin_token: str, record: Callable[[RunRecord], None] = lambda record: None) -> None:
        self._url, self._record = url, record
        self._headers = {"Authorization": f"Bearer {admin_token}"}
        self._state: Literal["lent", "held_back"] = "lent"
        self._rests_until_s = 0.0
        self._lock = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None
        self._breaches, self._lent = BreachCount(), BreachCount()
        self.lent: dict[str, int] = {}  # as of the last look; empty if the device does not count it

    def move(self, url: str) -> None:
        """Go on with the device at another address, where it was started again."""
        self._url = url

    async def lend(self, settle_s: float = SETTLE_S) -> bool:
        """Lend the device, and return whether it is lent; one at rest is not. Raises Unavailable."""
        async with self._lock:
            if time.monotonic() < self._rests_until_s:
                return False
            if self._state == "held_back":
                await self._command("/resume", is_lent=True)
                self._state = "lent"
                await asyncio.sleep(settle_s)
            return True

    async def switch_forever(self, lends_s: float, keeps_s: float) -> None:
        """Lend and hold back in turns. A device that does not answer for the moment is asked the next time."""
        while True:
            await asyncio.sleep(lends_s)
            with contextlib.suppress(Unavailable):
                await self.hold_back()
            await asyncio.sleep(keeps_s)
            with contextlib.suppress(Unavailable):
                await self.lend(settle_s=0.0)

    async def rest(self) -> str:
        """Hold the device back for `REST_S`, and return the reason that it gives for not lending."""
        why = str((await self._ask("GET", "")).get("why", ""))
        await self.hold_back()
        self._rests_until_s = time.monotonic() + REST_S
        return why

    async def hold_back(self) -> None:
        """Hold the device back. Raises Unavailable, and then it counts as lent."""
        async with self._lock:
            if self._state == "lent":
                await self._command("/drain", is_lent=False)
                self._state = "held_back"

    async def breaches(self) -> dict[str, int]:
        """Return breaches by kind, over all engines that the device had. Raises Unavailable after a short wait."""
        status = await self._ask("GET", "", LOOK_S)
        if status.get("state") == "lending":
            self.restarted()
        if "lent_steps" in status:
            self.lent = self._lent.observe(lent_counts(status))
        return self._breaches.observe(status.get("breaches", {}))

    def restarted(self) -> None:
        """Note a restart, after which the device lends; hold it back again, if it was, as soon as it answers."""
        if self._state == "held_back" and (self._again is None or self._again.done()):
            self._again = asyncio.create_task(self._hold_back_again())

    async def _hold_back_again(self) -> None:
        while True:
            async with self._lock:
                if self._state == "lent":
                    return
                with contextlib.suppress(Unavailable):
                    await self._command("/drain", is_lent=False)
                    return
            await asyncio.sleep(AGAIN_S)

    async def _command(self, action: str, *, is_lent: bool) -> None:
        """Send a command, and record when it was sent and when it was done."""
        asked_s = time.monotonic()
        try:
            await self._ask("POST", action)
        finally:
            self._record(AskedRecord(at_s=asked_s, is_lent=is_lent, answered_s=time.monotonic()))

    async def _ask(self, method: str, action: str, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Return the device's status after a command; one that has not started yet is asked again."""
        url, why = f"{self._url}/rose/lending{action}", f"nothing within {patience_s:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s), aiohttp.ClientSession(headers=self._headers) as session:
                while True:
                    try:
                        async with session.request(method, url) as reply:
                            if reply.status == 200:
                                status: dict[str, Any] = await reply.json()
                                return status
                            why = f"{reply.status}: {(await reply.read())[:200].decode(errors='replace')}"
                            if reply.status != STARTING:
                                break
                    except aiohttp.ClientError as error:
                        why = str(error) or type(error).__name__
                    await asyncio.sleep(AGAIN_S)
        what = f"the borrowed device does not answer admin commands ({method} {url}): {why}"
        raise Unavailable(what, hint="see borrowed.log in the run's logs")
