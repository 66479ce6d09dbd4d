"""Updates a device's weights: fetched, checked and staged beside the running engine, then swapped in.

Everything slow happens in a thread of low priority: fetching, decoding, hashing, and preparing for the version after.
Generation stalls only for the swap between two steps. Any failure leaves the old version running, and is reported. The
thread and its weights live as long as the agent, over all connections to a gateway: a restarted engine gets its weights
again without a byte being fetched. The run's read key belongs to this device (`weights.keys`): whatever address a
gateway names, unsigned weights are refused.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rose.api.faults import fault_of
from rose.api.worker_messages import NewVersion, VersionReady
from rose.device.os_process import lower_priority
from rose.engines.base import EngineClient
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.weights import weight_buffers
from rose.weights.chain import RetryPolicy
from rose.weights.manifest import folder_hash
from rose.weights.receive import Received, Receiver
from rose.weights.weight_metrics import ReceiveMetrics

logger = logging.getLogger("rose.agent")

RETRY_LIMIT_S = 30.0  # with a relay that does not answer; then the gateway gets the error, and asks again later

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """Complete weights in a folder."""

    folder: str
    hash: str
    received: Received | None = None
    size_bytes: int = 0  # read from the relay
    seconds: dict[str, float] = field(default_factory=dict)


class WeightFetcher:
    """The part of the updater that fetches weights. All of it runs in the updater's thread."""

    def __init__(self, metrics: ReceiveMetrics) -> None:
        self._metrics = metrics
        self._stopping = threading.Event()
        self._folder: Path | None = None
        self._receiver: Receiver | None = None
        self._where = ("", "")  # its relay and run
        self._receiver_folder: Path
        self._left_folders: list[Path] = []  # of earlier receivers
        self._count = 0

    def fetch(self, wanted: NewVersion) -> FetchedWeights:
        """Return the wanted weights in a folder. If it raises RoseError, the old ones stay."""
        return self._from_relay(wanted) if wanted.relay else self._in_folder(wanted)

    def sweep(self) -> None:
        """Remove the copies of weights that killed processes left: nothing else frees their memory."""
        for folder in weight_buffers.sweep():
            logger.info("removed the weights that a dead process left in %s", folder)

    def on_installed(self, arrived: FetchedWeights) -> None:
        """Prepare for the next version, now that the engine runs this one."""
        if arrived.received is not None and self._receiver is not None:
            self._receiver.installed(arrived.received)
            for folder in self._left_folders:
                weight_buffers.remove_folder(folder)
            self._left_folders.clear()
            self._receiver.prepare()

    def stop(self) -> None:
        """Make waits for a relay give up; may be called from any thread."""
        self._stopping.set()

    def close(self) -> None:
        self._leave_relay()
        if self._folder is not None:
            weight_buffers.remove_folder(self._folder)

    def _in_folder(self, wanted: NewVersion) -> FetchedWeights:
        """Hash the folder, so that workers can be compared. Without a published hash the engine alone judges it."""
        try:
            weights_hash = folder_hash(wanted.folder)
        except RoseError:
            if wanted.hash:
                raise
            weights_hash = ""
        if wanted.hash and weights_hash != wanted.hash:
            what = f"the weights in {wanted.folder} have the hash {weights_hash}, and {wanted.hash} was published"
            raise RequestRefused(what, hint="a folder that is published must never change")
        return FetchedWeights(wanted.folder, weights_hash)

    def _from_relay(self, wanted: NewVersion) -> FetchedWeights:
        receiver = self._receiver_for(wanted)
        held = receiver.latest
        received = receiver.fetch(wanted.hash) or held
        if received is None:
            raise Unavailable(f"run `{wanted.run}` has published nothing in {wanted.relay}")
        if received is held:
            return FetchedWeights(str(received.folder), received.hash, received)
        seconds = dict(received.seconds)
        return FetchedWeights(str(received.folder), received.hash, received, received.size_bytes, seconds)

    def _receiver_for(self, wanted: NewVersion) -> Receiver:
        """Return the receiver of this run in this relay; a new one gets its own folder."""
        where = (wanted.relay, wanted.run)
        if self._receiver is not None and self._where == where:
            return self._receiver
        from rose.weights.codec.codec_kernels import warm_up  # loads numba: only a worker that decodes needs it

        warm_up()
        self._leave_relay()
        if self._folder is None:
            self._folder = weight_buffers.private_folder()
        self._count += 1
        folder = self._folder / f"{self._count}"
        policy = RetryPolicy(limit_s=RETRY_LIMIT_S, sleep_s=self._sleep)
        self._receiver = Receiver(wanted.relay, wanted.run, folder=folder, retry=policy, metrics=self._metrics)
        self._where, self._receiver_folder = where, folder
        return self._receiver

    def _leave_relay(self) -> None:
        """Close the receiver. Its folder stays until the next install: a reloaded engine reads its weights again."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
            self._left_folders.append(self._receiver_folder)

    def _sleep(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise RequestRefused("the device is shutting down")


class WeightUpdater:
    """The updater of one agent. `on_ready` reports to the gateway that the agent is connected to."""

    def __init__(self, engine: EngineClient, metrics: ReceiveMetrics) -> None:
        self.on_ready: Callable[[VersionReady], None] = lambda ready: None
        self._engine, self._metrics = engine, metrics
        self._fetcher = WeightFetcher(metrics)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights", initializer=lower_priority)
        self._wanted: NewVersion | None = None
        self._has_request = asyncio.Event()
        self._committed = ("", "")  # version and hash

    @property
    def hash(self) -> str:
        """The hash of the running weights, as far as it is known."""
        version, weights_hash = self._committed
        return weights_hash if version == self._engine.facts.version else ""

    def request(self, version: NewVersion) -> None:
        """Load this version next; of several only the last counts."""
        self._wanted = version
        self._has_request.set()

    async def run(self) -> None:
        """Load one version at a time, until cancelled."""
        self._thread.submit(self._fetcher.sweep)
        try:
            while True:
                await self._has_request.wait()
                self._has_request.clear()
                if self._wanted is not None:
                    await self._load(self._wanted)
        finally:
            self._fetcher.stop()
            self._thread.submit(self._fetcher.close)
            self._thread.shutdown(wait=False)

    async def _load(self, wanted: NewVersion) -> None:
        if wanted.version == self._engine.facts.version and wanted.hash in ("", self.hash):
            self.on_ready(VersionReady(wanted.version, hash=self.hash))
            return
        try:
            arrived = await self._in_thread(lambda: self._fetcher.fetch(wanted))
            commit_s = await self._swap(wanted, arrived) if self._wanted == wanted else None
        except Exception as error:
            self._metrics.failed(error)
            logger.warning("version `%s` cannot be loaded, the old one runs on: %s", wanted.version, error)
            if self._wanted == wanted:
                self.on_ready(VersionReady(wanted.version, fault_of(error)))
            return
        if commit_s is None:
            return  # a newer version was requested meanwhile
        self._committed = (wanted.version, arrived.hash)
        self._metrics.swapped(arrived.seconds["stage"], commit_s)
        self.on_ready(
            VersionReady(wanted.version, None, arrived.hash, arrived.size_bytes, arrived.seconds | {"commit": commit_s})
        )
        try:
            await self._in_thread(lambda: self._fetcher.on_installed(arrived))
        except Exception as error:  # it is done again before the next version is fetched
            logger.warning("preparing for the version after `%s` failed: %s", wanted.version, error)

    async def _swap(self, wanted: NewVersion, arrived: FetchedWeights) -> float | None:
        """Return how long the commit took; None if a newer version was requested meanwhile."""
        begin_s = time.perf_counter()
        await self._engine.stage(wanted.version, arrived.folder)
        arrived.seconds["stage"] = time.perf_counter() - begin_s
        if self._wanted != wanted:
            return None
        if self._committed[0] == wanted.version:  # by an engine that is gone; nothing is known of this one yet
            self._committed = ("", "")
        begin_s = time.perf_counter()
        await self._engine.commit(wanted.version)
        return time.perf_counter() - begin_s

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
