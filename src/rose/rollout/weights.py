"""New weights for a device: brought, checked and laid ready beside the running engine, and swapped in when whole.

The gateway says which version it wants and where that lies: in a relay, under a run's name and a hash, or in a folder.
What is slow happens in a thread of low priority: fetching, decoding, hashing, and getting ready for the version after.
The engine then reads the finished weights from a folder in shared memory, beside its own steps, and what it stands
still for is the swap between two of them. Whatever fails leaves the old version running, and is told.

The thread and what it holds live as long as the agent, over every connection to a gateway. So an engine that was
restarted is given its weights again without a byte being fetched, and only what changed is fetched for a new version.

The run's read key is this device's own to know (`weights.connecting`): whatever address a gateway names, nothing is
taken that the trainer has not signed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rose.coserve import messages as engine_messages
from rose.coserve.device import stand_back
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.rollout.messages import NewVersion, VersionReady
from rose.rollout.runner import AgentEngine

if TYPE_CHECKING:
    from rose.weights.metrics import ReceiveMetrics
    from rose.weights.receive import Received, Receiver

logger = logging.getLogger("rose.agent")

PATIENCE_S = 30.0  # with a relay that does not answer; then the gateway is told, and says when to try again

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Arrived:
    """Weights that are whole, in a folder."""

    folder: str
    hash: str
    received: Received | None = None
    size_bytes: int = 0  # read from the relay for it
    seconds: dict[str, float] = field(default_factory=dict)


class Arrivals:
    """Where weights arrive. All of it happens in one thread, which is not the loop's."""

    def __init__(self, metrics: ReceiveMetrics) -> None:
        self._metrics = metrics
        self._stopping = threading.Event()
        self._folder: Path | None = None
        self._receiver: Receiver | None = None
        self._where = ("", "")  # its relay and run
        self._own: Path  # its folder
        self._left: list[Path] = []  # folders of those before
        self._count = 0

    def bring(self, wanted: NewVersion) -> Arrived:
        """Raises RoseError; whatever runs is as it was."""
        return self._from_relay(wanted) if wanted.relay else self._in_folder(wanted)

    def sweep(self) -> None:
        """Remove the copies of weights that killed processes left; they take memory that nothing else gives back."""
        from rose.weights.slots import sweep

        for folder in sweep():
            logger.info("removed the weights that a dead process left in %s", folder)

    def installed(self, arrived: Arrived) -> None:
        """The engine runs these; get ready for the next ones."""
        if arrived.received is not None and self._receiver is not None:
            self._receiver.installed(arrived.received)
            self._remove(self._left)
            self._left.clear()
            self._receiver.prepare()

    def stop(self) -> None:
        """From any thread: whatever waits for a relay gives up."""
        self._stopping.set()

    def close(self) -> None:
        self._leave_relay()
        if self._folder is not None:
            self._remove([self._folder])

    def _in_folder(self, wanted: NewVersion) -> Arrived:
        """Hashed, so that all can be compared; if nobody said what it must be, the engine alone judges the folder."""
        from rose.weights.hashing import folder_hash

        try:
            found = folder_hash(wanted.folder)
        except RoseError:
            if wanted.hash:
                raise
            found = ""
        if wanted.hash and found != wanted.hash:
            what = f"the weights in {wanted.folder} have the hash {found}, and {wanted.hash} was published"
            raise RequestRefused(what, hint="a folder that is published must never change")
        return Arrived(wanted.folder, found)

    def _from_relay(self, wanted: NewVersion) -> Arrived:
        receiver = self._reached(wanted)
        held = receiver.latest
        received = receiver.fetch(wanted.hash) or held
        if received is None:
            raise Unavailable(f"run `{wanted.run}` has published nothing in {wanted.relay}")
        arrived = Arrived(str(received.folder), received.hash, received)
        return (
            arrived
            if received is held
            else replace(arrived, size_bytes=received.size_bytes, seconds=dict(received.seconds))
        )

    def _reached(self, wanted: NewVersion) -> Receiver:
        """The receiver for this run in this relay; a new one gets a folder of its own."""
        where = (wanted.relay, wanted.run)
        if self._receiver is not None and self._where == where:
            return self._receiver
        from rose.weights.chain import Patience
        from rose.weights.codec.kernels import warm_up
        from rose.weights.receive import Receiver
        from rose.weights.slots import private_folder

        warm_up()
        self._leave_relay()
        if self._folder is None:
            self._folder = private_folder()
        self._count += 1
        folder = self._folder / f"{self._count}"
        patience = Patience(limit_s=PATIENCE_S, sleep_s=self._sleep)
        self._receiver = Receiver(wanted.relay, wanted.run, folder=folder, patience=patience, metrics=self._metrics)
        self._where, self._own = where, folder
        return self._receiver

    def _leave_relay(self) -> None:
        """Its folder stays until others are installed: an engine that is called back reads its weights again."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
            self._left.append(self._own)

    def _remove(self, folders: Iterable[Path]) -> None:
        from rose.weights.slots import remove_folder

        for folder in folders:
            remove_folder(folder)

    def _sleep(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise RequestRefused("the device is shutting down")


class Intake:
    """One per agent. `tell` goes to the gateway of the moment."""

    def __init__(self, engine: AgentEngine, metrics: ReceiveMetrics) -> None:
        self.tell: Callable[[VersionReady], None] = lambda ready: None
        self._engine, self._metrics = engine, metrics
        self._arrivals = Arrivals(metrics)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights", initializer=stand_back)
        self._wanted: NewVersion | None = None
        self._news = asyncio.Event()
        self._committed = ("", "")  # version and hash

    @property
    def hash(self) -> str:
        """Of the weights that run, as far as it is known."""
        version, found = self._committed
        return found if version == self._engine.facts.version else ""

    def want(self, version: NewVersion) -> None:
        """Of several only the last counts."""
        self._wanted = version
        self._news.set()

    async def run(self) -> None:
        """One version at a time, until cancelled."""
        self._thread.submit(self._arrivals.sweep)
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if self._wanted is not None:
                    await self._take(self._wanted)
        finally:
            self._arrivals.stop()
            self._thread.submit(self._arrivals.close)
            self._thread.shutdown(wait=False)

    async def _take(self, wanted: NewVersion) -> None:
        if self._runs(wanted):
            self.tell(VersionReady(wanted.version, hash=self.hash))
            return
        try:
            arrived = await self._aside(lambda: self._arrivals.bring(wanted))
            commit_s = await self._swap(wanted, arrived) if self._wanted == wanted else None
        except Exception as error:
            self._metrics.failed(error)
            logger.warning("version `%s` cannot be taken, the old one runs on: %s", wanted.version, error)
            if self._wanted == wanted:
                self.tell(VersionReady(wanted.version, engine_messages.fault_of(error)))
            return
        if commit_s is None:
            return  # a newer one came meanwhile
        self._committed = (wanted.version, arrived.hash)
        self._metrics.swapped(arrived.seconds["stage"], commit_s)
        self.tell(
            VersionReady(wanted.version, None, arrived.hash, arrived.size_bytes, arrived.seconds | {"commit": commit_s})
        )
        try:
            await self._aside(lambda: self._arrivals.installed(arrived))
        except Exception as error:  # it is done again before the next version is brought
            logger.warning("getting ready for the version after `%s` failed: %s", wanted.version, error)

    def _runs(self, wanted: NewVersion) -> bool:
        is_same = wanted.version == self._engine.facts.version
        return is_same and (not wanted.hash or wanted.hash == self.hash)

    async def _swap(self, wanted: NewVersion, arrived: Arrived) -> float | None:
        """How long the commit took; None if there is a newer one to take instead."""
        begin_s = time.perf_counter()
        await self._engine.ask(engine_messages.Stage(wanted.version, arrived.folder))
        arrived.seconds["stage"] = time.perf_counter() - begin_s
        if self._wanted != wanted:
            return None
        if self._committed[0] == wanted.version:  # by an engine that is gone; of this one nothing is known yet
            self._committed = ("", "")
        begin_s = time.perf_counter()
        await self._engine.ask(engine_messages.Commit(wanted.version))
        return time.perf_counter() - begin_s

    async def _aside(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
