"""Publishing the weights of a model folder that a trainer has written, in a process of its own.

The gateway starts this module when it publishes for a trainer that only writes folders. Encoding takes Python's lock
and a copy of the model, and a file that is cut off while it is mapped ends the process that reads it (SIGBUS). None of
that may happen to the gateway. The two exchange lines of JSON over pipes: an order, then its outcome.

Only folders below one root are read, and only safetensors of the model that the gateway was started with. A folder is
recognised by the names, sizes and times of its files, so an order that is repeated publishes nothing again. A new
process does not know what an earlier one published: it compares the numbers with the newest hash first.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rose.api.faults import Fault, fault_of
from rose.bounds import ITEMS_MAX, Label, Name, Serial, Text
from rose.errors import ModelError, RequestRefused, RoseError, Unavailable
from rose.models.model_spec import read_spec
from rose.models.tensors import INDEX, Tensors, check, expected_tensors, open_tensors
from rose.weights.layouts import tensors_of, whole
from rose.weights.live_tensors import LiveTensors, ScratchBuffer
from rose.weights.manifest import ChunkEntry, TensorEntry, content_hash, version_hash
from rose.weights.publish import CHUNK_ELEMENTS_MAX, Publisher
from rose.weights.shards import plan

SUFFIX = ".safetensors"
PATH_SHOWN_MAX = 200

FileState = tuple[str, int, int, int]  # name, size, time of change, inode


class PublishOrder(msgspec.Struct, frozen=True):
    """A folder to publish under this number, unless its weights are those of the newest hash."""

    folder: Text
    number: Serial
    newest_hash: Label = ""


class PublishOutcome(msgspec.Struct, frozen=True):
    """The version that holds the folder's weights. An empty name: the newest one holds them already."""

    version: Label = ""
    hash: Label = ""
    kind: Label = ""
    size_bytes: Serial = 0
    fault: Fault | None = None


class PublisherSpec(msgspec.Struct, frozen=True):
    """What the process needs to know beside the run's secret, which comes in its environment."""

    model: Text
    root: Text
    relay: Text
    run: Name


class FolderPublisher:
    """Publishes folders below a root to a relay, as versions of one model."""

    def __init__(self, spec: PublisherSpec) -> None:
        self._spec = spec
        self._model = read_spec(Path(spec.model))
        self._tensors = tensors_of(self._model)
        self._publisher: Publisher | None = None
        self._last: tuple[list[FileState], str] | None = None  # the files that were published last, and their hash

    def publish(self, order: PublishOrder) -> PublishOutcome:
        """Publish a folder unless its weights are the newest. Raises RequestRefused, Unavailable, ConfigError."""
        folder = checked_folder(order.folder, self._spec.root)
        state = weight_files(folder, self._spec.root)
        if self._last == (state, order.newest_hash):
            return PublishOutcome(hash=order.newest_hash)
        tensors = self._opened(folder)
        if self._last is None and order.newest_hash and self._hash_of(tensors) == order.newest_hash:
            self._last = (state, order.newest_hash)
            return PublishOutcome(hash=order.newest_hash)
        if self._publisher is None:
            self._publisher = Publisher(None, self._spec.relay, run=self._spec.run, tensors=self._tensors)
        newest = self._publisher.newest
        number = max(order.number, newest.version + 1 if newest is not None else 0)
        try:
            published = self._publisher.publish_stream(number, self._stream(tensors, folder, state))
        except ModelError as error:  # of numbers that are not finite
            raise RequestRefused(error.what, hint=error.hint) from error
        self._last = (state, published.hash)
        return PublishOutcome(published.label, published.hash, published.kind, published.size_bytes)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _opened(self, folder: Path) -> Tensors:
        """Return the folder's tensors, which are those of the model. Files that are not whole may become so."""
        try:
            tensors = open_tensors(folder)
        except ModelError as error:
            raise Unavailable(error.what, hint="send the request again once the folder is written") from error
        try:
            check(tensors, self._model)
        except ModelError as error:
            hint = f"write the weights of {self._spec.model}, with the names and shapes that it has"
            raise RequestRefused(error.what, hint=hint) from error
        return tensors

    def _stream(self, tensors: Tensors, folder: Path, state: list[FileState]) -> Iterator[tuple[str, Any]]:
        """Yield every tensor. Raises Unavailable at the end if a file has changed since it was opened."""
        for name in expected_tensors(self._model):
            yield name, tensors.stored(name)
        if weight_files(folder, self._spec.root) != state:
            raise Unavailable(f"the files in {folder} changed while they were read; nothing is published")

    def _hash_of(self, tensors: Tensors) -> str:
        """Return the hash that these weights have once they are published."""
        entries = [TensorEntry(tensor.name, tensor.dtype, tensor.shape) for tensor in self._tensors]
        numbers = {entry.name: number for number, entry in enumerate(entries)}
        placements = {placement.local: placement for placement in whole(self._tensors)}
        chunks, scratch = [], ScratchBuffer()
        regions = plan(self._tensors, [list(placements.values())], chunk_elements_max=CHUNK_ELEMENTS_MAX).chunks_of(0)
        for region in regions:
            live = LiveTensors({region.tensor: tensors.stored(region.tensor)})
            number = numbers[region.tensor]
            bits = live.bits(placements[region.tensor], region, entries[number].dtype, scratch)
            digest = content_hash(bits, entries[number].dtype)
            chunks.append(ChunkEntry(number, region.start, region.stop, 0, 0, 0, b"", digest, b""))
        return version_hash(entries, chunks)


def checked_folder(text: str, root: str) -> Path:
    """Return the real path of a folder below the root. Raises RequestRefused, whether it exists or not."""
    if "\0" in text or not os.path.isabs(text):
        raise RequestRefused(f"`{text[:PATH_SHOWN_MAX]}` is not an absolute path")
    return _contained(text, root)


def weight_files(folder: Path, root: str) -> list[FileState]:
    """Return the state of every file that holds weights. Raises RequestRefused, Unavailable."""
    found = []
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry, _ in zip(entries, range(ITEMS_MAX + 1))]
        if len(names) > ITEMS_MAX:
            raise RequestRefused(f"{folder} has more than {ITEMS_MAX} files", hint="a model folder has a few")
        for name in sorted(name for name in names if name == INDEX or name.endswith(SUFFIX)):
            path = _contained(str(folder / name), root)
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise RequestRefused(f"{folder / name} is not a regular file")
            found.append((name, status.st_size, status.st_mtime_ns, status.st_ino))
    except OSError as error:
        hint = "send the request again once the folder is written and visible on the gateway's machine"
        raise Unavailable(f"{folder} cannot be read: {error.strerror}", hint=hint) from error
    return found


def _contained(text: str, root: str) -> Path:
    """Return a path without symbolic links. Raises RequestRefused if it is not below the root."""
    path = Path(os.path.realpath(text))
    if not path.is_relative_to(os.path.realpath(root)):
        what = f"`{text[:PATH_SHOWN_MAX]}` is not below the folder that this gateway reads weights from"
        raise RequestRefused(what, hint="write weights below it, or start the gateway with another --door-folder")
    return path


def main(spec_text: str) -> None:
    """Answer orders from standard input until it ends, which it does with the gateway."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the gateway's whole group
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(10, os.getpriority(os.PRIO_PROCESS, 0)))  # as trainers
    publisher = FolderPublisher(msgspec.json.decode(spec_text, type=PublisherSpec))
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=PublishOrder)
        try:
            outcome = publisher.publish(order)
        except Exception as error:
            if not isinstance(error, RoseError):
                sys.excepthook(type(error), error, error.__traceback__)
            outcome = PublishOutcome(fault=fault_of(error))
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()
    with suppress(RoseError):
        publisher.close()


if __name__ == "__main__":
    main(sys.argv[1])
