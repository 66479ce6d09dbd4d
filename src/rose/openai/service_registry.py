"""Service registry: one private file per running service of this user, by which other commands find it.

An entry holds addresses and perhaps tokens, so only its user can read it. The service keeps a lock on its entry. The
kernel drops that lock when the process ends, however it ends, in any container: an entry that is not locked belongs to
a service that is gone, and is removed by the first reader. A process id alone would not do: another process may have
it by now.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rose.private_files import make_private_folder, write_private

ENTRY_BYTES_MAX = 1 << 16  # an address, a model and a few tokens are less than one kilobyte


def registry_folder(kind: str) -> Path:
    """Return the folder for entries of this kind, such as `devices`, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rose" / kind


@contextmanager
def registered(folder: Path, content: bytes) -> Iterator[Path]:
    """Keep an entry as long as the service runs. A cache that cannot be written is no reason not to serve."""
    path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.json"
    held: int | None = None
    with suppress(OSError):
        make_private_folder(folder)
        held = _write_locked(path, content)
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()
        if held is not None:
            os.close(held)


def entries(folder: Path) -> list[bytes]:
    """Return the entries of running services, in a stable order. Remove entries of services that are gone."""
    contents = []
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError):
            content = _read_if_live(path)
            if content is not None:
                contents.append(content)
    return contents


def _write_locked(path: Path, content: bytes) -> int:
    """Write the entry and return a descriptor that holds its lock. Raise OSError."""
    while True:
        write_private(path, content)
        with suppress(FileNotFoundError):
            held = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(held, fcntl.LOCK_EX)
            if _is_at(path, held):
                return held
            os.close(held)  # a reader found it before it was locked, and removed it


def _read_if_live(path: Path) -> bytes | None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(handle, ENTRY_BYTES_MAX)
        if _is_at(path, handle):
            path.unlink()
        return None
    finally:
        os.close(handle)


def _is_at(path: Path, handle: int) -> bool:
    """Return whether this open file is the one that the path names."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False
