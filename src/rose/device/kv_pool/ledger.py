"""Which process owns which page: the owner holds a lock on the page's byte of the ledger file.

The locks belong to an open file description (F_OFD_SETLK), one per owner. The kernel gives a byte to one owner at a
time and takes it back when the owner's process ends, by whatever death, so there is no broker that could die and
nothing to clean up. A run of pages is one system call.

A column of the file names the last owner of every page; the owner clears it when it gives the page back. A page that a
death freed still has the name, and is taken only when that process is gone with all its mappings: a GPU's driver
tears them down in no promised order. A process is named by its id and start time, because ids are used again.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from rose.device.kv_pool.host_memory import PAGE_BYTES, runs
from rose.errors import ConfigError, Unavailable

MAGIC = b"ROSEPAGE"
LAYOUT_VERSION = 1
HEADER = struct.Struct("=8sIIQQQQ8s36s")
COLUMN_OFFSET = 4096  # the header has the first page of the file for itself
PAGES_MAX = 1 << 22  # 8 TiB in pages of 2 MiB, more than any device has
PAGE_BYTES_MAX = 1 << 30
SERVING_BYTE = 1 << 40  # beyond the byte of any page; locks may lie behind the end of a file

PID_BITS = 22  # the kernel's largest process id is 1 << 22
PID_MASK = (1 << PID_BITS) - 1
NO_SUCH_PROCESS = {errno.ESRCH, errno.EINVAL, errno.ENOENT}  # the id is free, or now the id of a thread

_FLOCK = "hhqqi4x"  # struct flock with 64-bit offsets


@dataclass(frozen=True, slots=True)
class LedgerHeader:
    """What a pool is, and on which system: a process of another system or user must not join it."""

    uid: int
    pages: int
    page_bytes: int
    serving: int  # the serving engine's process, as `process_identity` names it
    pid_namespace: int
    pool_id: bytes  # random: two pools of one process in one folder are not the same
    boot_id: bytes

    @classmethod
    def of_this_process(cls, pages: int, page_bytes: int) -> LedgerHeader:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return cls(os.geteuid(), pages, page_bytes, process_identity(os.getpid()), namespace, os.urandom(8), boot_id)

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, LAYOUT_VERSION, *astuple(self))

    @classmethod
    def unpack(cls, data: bytes, path: Path) -> LedgerHeader:
        """Return the header at the start of this ledger. Raises ConfigError."""
        if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
            raise ConfigError(f"{path} is no ledger of a KV pool", hint="start the serving engine again")
        _, version, *fields = HEADER.unpack_from(data)
        if version != LAYOUT_VERSION:
            raise ConfigError(
                f"{path} has layout {version}, and this process reads layout {LAYOUT_VERSION}",
                hint="run the same version of ROSE in both engines",
            )
        return cls(*fields)


class PageLedger:
    """One owner's view of the ledger. Every instance is an owner of its own."""

    def __init__(self, path: Path, pages: int, *, page_bytes: int = PAGE_BYTES, create: bool = False) -> None:
        """Open the ledger, or create it as the serving engine in place of one that no serving engine holds.

        Raises ConfigError for a pool that this process must not join, and Unavailable while another process serves.
        """
        _check_geometry(pages, page_bytes)
        self.path = path
        self.pages = pages
        self.page_bytes = page_bytes
        self._me = process_identity(os.getpid())
        self._descriptor = _create(path, pages, page_bytes) if create else _open(path, os.O_RDWR)
        try:
            self.header = _read_header(self._descriptor, path)
            _check_header(self.header, path, pages, page_bytes)
            self._map = mmap.mmap(self._descriptor, COLUMN_OFFSET + 8 * pages)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._last_owner = np.frombuffer(self._map, np.uint64, pages, COLUMN_OFFSET)
        self._held: NDArray[np.bool_] = np.zeros(pages, bool)
        _OPEN_LEDGERS.add(self)

    @property
    def held(self) -> int:
        """The pages that this owner holds."""
        return int(self._held.sum())

    def try_own(self, page: int) -> bool:
        """Take the page if it is free, and return whether it was."""
        return bool(self._own_run(page, 1))

    def own_up_to(self, count: int) -> list[int]:
        """Take this many free pages, the lowest first, or as many as there are. Return them in order."""
        owned: list[int] = []
        free = np.flatnonzero(self._free())
        while len(owned) < count and len(free):
            chosen, free = free[: count - len(owned)].tolist(), free[count - len(owned) :]
            for first, _, length in runs(chosen, chosen):
                owned += self._own_run(first, length)
        return owned

    def give_up(self, pages: Sequence[int]) -> None:
        """Let other owners have these pages. No memory of them may be mapped here any more."""
        ordered = sorted(pages)
        assert self._held[ordered].all(), "a page is given up that is not held"
        for first, _, length in runs(ordered, ordered):
            self._last_owner[first : first + length] = 0
            self._held[first : first + length] = False
            _lock(self._descriptor, fcntl.F_UNLCK, first, length)

    def is_free(self, page: int) -> bool:
        """Return whether `try_own` would succeed now."""
        return bool(self._free()[page])

    def free_count(self) -> int:
        """Return how many pages could be taken now."""
        return int(self._free().sum())

    def owners(self) -> dict[int, int]:
        """Return the process of every page that is held: 0 while its owner is about to write its name."""
        pids = (self._last_owner & np.uint64(PID_MASK)).astype(np.int64)
        locked = self._held.copy()
        for start, end in _locked_by_others(self._descriptor, 0, self.pages):
            locked[start:end] = True
        return {int(page): int(pids[page]) for page in np.flatnonzero(locked)}

    def serving_pid(self) -> int | None:
        """Return the process of the serving engine; None when it has ended."""
        if self.header.serving == self._me:
            return os.getpid()
        is_locked = next(_locked_by_others(self._descriptor, SERVING_BYTE, SERVING_BYTE + 1), None)
        return self.header.serving & PID_MASK if is_locked else None

    def close(self) -> None:
        """Let go of the file. Pages that are still held stay out of use until this process has ended."""
        if self._descriptor >= 0:
            del self._last_owner
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1
            _OPEN_LEDGERS.discard(self)

    def _own_run(self, first: int, length: int) -> list[int]:
        """Take a run of pages; where another owner was faster, take what is left of it."""
        assert first >= 0 and first + length <= self.pages, "no such page"
        if self._held[first : first + length].any():
            return []  # the kernel does not refuse an owner its own lock
        if not _try_lock(self._descriptor, first, length):
            half = length // 2
            return self._own_run(first, half) + self._own_run(first + half, length - half) if half else []
        is_kept = self._is_kept(slice(first, first + length))  # its last owner has died, and is not gone yet
        owned = [first + place for place in range(length) if not is_kept[place]]
        for place in np.flatnonzero(is_kept):
            _lock(self._descriptor, fcntl.F_UNLCK, first + int(place), 1)
        self._last_owner[owned] = self._me
        self._held[owned] = True
        return owned

    def _free(self) -> NDArray[np.bool_]:
        """Return which pages are free by the column, which is cheaper to read than locks; a lock decides."""
        return ~self._is_kept(slice(None))

    def _is_kept(self, part: slice) -> NDArray[np.bool_]:
        """Return for each page whether its last owner has not given it back and has not fully ended."""
        owners = self._last_owner[part].copy()
        kept = np.zeros(len(owners), bool)
        while len(named := np.flatnonzero(owners)):
            identity = int(owners[named[0]])
            is_theirs = owners == np.uint64(identity)
            if identity == self._me or is_running(identity):
                kept |= is_theirs
            owners[is_theirs] = 0
        return kept


_OPEN_LEDGERS: WeakSet[PageLedger] = WeakSet()


def _close_in_child() -> None:
    """Close the ledgers that a forked child inherits: its copy would keep the locks of a parent that has died."""
    for ledger in list(_OPEN_LEDGERS):
        ledger.close()


os.register_at_fork(after_in_child=_close_in_child)


def process_identity(pid: int) -> int:
    """Return a name for this process that no later process with its id has; 0 if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    start_ticks = int(fields[19])  # since the machine started, field 22 of the whole line
    return start_ticks << PID_BITS | pid


def is_running(identity: int) -> bool:
    """Return whether this process still has memory or files: a process that waits to be reaped has none."""
    pid = identity & PID_MASK
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        return error.errno not in NO_SUCH_PROCESS
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)  # readable when the last thread has ended
        return not poll.poll(0) and process_identity(pid) in (identity, 0)  # 0: /proc does not show it
    finally:
        os.close(descriptor)


# The file


def _create(path: Path, pages: int, page_bytes: int) -> int:
    """Return the descriptor of a new ledger, which holds the serving role."""
    while True:
        earlier = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            if not _try_lock(earlier, SERVING_BYTE, 1):
                raise Unavailable(
                    f"another serving engine has the KV pool at {path.parent}{_serving_process(earlier, path)}",
                    hint="stop it first, or give this engine another pool folder",
                )
            if _is_at(earlier, path):  # or another engine has just put its own ledger there
                return _replace(path, LedgerHeader.of_this_process(pages, page_bytes))
        finally:
            os.close(earlier)


def _replace(path: Path, header: LedgerHeader) -> int:
    """Put a new ledger at this path. A borrower of the one before keeps its locks on that file, which pass away."""
    hidden = path.with_name(f".{path.name}.new")  # the lock on the earlier file keeps other engines from it
    descriptor = _open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(
            descriptor, 0, COLUMN_OFFSET + 8 * header.pages
        )  # a full disk is an error now, no signal later
        os.pwrite(descriptor, header.pack(), 0)
        assert _try_lock(descriptor, SERVING_BYTE, 1), "a lock on a new file is held"
        os.rename(hidden, path)
    except OSError as error:
        os.close(descriptor)
        with suppress(OSError):
            hidden.unlink()
        raise Unavailable(
            f"no ledger for the KV pool at {path.parent}: {error.strerror}", hint="free some space there"
        ) from error
    return descriptor


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the KV pool at {path.parent} cannot be opened: {error.strerror}",
            hint="start the serving engine first, as the same user",
        ) from error


def _read_header(descriptor: int, path: Path) -> LedgerHeader:
    status = os.fstat(descriptor)
    header = LedgerHeader.unpack(os.pread(descriptor, HEADER.size, 0), path)
    if status.st_size != COLUMN_OFFSET + 8 * header.pages:
        raise ConfigError(f"{path} is cut short: {status.st_size} bytes", hint="start the serving engine again")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{path} belongs to another user or is open to others", hint="use a pool folder of this user's own"
        )
    return header


def _check_geometry(pages: int, page_bytes: int) -> None:
    if not 0 < pages <= PAGES_MAX or not 0 < page_bytes <= PAGE_BYTES_MAX:
        raise ConfigError(
            f"a KV pool of {pages} pages of {page_bytes} bytes is not possible",
            hint=f"take up to {PAGES_MAX} pages, of up to {PAGE_BYTES_MAX} bytes",
        )


def _check_header(header: LedgerHeader, path: Path, pages: int, page_bytes: int) -> None:
    here = LedgerHeader.of_this_process(pages, page_bytes)
    if header.boot_id != here.boot_id or header.pid_namespace != here.pid_namespace:
        where = "before this machine was restarted" if header.boot_id != here.boot_id else "in another container"
        raise ConfigError(
            f"the KV pool at {path.parent} was made {where}", hint="start both engines here, serving first"
        )
    if header.uid != here.uid:
        raise ConfigError(
            f"the KV pool at {path.parent} belongs to user {header.uid}", hint="run both engines as the same user"
        )
    if (header.pages, header.page_bytes) != (pages, page_bytes):
        raise ConfigError(
            f"the KV pool at {path.parent} has {header.pages} pages of {header.page_bytes} bytes, "
            f"not {pages} of {page_bytes}",
            hint="give both engines the same pool folder, and start the rollout engine again",
        )


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    return False


def _serving_process(descriptor: int, path: Path) -> str:
    with suppress(ConfigError):
        return f" (process {_read_header(descriptor, path).serving & PID_MASK})"
    return ""


# The locks


def _lock(descriptor: int, kind: int, start: int, length: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0))


def _try_lock(descriptor: int, start: int, length: int) -> bool:
    try:
        _lock(descriptor, fcntl.F_WRLCK, start, length)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another owner has a part of it
        return False
    return True


def _locked_by_others(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches that other owners have locked: the kernel names any one per call, so ask beside it."""
    todo = [(start, end)]
    while todo:
        start, end = todo.pop()
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
        kind, _, first, length, _ = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request))
        if kind == fcntl.F_UNLCK:
            continue
        first, last = max(start, first), min(end, first + length if length else end)
        yield first, last
        todo += [(low, high) for low, high in ((start, first), (last, end)) if low < high]
