"""The worker's side: bring the newest version from the relay, whole and verified, and only then offer it to the engine.

    receiver = Receiver("tcp://relay:7070", run="my-run")
    received = receiver.fetch()                # None if there is nothing newer
    engine.swap(received.tensors)              # the pause: between two steps, nothing is computed or copied
    receiver.installed(received)

Everything slow happens in `fetch`, beside a running engine: list, fetch, check, decode, and hash every number of the
result. It works in the slot that does not run. If it fails, for whatever reason, it raises, and the version that runs
is untouched; the next `fetch` goes on from what is already right. After `installed` the old slot is free, and `prepare`
makes it equal to the new one (a copy costs what decoding the same delta again would, and no bytes), so that the next
fetch has only the next delta to apply. `prepare` may be called any time before that; else `fetch` does it.

Whoever was told which version to run names it by its hash, `fetch(hash)`, and gets that one, however many newer ones
there are by then. The one that is installed is handed out again without a look at the relay: an engine that was
restarted needs it once more.

An engine that lays weights out in its own way, as the embedded one does, copies them when it stages: it needs one slot
only (`slots=1`), and nothing has to be installed. In one process it takes `received.tensors`; in another, the folder.
Two slots are for engines that run on the arrays, or that may read the folder again later.
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
from rose.weights.chain import Patience
from rose.weights.coding import Bits, Codec, Payload, SparseCodec
from rose.weights.connecting import reach, run_secret
from rose.weights.keys import for_reading
from rose.weights.layouts import whole
from rose.weights.manifest import Manifest, WeightsRefused
from rose.weights.metrics import ReceiveMetrics
from rose.weights.reading import ChainReader
from rose.weights.relay.base import Buffer, Chunks, Entry, Relay
from rose.weights.shards import Array, Holdings, Tensor
from rose.weights.slots import Slot, in_folder, in_memory, locals_of
from rose.weights.touching import Touching

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Received:
    """A whole version, verified. The arrays stay as they are until another version is installed after it."""

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
    """One per worker rank; for one thread at a time."""

    def __init__(
        self,
        relay: Relay | str,
        run: str,
        *,
        secret: bytes | None = None,  # the run's read key, or its secret, of which only the read key is kept
        tensors: Sequence[Tensor] | None = None,  # what the worker's model has; None takes what is published
        holdings: Holdings | None = None,  # the worker's share of them; None is all
        initial: Mapping[str, Array] | None = None,  # weights the worker has already: what equals them is not fetched
        folder: Path | None = None,  # receive into files here, for an engine in another process
        slots: int = 2,
        codec: Codec | None = None,
        threads: int = 1,
        patience: Patience | None = None,
        metrics: ReceiveMetrics | None = None,
    ) -> None:
        assert slots in (1, 2) and (holdings is None or tensors is not None)
        key = for_reading(run_secret(secret))
        self._relay = _CountedRelay(reach(relay, key))
        self._owns_relay = isinstance(relay, str)
        self._codec = _TimedCodec(codec or SparseCodec(threads=threads))
        self.reader = ChainReader(
            self._relay, run=run, secret=key, tensors=tensors, codec=self._codec, patience=patience
        )
        self._tensors, self._holdings, self._initial = tensors, holdings, initial
        self._folder, self._slot_count = folder, slots
        self._slots: list[Slot] = []
        self._running: Slot | None = None
        self._pending: tuple[Slot, Received] | None = None
        self._installed: Received | None = None
        self._told: set[str] = set()  # of what was refused
        self._metrics = metrics
        self.newest: VersionId | None = None  # in the relay, as of the last look

    # What a worker calls

    def look(self) -> VersionId | None:
        """The newest version that the relay has. Raises if all there is must be refused."""
        self.newest = self.reader.refresh()
        self._tell_refused()
        if self.newest is None and self.reader.refused:
            key, why = next(iter(self.reader.refused.items()))
            raise WeightsRefused(f"nothing in the relay can be used; `{key}`: {why}")
        return self.newest

    def fetch(self, wanted_hash: str = "") -> Received | None:
        """The newest version if it is newer than the one installed, ready to swap in; None if it is not.

        With a hash it is the version that has it, and never None. Raises if it cannot be had; then nothing has changed
        for whoever runs the old one.
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
            self._tell_refused()

    def installed(self, received: Received, pause_s: float | None = None) -> None:
        """The engine runs this version now, and nobody reads the one before any more."""
        if received is self._installed:
            return
        if self._pending is None or self._pending[1] is not received:
            raise RequestRefused(f"version {received.version} is not the one that was fetched last")
        self._running, self._pending = self._pending[0], None
        self._installed = received if self._slot_count == 2 else None
        if self._metrics is not None:
            self._metrics.looked(self.lag_versions, 0)
            if pause_s is not None:
                self._metrics.paused(pause_s)

    def prepare(self) -> None:
        """Make the free slot equal to the one that runs, and hash it, so that the next version is a delta away."""
        running = self._running
        if running is None or running.version is None:
            return
        free = self._free()
        if free is running or free.version == running.version:
            return
        free.version = None
        for name, array in free.arrays.items():
            np.copyto(array, running.arrays[name])
        free.shadow.forget_all()
        free.version = running.version
        if running.version in self.reader.versions():
            for box in free.shadow.cut(self.reader.manifest_of(running.version).boxes()):
                free.shadow.hash_of(box)

    @property
    def version(self) -> VersionId | None:
        """The one that is installed; with one slot, the one that was fetched."""
        return None if self._running is None else self._running.version

    @property
    def latest(self) -> Received | None:
        """What was installed last."""
        return self._installed

    @property
    def lag_versions(self) -> int:
        """How many versions the relay has beyond the installed one."""
        held = self.version
        return sum(1 for version in self.reader.versions() if held is None or version > held)

    def close(self) -> None:
        if self._owns_relay:
            self._relay.close()

    # Inside

    def _fetch(self, wanted_hash: str) -> Received | None:
        begin_s = time.perf_counter()
        self._relay.reset()
        self._codec.seconds = 0.0
        target = self.look()
        if wanted_hash:
            target = self._with_hash(wanted_hash)
        if self._pending is not None and target is not None and self._pending[1].version == target:
            return self._pending[1]
        if target is None or (not wanted_hash and self.version is not None and target <= self.version):
            return None
        seconds = {"list": time.perf_counter() - begin_s}
        self._set_up(target)
        begin_s = time.perf_counter()
        self.prepare()
        seconds["prepare"] = time.perf_counter() - begin_s
        return self._bring(self._free(), target, seconds)

    def _with_hash(self, wanted_hash: str) -> VersionId:
        """The latest version with these numbers: a trainer that went back publishes the same ones again."""
        for version in reversed(self.reader.versions()):
            if self.reader.manifest_of(version).version_hash == wanted_hash:
                return version
        raise WeightsRefused(
            f"no version with hash {wanted_hash} is in the relay; the newest there is {self.newest}",
            hint="do the trainer and this worker use the same relay, and has it kept the version?",
        )

    def _bring(self, slot: Slot, target: VersionId, seconds: dict[str, float]) -> Received:
        self._pending, slot.version = None, None
        begin_s = time.perf_counter()
        with Touching(slot.arrays.values() if slot.shadow.is_blank else ()):
            manifest = self.reader.bring(slot.shadow, target)
        seconds["bring"] = time.perf_counter() - begin_s
        seconds["fetch"], seconds["decode"] = self._relay.seconds, self._codec.seconds
        seconds["total"] = seconds["list"] + seconds["prepare"] + seconds["bring"]
        slot.version = target
        dense = sum(array.nbytes for array in slot.arrays.values())
        found = Received(
            target, manifest.version_hash, slot.views(), slot.folder, self._relay.size_bytes, dense, seconds
        )
        self._pending = (slot, found)
        if self._slot_count == 1:
            self._running = slot
        if self._metrics is not None:
            self._metrics.received(found)
        return found

    def _set_up(self, target: VersionId) -> None:
        """Take the memory, now that it is known what is published."""
        if self._slots:
            return
        manifest = self.reader.manifest_of(target)
        if self._tensors is None:
            self._tensors = _tensors_of(manifest)
            self.reader.tensors = self._tensors  # from now on another model is refused
        holdings = self._holdings if self._holdings is not None else whole(self._tensors)
        locals_ = locals_of(holdings, self._tensors)
        made = []
        for number in range(self._slot_count):
            folder = None if self._folder is None else self._folder / f"slot-{number}"
            arrays = in_memory(locals_) if folder is None else in_folder(locals_, folder)
            slot = Slot(arrays, holdings, self._tensors)
            slot.folder = folder
            made.append(slot)
        if self._initial is not None:
            made[0].fill(self._initial)
            self._initial = None
        self._slots = made

    def _free(self) -> Slot:
        return next((slot for slot in self._slots if slot is not self._running), self._slots[0])

    def _tell_refused(self) -> None:
        refused = {key: why for key, why in self.reader.refused.items() if key not in self._told}
        for key, why in refused.items():
            _log.warning("weights refused: `%s`: %s", key, why)
        self._told = set(self.reader.refused)
        if self._metrics is not None:
            self._metrics.looked(self.lag_versions, len(refused))


class _CountedRelay:
    """Counts what is read and how long that takes."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.reset()

    def reset(self) -> None:
        self.size_bytes, self.seconds = 0, 0.0

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        begin_s = time.perf_counter()
        data = self._relay.get(key, start, stop)
        self.size_bytes += len(data)
        self.seconds += time.perf_counter() - begin_s
        return data

    def list(self, prefix: str = "") -> Sequence[Entry]:
        return self._relay.list(prefix)

    def put_new(self, key: str, chunks: Chunks) -> int:
        return self._relay.put_new(key, chunks)

    def delete(self, key: str) -> bool:
        return self._relay.delete(key)

    def close(self) -> None:
        self._relay.close()


class _TimedCodec:
    """Counts how long applying takes."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.name = codec.name
        self.seconds = 0.0

    def encode(self, base: Bits, new: Bits, dtype: str) -> bytes:
        return self._codec.encode(base, new, dtype)

    def encode_full(self, new: Bits, dtype: str) -> bytes:
        return self._codec.encode_full(new, dtype)

    def apply(self, payload: Payload, destination: Bits) -> None:
        begin_s = time.perf_counter()
        self._codec.apply(payload, destination)
        self.seconds += time.perf_counter() - begin_s


def _tensors_of(manifest: Manifest) -> list[Tensor]:
    return [Tensor(entry.name, entry.shape, entry.dtype) for entry in manifest.tensors]
