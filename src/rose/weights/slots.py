"""Where received weights lie: two places, so that one stays as it is while the next version is built in the other.

A place is a set of named arrays, in this process's memory or in a safetensors file. The file is how weights cross to
the engine's process: the receiver decodes straight into a shared map of it, and the engine opens the folder like any
other model's. Nothing is copied through a socket, and nothing is written twice. The alternative, a new file per
version, writes all the weights each time; handing over the descriptor of a memfd does what the file does, but an
engine that was sent away and called back could not find its weights again. Put the folder on a tmpfs (see
`private_folder`), or every version is also written to a disk, sooner or later.

Room is reserved before anything is mapped: a full disk is an error at the start and not a crash at a store.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rose.core.versions import VersionId
from rose.errors import Unavailable
from rose.models.tensors import SINGLE
from rose.weights.coding import BITS
from rose.weights.layouts import local_shapes
from rose.weights.shadow import Shadow
from rose.weights.shards import Array, Holdings, Tensor

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rose-weights"
FOLDER_VARIABLE = "ROSE_WEIGHTS_FOLDER"  # where weights are received, if not in shared memory
HEADER_ALIGNMENT = 64
READ_AS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


@dataclass(frozen=True, slots=True)
class Local:
    """A tensor as a worker keeps it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(BITS[self.dtype]).itemsize


def locals_of(holdings: Holdings, tensors: Sequence[Tensor]) -> list[Local]:
    dtypes = {tensor.name: tensor.dtype for tensor in tensors}
    of = {held.local: dtypes[held.box.tensor] for held in holdings}
    return [Local(name, shape, of[name]) for name, shape in sorted(local_shapes(holdings).items())]


class Slot:
    """One copy of a worker's weights, and what version it is, if it is one. The arrays are new: nobody has written."""

    def __init__(self, arrays: Mapping[str, Array], holdings: Holdings, tensors: Sequence[Tensor]) -> None:
        self.arrays = arrays
        self.shadow = Shadow(arrays, holdings, tensors, is_blank=True)
        self.dtypes = {local.name: local.dtype for local in locals_of(holdings, tensors)}
        self.version: VersionId | None = None
        self.folder: Path | None = None

    def views(self) -> dict[str, Array]:
        """The weights as others may read them: bf16 as uint16, the rest as what it is."""
        found = {}
        for name, array in self.arrays.items():
            view = array.view(READ_AS[self.dtypes[name]])
            view.flags.writeable = False
            found[name] = view
        return found

    def fill(self, weights: Mapping[str, Array]) -> None:
        """Begin with these, whatever they are; names that are not here are left out."""
        for name, array in self.arrays.items():
            given = weights.get(name)
            if given is not None and given.shape == array.shape and given.dtype.itemsize == array.dtype.itemsize:
                array[...] = np.ascontiguousarray(given).view(array.dtype).reshape(array.shape)
        self.shadow.forget_all()


def in_memory(locals_: Sequence[Local]) -> dict[str, Array]:
    """Zeros that take no memory before they are written."""
    return {local.name: np.zeros(local.shape, BITS[local.dtype]) for local in locals_}


def in_folder(locals_: Sequence[Local], folder: Path) -> dict[str, Array]:
    """The arrays of a new model.safetensors in this folder, mapped: what is written to them is in the file."""
    header, offsets = _header(locals_)
    size = 8 + len(header) + sum(local.size_bytes for local in locals_)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SINGLE
    path.unlink(missing_ok=True)
    try:
        with path.open("xb+") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(len(header).to_bytes(8, "little") + header)
            file.flush()
            mapped = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        path.unlink(missing_ok=True)
        hint = "free room there, or receive into another folder"
        raise Unavailable(f"no room for {size:,} bytes of weights in {folder}: {error.strerror}", hint=hint) from error
    start = 8 + len(header)
    return {
        local.name: np.frombuffer(
            mapped, BITS[local.dtype], count=int(np.prod(local.shape, dtype=np.int64)), offset=start + offset
        ).reshape(local.shape)
        for local, offset in zip(locals_, offsets)
    }


def _header(locals_: Sequence[Local]) -> tuple[bytes, list[int]]:
    entries, offsets, begin = {}, [], 0
    for local in locals_:
        end = begin + local.size_bytes
        entries[local.name] = {"dtype": local.dtype, "shape": list(local.shape), "data_offsets": [begin, end]}
        offsets.append(begin)
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-(8 + len(text)) % HEADER_ALIGNMENT), offsets


def weights_parent() -> Path:
    """Return where folders of weights are made: ROSE_WEIGHTS_FOLDER, shared memory, or the temporary folder."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given)
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
    """Whether the open folder is still the one of this name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(handle))
    return False


def remove_folder(folder: Path) -> None:
    """Remove a folder and, if it is one of `private_folder`, let its lock go."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    if (handle := _locks.pop(folder, None)) is not None:
        os.close(handle)
