"""The memory of received weights: one buffer stays unchanged while the next version is built in the other.

A buffer is a set of named arrays, in this process's memory or in a safetensors file. The file is how weights cross to
the engine's process: the receiver decodes straight into a shared map of it, and the engine opens the folder like any
model's. Nothing is copied through a socket or written twice. An engine that was unloaded finds its weights again, which
the descriptor of a memfd would not allow. The folder should be on a tmpfs (see `private_folder`): on a disk every
version would be written out as well. Space is reserved before anything is mapped, so a full disk is an error at the
start and not a crash at a store.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import shutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rose.core.versions import VersionId
from rose.errors import Unavailable
from rose.models.tensors import SINGLE
from rose.weights.coding import BITS, Codec
from rose.weights.layouts import local_shapes
from rose.weights.manifest import content_hash
from rose.weights.relay.relay_base import Buffer
from rose.weights.shards import Array, Placements, ShardPlacement, Tensor, TensorRegion, places

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rose-weights"
FOLDER_VARIABLE = "ROSE_WEIGHTS_FOLDER"  # where weights are received, if not in shared memory
HEADER_ALIGNMENT = 64
READ_AS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
POPULATE_WRITE = 23  # of madvise: as if every page were written, without changing any
STEP_BYTES = 2 << 20  # a thread that maps or unmaps memory meanwhile waits for one step at most
PREFAULT_BYTES_MIN = 64 << 20  # less is there before a thread is


def local_tensors(placements: Placements, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as a worker keeps them, in order of name."""
    dtypes = {tensor.name: tensor.dtype for tensor in tensors}
    of = {placement.local: dtypes[placement.region.tensor] for placement in placements}
    return [Tensor(name, shape, of[name]) for name, shape in sorted(local_shapes(placements).items())]


class StagingCopy:
    """Weights that no engine runs: arrays of bit patterns, and the known hashes of their chunks.

    A hash is computed when it is asked for and not known, so it does not matter how the numbers got there.
    """

    def __init__(
        self, arrays: Mapping[str, Array], placements: Placements, tensors: Sequence[Tensor], *, is_blank: bool = False
    ) -> None:
        self.is_blank = is_blank  # never written: no chunk equals any version, and none is read to learn that
        self._arrays = arrays
        self._layout = placements
        self._dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        self._placements: dict[TensorRegion, list[ShardPlacement]] = {}
        self._hashes: dict[TensorRegion, bytes | None] = {}

    def cut(self, regions: Sequence[TensorRegion]) -> list[TensorRegion]:
        """Return the chunks needed here. Known hashes of chunks that are cut as before are kept."""
        found: dict[TensorRegion, list[ShardPlacement]] = defaultdict(list)
        for region, placement in places(regions, self._layout):
            found[region].append(placement)
        self._hashes = {region: self._hashes.get(region) for region in found}
        self._placements = dict(found)
        return list(found)

    def hash_of(self, region: TensorRegion) -> bytes:
        """Return the hash of a chunk's numbers; empty if its places (tied tensors have two) differ."""
        known = b"" if self.is_blank else self._hashes[region]
        if known is None:
            dtype = self._dtypes[region.tensor]
            views = (placement.view(self._arrays[placement.local], region) for placement in self._placements[region])
            hashes = {content_hash(np.ascontiguousarray(view).view(BITS[dtype]), dtype) for view in views}
            known = self._hashes[region] = hashes.pop() if len(hashes) == 1 else b""
        return known

    def forget(self, region: TensorRegion) -> None:
        """Mark the hash of a chunk as unknown; every writer to the arrays must call it."""
        self._hashes[region] = None

    def forget_all(self) -> None:
        self.is_blank = False
        self._hashes = dict.fromkeys(self._hashes)

    def write(self, region: TensorRegion, payload: Buffer, codec: Codec) -> None:
        """Apply a payload at every place of the chunk. If it fails, the chunk's hash is unknown."""
        self.is_blank = False
        self.forget(region)
        for placement in self._placements[region]:
            view = placement.view(self._arrays[placement.local], region)
            if view.flags.c_contiguous:
                codec.apply(payload, view)
            else:
                block = np.ascontiguousarray(view)
                codec.apply(payload, block)
                view[...] = block


class WeightBuffer:
    """One copy of a worker's weights in new arrays, and its version, if it is one."""

    def __init__(self, placements: Placements, tensors: Sequence[Tensor], folder: Path | None = None) -> None:
        self.locals = local_tensors(placements, tensors)
        self.folder = folder
        self.arrays = arrays_in_memory(self.locals) if folder is None else arrays_in_folder(self.locals, folder)
        self.staging = StagingCopy(self.arrays, placements, tensors, is_blank=True)
        self.version: VersionId | None = None

    def views(self) -> dict[str, Array]:
        """Return the weights for reading: bf16 as uint16, other types as they are."""
        found = {local.name: self.arrays[local.name].view(READ_AS[local.dtype]) for local in self.locals}
        for view in found.values():
            view.flags.writeable = False
        return found

    def fill(self, weights: Mapping[str, Array]) -> None:
        """Copy these weights; names and shapes that this buffer does not have are left out."""
        for name, array in self.arrays.items():
            new = weights.get(name)
            if new is not None and new.shape == array.shape and new.dtype.itemsize == array.dtype.itemsize:
                array[...] = np.ascontiguousarray(new).view(array.dtype).reshape(array.shape)
        self.staging.forget_all()


def arrays_in_memory(tensors: Sequence[Tensor]) -> dict[str, Array]:
    """Return arrays of zeros, which take no memory before they are written."""
    return {tensor.name: np.zeros(tensor.shape, BITS[tensor.dtype]) for tensor in tensors}


def arrays_in_folder(tensors: Sequence[Tensor], folder: Path) -> dict[str, Array]:
    """Return the arrays of a new model.safetensors in this folder, mapped: writes to them reach the file."""
    entries, offsets, end = {}, [], 0
    for tensor in tensors:
        offsets.append(end)
        end += tensor.size_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offsets[-1], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    header = text + b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    start = 8 + len(header)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SINGLE
    path.unlink(missing_ok=True)
    try:
        with path.open("xb+") as file:
            os.posix_fallocate(file.fileno(), 0, start + end)
            file.write(len(header).to_bytes(8, "little") + header)
            file.flush()
            mapped = mmap.mmap(file.fileno(), start + end, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        path.unlink(missing_ok=True)
        what = f"no room for {start + end:,} bytes of weights in {folder}: {error.strerror}"
        raise Unavailable(what, hint="free room there, or receive into another folder") from error
    return {
        tensor.name: np.ndarray(tensor.shape, BITS[tensor.dtype], mapped, start + offset)
        for tensor, offset in zip(tensors, offsets)
    }


# Prefault


class Prefault:
    """A thread that takes the pages of these arrays while entered, the last ones first.

    The system fills a new page with zeros when it is first touched; in a virtual machine it may have to fetch it from
    the host, which takes seconds per GB where decoding takes half a second. So the thread comes towards the writer,
    beginning while the first bytes are on their way. Touching changes nothing, and neither waits for the other. Before
    Linux 5.14 pages come one by one as they are written.
    """

    def __init__(self, arrays: Iterable[Array]) -> None:
        self._arrays = list(arrays)
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Prefault:
        if sum(array.nbytes for array in self._arrays) >= PREFAULT_BYTES_MIN:
            self._thread = threading.Thread(target=self._touch_all, name="weights-touch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _touch_all(self) -> None:
        for address, size_bytes in steps(self._arrays):
            if self._is_stopping.is_set() or not touch(address, size_bytes):
                return


def steps(arrays: Iterable[Array]) -> Iterator[tuple[int, int]]:
    """Yield address and size of whole pages to touch at a time, from the last array to the first."""
    for array in reversed(list(arrays)):
        begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        for stop in range(end, begin, -STEP_BYTES):
            start = max(begin, stop - STEP_BYTES)
            yield start, stop - start


def touch(address: int, size_bytes: int) -> bool:
    """Take these pages without Python's lock; return False, without harm, if the system does not."""
    return _madvise is not None and _madvise(address, size_bytes, POPULATE_WRITE) == 0


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return madvise


_madvise = _find_madvise()


# Folders


def weights_parent() -> Path:
    """Return where folders of weights are made: ROSE_WEIGHTS_FOLDER, shared memory, or the temporary folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def private_folder(parent: Path | None = None) -> Path:
    """Make a folder that only this user may read, locked while this process lives; remove those of dead processes.

    Raises OSError.
    """
    parent = parent or weights_parent()
    sweep(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}.{os.geteuid()}.", dir=parent))
        handle = _open_folder(folder)
        if handle is None:
            continue  # another process swept it before it was locked
        fcntl.flock(handle, fcntl.LOCK_EX)  # a process that sweeps holds it for a moment only
        if _is_at(folder, handle):
            _locks[folder] = handle
            return folder
        os.close(handle)


def sweep(parent: Path | None = None) -> list[Path]:
    """Remove the folders of weights that dead processes of this user left; return what was removed.

    A folder belongs to a living process exactly while its lock is held. The kernel keeps the lock with the folder, so
    this holds for processes of other containers too, whose process ids mean nothing here.
    """
    removed = []
    for folder in (parent or weights_parent()).glob(f"{PREFIX}.{os.geteuid()}.*"):
        handle = _open_folder(folder)
        if handle is None:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_uid == os.geteuid() and _is_at(folder, handle):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
        except OSError:
            pass  # its process lives, or the file system has no locks
        finally:
            os.close(handle)
    return removed


_locks: dict[Path, int] = {}  # folders of this process, with the open handle that holds each lock


def _open_folder(folder: Path) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None


def _is_at(folder: Path, handle: int) -> bool:
    """Return whether the open folder is still the one of this name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(handle))
    return False


def remove_folder(folder: Path) -> None:
    """Remove a folder and, if it is one of `private_folder`, release its lock."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    if (handle := _locks.pop(folder, None)) is not None:
        os.close(handle)
