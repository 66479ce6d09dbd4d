"""A relay on a folder: a disk or tmpfs of this machine, or one that all nodes mount. The default.

A value is written under a temporary name, flushed to the disk, and then linked to its own name. The link makes it
appear whole and refuses to overwrite, in one step of the file system. Temporary files stay locked while their writer
lives, so those of a dead writer are recognised and removed when the folder is opened again. A file that was just made
is not locked yet and may be removed like a dead writer's; its writer notices and makes another.

Reads are maps of the file: nothing is copied before it is used, and a value deleted meanwhile stays readable. Only the
user of the writer may read the files and folders that are made here: weights are worth as much as the training. Users
who share weights put a relay server before the folder, which has roles.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from rose.errors import ConfigError, RequestRefused, Unavailable
from rose.private_files import FILE_MODE, FOLDER_MODE, sync_folder
from rose.weights.relay.relay_base import (
    Buffer,
    Buffers,
    KeyExists,
    KeyMissing,
    RelayEntry,
    RelayFull,
    check_key,
    check_prefix,
    check_range,
)

# No key has a segment that begins with a dot, so this folder is never taken for values.
TEMPORARY = ".writing"
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # never elsewhere, and no wait for a pipe
ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # ELOOP: a symbolic link, which no relay has made
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FilesystemRelay:
    """Values as files below one folder; if `durable`, they survive a power cut."""

    def __init__(self, folder: Path | str, *, durable: bool = True) -> None:
        self.folder = Path(folder)
        self._durable = durable
        self._temporary = self.folder / TEMPORARY
        try:
            self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self._temporary.mkdir(mode=FOLDER_MODE, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise ConfigError(
                f"the relay's folder {self.folder} cannot be used: {error.strerror}",
                hint="name a folder that this user may create and write",
            ) from error

    def put_new(self, key: str, buffers: Buffers) -> int:
        path = self._path(key)
        if path.exists():
            raise KeyExists(key)
        temporary = self._temporary / uuid.uuid4().hex
        try:
            size = self._write(key, temporary, buffers)
            self._publish(key, temporary, path)
            return size
        finally:
            with _translated(key):
                temporary.unlink(missing_ok=True)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        with _translated(key):
            try:
                file = os.open(self._path(key), READ_FLAGS)
            except OSError as error:
                if error.errno in ABSENT:
                    raise KeyMissing(key) from error
                raise
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise KeyMissing(key)
                start, stop = check_range(key, start, stop, status.st_size)
                if start == stop:
                    return b""
                skip = start % mmap.ALLOCATIONGRANULARITY
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # a caller that asks for a range reads all of it
                mapped = mmap.mmap(file, stop - start + skip, flags, mmap.PROT_READ, offset=start - skip)
                return memoryview(mapped)[skip:]
            finally:
                os.close(file)

    def list(self, prefix: str = "") -> Sequence[RelayEntry]:
        prefix = check_prefix(prefix)
        with _translated(prefix or "all keys"):
            return sorted(self._walk(self.folder / prefix, prefix))

    def delete(self, key: str) -> bool:
        path = self._path(key)
        with _translated(key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return False
        self._prune(path.parent)
        return True

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _path(self, key: str) -> Path:
        return self.folder / check_key(key)

    def _write(self, key: str, temporary: Path, buffers: Buffers) -> int:
        size = 0
        with _translated(key):
            file = _locked(temporary)
        try:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                size += len(view)
                with _translated(key):
                    while view:
                        view = view[os.write(file, view) :]
            with _translated(key):
                if self._durable:
                    os.fsync(file)
        finally:
            os.close(file)
        return size

    def _publish(self, key: str, temporary: Path, path: Path) -> None:
        with _translated(key):
            while True:
                try:
                    self._make_folder(path.parent)
                except (FileExistsError, NotADirectoryError) as error:
                    raise RequestRefused(f"`{key}` lies below another key; a key is never also a folder") from error
                try:
                    os.link(temporary, path)
                    break
                except FileExistsError as error:
                    raise KeyExists(key) from error
                except FileNotFoundError:
                    # A delete pruned the folder between the two calls, or another process removed the temporary file.
                    if not temporary.exists():
                        what = f"`{key}` was removed from the relay's folder while it was written"
                        raise Unavailable(what) from None
            if self._durable:
                sync_folder(path.parent)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents, durably and for this user only; `parents=True` would open the parents."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        if self._durable:
            sync_folder(folder.parent)

    def _walk(self, folder: Path, prefix: str) -> Iterator[RelayEntry]:
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(Path(entry.path), key)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                    yield RelayEntry(key, entry.stat(follow_symlinks=False).st_size)

    def _prune(self, folder: Path) -> None:
        """Remove folders that the last delete left empty."""
        while folder != self.folder:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    def _sweep(self) -> None:
        """Remove what dead writers left. A living writer holds the lock of its file."""
        for path in self._temporary.iterdir():
            with contextlib.suppress(OSError):
                file = os.open(path, READ_FLAGS)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                finally:
                    os.close(file)


def _locked(path: Path) -> int:
    """Open a new file, locked until it is closed, so that no sweep removes it."""
    while True:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # a sweep holds it for a moment only
            if os.fstat(file).st_nlink:
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


@contextlib.contextmanager
def _translated(key: str) -> Iterator[None]:
    """Translate errors of the file system. Wraps nothing else: an error of the caller's buffers passes as it is."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            hint = "free space there, or let the trainer keep fewer versions"
            raise RelayFull(f"no room for `{key}` in the relay's folder: {error.strerror}", hint=hint) from error
        raise Unavailable(f"the relay's folder failed at `{key}`: {error.strerror or error}") from error
