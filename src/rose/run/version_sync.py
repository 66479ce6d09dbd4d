"""New weights on their way to the workers: tells the gateway of a version, and watches until every worker runs it.

A synchronous run waits for the workers. An asynchronous one does not: turns go on, and a task per version watches the
workers, so that the next groups begin only when every worker that writes tokens writes them with these weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rose.client import GatewayClient
from rose.core.staleness import version_number
from rose.errors import RoseError
from rose.run.learning import Learner
from rose.run.run_folder import RunFolder
from rose.run.run_progress import Screen
from rose.run.run_records import BehindRecord, SyncRecord, WeightsRecord

if TYPE_CHECKING:
    from rose.weights.publish import PublishedVersion

PUBLISH_S_MAX = 60.0  # a worker that has not taken a version by then is left behind; it gets no turns until it has
LOOK_S = 0.1  # between two looks whether workers have taken new weights


class VersionSync:
    """Versions of one run that workers have still to take."""

    def __init__(self, client: GatewayClient, learner: Learner, folder: RunFolder, screen: Screen) -> None:
        self._client, self._learner, self._folder, self._screen = client, learner, folder, screen
        self._watchers: set[asyncio.Task[None]] = set()

    async def publish(self, published: PublishedVersion, *, is_awaited: bool = True) -> dict[str, Any]:
        """Tell the gateway of a version, and return what a step's record says of it."""
        version, relay, wait_s = published.label, self._learner.publishing, PUBLISH_S_MAX if is_awaited else 0.0
        response = await self._client.publish(
            version, relay=relay.address, run=relay.run, hash=published.hash, wait_s=wait_s
        )
        for name, why in response.behind.items() if is_awaited else ():
            self._report_behind(name, version, why)
        lag = 0
        if response.behind:
            numbers = (version_number(member["version"]) or 0 for member in await self._members())
            lag = max((published.version.version - number for number in numbers), default=0)
        return {
            "weights_hash": published.hash,
            "weights_kind": published.kind,
            "weights_bytes": published.size_bytes,
            "weights_ratio": round(published.ratio, 3),
            "weights_s": {phase: round(seconds, 5) for phase, seconds in published.seconds.items()},
            "weights_lag": lag,
            "weight_sync_s": _longest_s(response.sync_s.values()),
            "pause_s": _longest_s(response.pause_s.values()),
        }

    def watch(self, step: int, is_changed: bool, on_reached: Callable[[], None]) -> None:
        """Watch in the background until every worker runs the published version, and then call `on_reached`."""
        watcher = asyncio.create_task(self._until_taken(self._learner.published, step, is_changed, on_reached))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def compare(self, *, is_published: bool) -> None:
        """RunRecord at the end whether every worker runs the trainer's weights, by hash."""
        mine = self._learner.published
        if not is_published:
            await self.publish(mine)
            await asyncio.gather(*self._watchers)
        members = await self._members()
        hashes = {member["name"]: member.get("hash", "") for member in members}
        self._folder.record(WeightsRecord(version=mine.label, hash=mine.hash, workers=hashes))
        for member in members:
            if member["version"] != mine.label:
                self._report_behind(member["name"], mine.label, f"it runs version {member['version']}")
            elif hashes[member["name"]] not in ("", mine.hash):
                why = f"its weights have the hash {hashes[member['name']]}"
                self._report_behind(member["name"], mine.label, why)

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()

    async def _until_taken(
        self, published: PublishedVersion, step: int, is_changed: bool, on_reached: Callable[[], None]
    ) -> None:
        """Wait for every worker that writes tokens. Unchanged weights caused no pause: workers tell that of others."""
        began_s = time.monotonic()
        with contextlib.suppress(RoseError):  # playing through a gateway that is gone raises it too
            while (behind := _behind(await self._working(), published)) and time.monotonic() - began_s < PUBLISH_S_MAX:
                await asyncio.sleep(LOOK_S)
            for name in behind:
                self._report_behind(name, published.label, f"it has not taken it within {PUBLISH_S_MAX:g} s")
            took_s = round(time.monotonic() - began_s, 4)
            commits_s = [member["seconds"].get("commit") for member in await self._working()] if is_changed else []
            pause_s = _longest_s(seconds for seconds in commits_s if seconds is not None)
            self._folder.record(
                SyncRecord(step=step, version=published.label, took_s=took_s, behind=tuple(behind), pause_s=pause_s)
            )
        on_reached()

    async def _members(self) -> list[dict[str, Any]]:
        members: list[dict[str, Any]] = (await self._client.pool())["members"]
        return members

    async def _working(self) -> list[dict[str, Any]]:
        """Return the workers that write tokens."""
        return [member for member in await self._members() if member["state"] == "open" or member["turns"]]

    def _report_behind(self, worker: str, version: str, why: str) -> None:
        self._folder.record(BehindRecord(at_s=time.monotonic(), worker=worker, version=version, why=why))
        self._screen.say(f"  worker {worker} does not run version {version}: {why}")


def _longest_s(seconds: Iterable[float]) -> float | None:
    """Return the longest time, or None if no worker tells, as after a restart of the gateway."""
    longest_s = max(seconds, default=None)
    return None if longest_s is None else round(longest_s, 5)


def _behind(members: Sequence[dict[str, Any]], published: PublishedVersion) -> list[str]:
    numbers = {member["name"]: version_number(member["version"]) for member in members}
    return [name for name, number in numbers.items() if number is None or number < published.version.version]
