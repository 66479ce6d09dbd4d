"""How the processes of one pool meet: a folder with the ledger and a Unix socket that hands out the pages.

The serving engine creates the pool and keeps a small thread that sends the pages' descriptors to each process that
joins. This happens once per borrower; afterwards no page needs a message. The folder is readable by its user only, both
ends check the other's user, and the borrower checks every size before it allocates anything.

A message has few descriptors and is answered before the next is sent: the kernel bounds how many may be on their way.
"""

from __future__ import annotations

import array
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from rose.device.kv_pool.backends import MemfdBackend, PageBackend
from rose.device.kv_pool.cuda import CudaBackend
from rose.device.kv_pool.host_memory import PAGE_BYTES
from rose.device.kv_pool.ledger import PAGE_BYTES_MAX, PAGES_MAX, PageLedger
from rose.errors import ConfigError, RoseError, Unavailable
from rose.private_files import make_private_folder

LEDGER_NAME, SOCKET_NAME = "ledger", "pool.sock"
WELCOME = struct.Struct("=8sI8s16s16sQQ")
MAGIC = b"ROSEPOOL"
EXCHANGE_VERSION = 1
BATCH_MAX = 250  # descriptors in one message; the kernel takes 253
PEER_TIMEOUT_S = 10.0  # for one message; a borrower that is stopped must not keep others out for longer
JOIN_TIMEOUT_S = 30.0  # a serving engine makes its pool within seconds of the last weight it loads
RETRY_S = 0.05
BACKLOG = 16


class _Adopter(Protocol):
    def __call__(self, descriptors: Iterator[int], pages: int, page_bytes: int) -> PageBackend: ...


def create_pool(
    folder: Path, pages: int, kind: str = "memfd", *, page_bytes: int = PAGE_BYTES, device: int = 0
) -> tuple[PageLedger, PageBackend, PoolServer]:
    """Create a pool as the serving engine, and offer it to borrowers until the returned server is closed.

    Raises ConfigError for a pool that cannot be, and Unavailable if another engine serves or there is no memory.
    """
    try:
        make_private_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot hold a KV pool: {error}", hint="name a folder of this user's own for the pool"
        ) from error
    ledger = PageLedger(folder / LEDGER_NAME, pages, page_bytes=page_bytes, create=True)
    try:
        backend = _create_backend(kind, pages, page_bytes, device)
        try:
            return ledger, backend, PoolServer(folder, ledger.header.pool_id, backend)
        except BaseException:
            backend.close()
            raise
    except BaseException:
        ledger.close()
        raise


def join_pool(folder: Path, *, device: int = 0, timeout_s: float = JOIN_TIMEOUT_S) -> tuple[PageLedger, PageBackend]:
    """Join the pool of the serving engine, and wait for it this long. Raises ConfigError or Unavailable."""
    deadline_s = time.monotonic() + timeout_s
    with _connect(folder, deadline_s) as peer:
        peer.settimeout(max(RETRY_S, deadline_s - time.monotonic()))
        try:
            return _join(folder, peer, device)
        except OSError as error:
            raise Unavailable(
                f"the serving engine ended or stopped while handing over the KV pool at {folder}: {error}",
                hint="look at the serving engine's output, then start the rollout engine again",
            ) from error


def _join(folder: Path, peer: socket.socket, device: int) -> tuple[PageLedger, PageBackend]:
    _check_peer(peer)
    pool_id, kind, device_id, pages, page_bytes = _read_welcome(peer.recv(WELCOME.size + 1))
    ledger = PageLedger(folder / LEDGER_NAME, pages, page_bytes=page_bytes)
    try:
        if ledger.header.pool_id != pool_id:
            raise Unavailable(f"the KV pool at {folder} is just being replaced", hint="start the rollout engine again")
        backend = _adopter(kind, device, device_id)(_received(peer), pages, page_bytes)
    except BaseException:
        ledger.close()
        raise
    return ledger, backend


class PoolServer:
    """The thread of the serving engine that hands the pages to every process that joins, one after the other."""

    def __init__(self, folder: Path, pool_id: bytes, backend: PageBackend) -> None:
        self._pool_id = pool_id
        self._backend = backend
        self._is_closing = False
        self._listener = _listen(folder)
        self._thread = threading.Thread(target=self._serve, name="rose-kv-pool", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Offer the pool no longer. Processes that have joined keep their pages."""
        self._is_closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(PEER_TIMEOUT_S)
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closing:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closing, or this process may open no more files at the moment
                time.sleep(RETRY_S)
                continue
            with peer, suppress(OSError, RoseError):  # a borrower that fails does not concern serving
                peer.settimeout(PEER_TIMEOUT_S)
                _check_peer(peer)
                self._hand_out(peer)

    def _hand_out(self, peer: socket.socket) -> None:
        backend = self._backend
        kind, device_id = backend.kind.encode(), backend.device_id
        sizes = (backend.pages, backend.page_bytes)
        peer.send(WELCOME.pack(MAGIC, EXCHANGE_VERSION, self._pool_id, kind, device_id, *sizes))
        for first in range(0, backend.descriptors, BATCH_MAX):
            batch = range(first, min(backend.descriptors, first + BATCH_MAX))
            descriptors: list[int] = []
            try:
                for number in batch:
                    descriptors.append(backend.export(number))
                socket.send_fds(peer, [b"."], descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            if not peer.recv(1):
                return


# The borrower's side


def _connect(folder: Path, deadline_s: float) -> socket.socket:
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(RETRY_S)  # a serving engine that is stopped accepts nothing
        try:
            _check_folder(folder)
            with _FolderPath(folder) as path:
                peer.connect(f"{path}/{SOCKET_NAME}")
            return peer
        except OSError as error:
            peer.close()
            if time.monotonic() > deadline_s:
                raise Unavailable(
                    f"no serving engine offers a KV pool at {folder}: {error.strerror}",
                    hint="start the serving engine first, with the same pool folder",
                ) from error
        time.sleep(RETRY_S)


def _read_welcome(message: bytes) -> tuple[bytes, str, bytes, int, int]:
    """Return the id, the kind, the device and the sizes of the pool. Raises Unavailable or ConfigError."""
    if not message:
        raise Unavailable(
            "the serving engine does not hand over its KV pool", hint="look at the serving engine's output"
        )
    if len(message) != WELCOME.size or message[: len(MAGIC)] != MAGIC:
        raise ConfigError("the pool's socket is not a serving engine's", hint="check the pool folder")
    _, version, pool_id, kind, device_id, pages, page_bytes = WELCOME.unpack(message)
    if version != EXCHANGE_VERSION:
        raise ConfigError(
            f"the serving engine hands over pages by version {version}, and this process by {EXCHANGE_VERSION}",
            hint="run the same version of ROSE in both engines",
        )
    if not 0 < pages <= PAGES_MAX or not 0 < page_bytes <= PAGE_BYTES_MAX:
        raise ConfigError(
            f"a KV pool of {pages} pages of {page_bytes} bytes is not possible", hint="check the pool folder"
        )
    return pool_id, kind.rstrip(b"\0").decode("ascii", "replace"), device_id, pages, page_bytes


def _received(peer: socket.socket) -> Iterator[int]:
    """Yield the descriptors that the serving engine sends. Each is closed when the next is asked for."""
    space = socket.CMSG_SPACE(BATCH_MAX * array.array("i").itemsize)
    while True:
        message, ancillary, flags, _ = peer.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) // descriptors.itemsize * descriptors.itemsize])
        waiting = list(descriptors)
        try:
            if not message or not waiting or flags & socket.MSG_CTRUNC:
                raise Unavailable(
                    "the serving engine ended while it handed over the KV pool, or this process may open no more files",
                    hint="see `ulimit -n`, then start the rollout engine again",
                )
            while waiting:
                descriptor = waiting.pop(0)
                try:
                    yield descriptor
                finally:
                    os.close(descriptor)
        finally:
            for descriptor in waiting:
                os.close(descriptor)
        peer.send(b".")


def _check_folder(folder: Path) -> None:
    status = os.stat(folder, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a folder that only this user may read", hint="run both engines as the same user"
        )


# Both sides


def _create_backend(kind: str, pages: int, page_bytes: int, device: int) -> PageBackend:
    if kind == "memfd":
        return MemfdBackend.create(pages, page_bytes)
    if kind == "cuda":
        return CudaBackend.create(pages, page_bytes, device)
    raise _unknown(kind)


def _adopter(kind: str, device: int, device_id: bytes) -> _Adopter:
    if kind == "memfd":
        return MemfdBackend.adopt
    if kind == "cuda":
        return partial(CudaBackend.adopt, device=device, device_id=device_id)
    raise _unknown(kind)


def _unknown(kind: str) -> ConfigError:
    return ConfigError(f"no KV pool of the kind {kind!r}", hint="take one of: memfd, cuda")


def _check_peer(peer: socket.socket) -> None:
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ConfigError(f"a process of user {uid} is at the pool's socket", hint="run both engines as the same user")


def _listen(folder: Path) -> socket.socket:
    """Return the pool's socket. One that an engine left behind is replaced: the ledger says that none serves."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with suppress(FileNotFoundError):
            os.unlink(folder / SOCKET_NAME)
        with _FolderPath(folder) as path:
            listener.bind(f"{path}/{SOCKET_NAME}")
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise Unavailable(
            f"no socket for the KV pool at {folder}: {error.strerror}", hint="name another folder for the pool"
        ) from error
    return listener


class _FolderPath:
    """A short path of a folder: a socket's address has 108 bytes, and folders can be deeper."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> str:
        self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._descriptor}"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
