"""The worker's side: bring the newest version from the relay, whole and verified, then offer it to the engine.

    receiver = Receiver("http://relay:7070", run="my-run")
    received = receiver.fetch()                # None if there is nothing newer
    engine.swap(received.tensors)              # the pause: between two steps, nothing is computed or copied
    receiver.installed(received)

All slow work happens in `fetch`, beside a running engine: list, fetch, check, decode, and hash every number of the
result, in the buffer that does not run. If it fails, the running version is untouched, and the next `fetch` continues
from what is right. After `installed` the old buffer is free, and `prepare` makes it equal to the new one (a copy costs
what decoding the same delta again would), so that the next fetch has only the next delta to apply.

A version can be named by its hash, `fetch(hash)`. The installed one is handed out again without asking the relay: an
engine that was restarted needs it once more. An engine that copies weights when it stages, as the embedded one does,
needs one buffer only (`buffers=1`), and nothing has to be installed. Two buffers are for engines that run on the
arrays, or that may read the folder again later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rose.core.versions import VersionId
from rose.errors import RequestRefused
from rose.weights.chain import RetryPolicy
from rose.weights.coding import Codec, SparseCodec
from rose.weights.keys import for_reading, run_secret
from rose.weights.layouts import whole
from rose.weights.manifest import WeightsRefused
from rose.weights.reading import ChainReader
from rose.weights.relay.opening import connect_relay
from rose.weights.relay.relay_base import Relay
from rose.weights.shards import Array, Placements, Tensor
from rose.weights.weight_buffers import Prefault, WeightBuffer
from rose.weights.weight_metrics import ReceiveMetrics

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Received:
    """A whole, verified version. The arrays stay unchanged until another version is installed after it."""

    version: VersionId
    hash: str
    tensors: Mapping[str, Array]  # by the worker's names; bf16 as uint16
    folder: Path | None  # where the same weights lie as model.safetensors, if they were received into a folder
    size_bytes: int  # read from the relay for it
    dense_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)  # by phase; fetching overlaps with decoding

    @property
    def ratio(self) -> float:
        return self.dense_bytes / max(1, self.size_bytes)


class Receiver:
    """Receives the weights of one worker rank from a relay. For one thread at a time."""

    def __init__(
        self,
        relay: Relay | str,
        run: str,
        *,
        secret: bytes | None = None,  # the run's read key, or its secret, of which only the read key is kept
        tensors: Sequence[Tensor] | None = None,  # what the worker's model has; None takes what is published
        placements: Placements | None = None,  # the worker's share of them; None is all
        initial: Mapping[str, Array] | None = None,  # weights the worker has already: what equals them is not fetched
        folder: Path | None = None,  # receive into files here, for an engine in another process
        buffers: int = 2,
        codec: Codec | None = None,
        threads: int = 1,
        retry: RetryPolicy | None = None,
        metrics: ReceiveMetrics | None = None,
    ) -> None:
        assert buffers in (1, 2) and (placements is None or tensors is not None)
        key = for_reading(run_secret(secret))
        self._relay = connect_relay(relay, key)
        self._owns_relay = isinstance(relay, str)
        codec = codec or SparseCodec(threads=threads)
        self.reader = ChainReader(self._relay, run=run, secret=key, tensors=tensors, codec=codec, retry=retry)
        self._placements, self._initial = placements, initial
        self._folder, self._buffer_count = folder, buffers
        self._buffers: list[WeightBuffer] = []
        self._running: WeightBuffer | None = None
        self._pending: tuple[WeightBuffer, Received] | None = None
        self._installed: Received | None = None
        self._reported: set[str] = set()  # refused keys that were logged
        self._metrics = metrics
        self.newest: VersionId | None = None  # in the relay, as of the last look

    def look(self) -> VersionId | None:
        """Return the newest version in the relay. Raises if every version there is refused."""
        self.newest = self.reader.refresh()
        self._report_refused()
        if self.newest is None and self.reader.refused:
            key, why = next(iter(self.reader.refused.items()))
            raise WeightsRefused(f"nothing in the relay can be used; `{key}`: {why}")
        return self.newest

    def fetch(self, wanted_hash: str = "") -> Received | None:
        """Fetch the newest version, ready to swap in; return None if the installed one is as new.

        With a hash, fetch the version that has it and never return None. If it raises, the installed version is
        unchanged.
        """
        if wanted_hash and self._installed is not None and self._installed.hash == wanted_hash:
            return self._installed
        try:
            return self._fetch(wanted_hash)
        except Exception as error:
            if self._metrics is not None:
                self._metrics.failed(error)
            raise
        finally:
            self._report_refused()

    def installed(self, received: Received, pause_s: float | None = None) -> None:
        """Report that the engine runs this version, and that the memory of the one before is free."""
        if received is self._installed:
            return
        if self._pending is None or self._pending[1] is not received:
            raise RequestRefused(f"version {received.version} is not the one that was fetched last")
        self._running, self._pending = self._pending[0], None
        self._installed = received if self._buffer_count == 2 else None
        if self._metrics is not None:
            self._metrics.looked(self.lag_versions, 0)
            if pause_s is not None:
                self._metrics.paused(pause_s)

    def prepare(self) -> None:
        """Copy the installed weights to the free buffer and hash them, so that the next version is one delta away."""
        running = self._running
        if running is None or running.version is None:
            return
        free = self._free_buffer()
        if free is running or free.version == running.version:
            return
        free.version = None
        for name, array in free.arrays.items():
            np.copyto(array, running.arrays[name])
        free.staging.forget_all()
        free.version = running.version
        if running.version in self.reader.versions():
            for region in free.staging.cut(self.reader.manifest_of(running.version).regions()):
                free.staging.hash_of(region)

    @property
    def version(self) -> VersionId | None:
        """Return the installed version; with one buffer, the fetched one."""
        return None if self._running is None else self._running.version

    @property
    def latest(self) -> Received | None:
        """Return what was installed last."""
        return self._installed

    @property
    def lag_versions(self) -> int:
        """Return how many versions the relay has beyond the installed one."""
        held = self.version
        return sum(1 for version in self.reader.versions() if held is None or version > held)

    def close(self) -> None:
        if self._owns_relay:
            self._relay.close()

    def _fetch(self, wanted_hash: str) -> Received | None:
        begin_s = time.perf_counter()
        self.reader.reset_counters()
        target = self.look()
        if wanted_hash:
            target = self._version_with(wanted_hash)
        if self._pending is not None and target is not None and self._pending[1].version == target:
            return self._pending[1]
        if target is None or (not wanted_hash and self.version is not None and target <= self.version):
            return None
        seconds = {"list": time.perf_counter() - begin_s}
        if not self._buffers:
            self._make_buffers(target)
        begin_s = time.perf_counter()
        self.prepare()
        seconds["prepare"] = time.perf_counter() - begin_s
        return self._bring(self._free_buffer(), target, seconds)

    def _version_with(self, wanted_hash: str) -> VersionId:
        """Return the latest version with these numbers: a trainer that went back publishes the same ones again."""
        for version in reversed(self.reader.versions()):
            if self.reader.manifest_of(version).version_hash == wanted_hash:
                return version
        raise WeightsRefused(
            f"no version with hash {wanted_hash} is in the relay; the newest there is {self.newest}",
            hint="do the trainer and this worker use the same relay, and has it kept the version?",
        )

    def _bring(self, buffer: WeightBuffer, target: VersionId, seconds: dict[str, float]) -> Received:
        self._pending, buffer.version = None, None
        begin_s = time.perf_counter()
        with Prefault(buffer.arrays.values() if buffer.staging.is_blank else ()):
            manifest = self.reader.bring(buffer.staging, target)
        seconds["bring"] = time.perf_counter() - begin_s
        seconds["fetch"], seconds["decode"] = self.reader.read_s, self.reader.decode_s
        seconds["total"] = seconds["list"] + seconds["prepare"] + seconds["bring"]
        buffer.version = target
        size, dense = self.reader.read_bytes, sum(array.nbytes for array in buffer.arrays.values())
        received = Received(target, manifest.version_hash, buffer.views(), buffer.folder, size, dense, seconds)
        self._pending = (buffer, received)
        if self._buffer_count == 1:
            self._running = buffer
        if self._metrics is not None:
            self._metrics.received(received)
        return received

    def _make_buffers(self, target: VersionId) -> None:
        """Take the memory, now that it is known what is published."""
        if self.reader.tensors is None:  # from now on another model is refused
            self.reader.tensors = self.reader.manifest_of(target).logical_tensors()
        placements = self._placements if self._placements is not None else whole(self.reader.tensors)
        buffers = []
        for number in range(self._buffer_count):
            folder = None if self._folder is None else self._folder / f"slot-{number}"
            buffers.append(WeightBuffer(placements, self.reader.tensors, folder))
        if self._initial is not None:
            buffers[0].fill(self._initial)
            self._initial = None
        self._buffers = buffers

    def _free_buffer(self) -> WeightBuffer:
        return next((buffer for buffer in self._buffers if buffer is not self._running), self._buffers[0])

    def _report_refused(self) -> None:
        """Log each refused key once."""
        new = {key: why for key, why in self.reader.refused.items() if key not in self._reported}
        for key, why in new.items():
            _log.warning("weights refused: `%s`: %s", key, why)
        self._reported = set(self.reader.refused)
        if self._metrics is not None:
            self._metrics.looked(self.lag_versions, len(new))
