"""Who runs in a run's folder: one process at a time, by a lock that the kernel gives back however that process ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from rose.errors import ConfigError

LOCK_NAME = "run.lock"
TRIES, PAUSE_S = 5, 0.02
"""Who only looks whether it is held has it for an instant, which must not pass for a run."""


class RunLock:
    """Held until it is closed. Raises ConfigError while another process has it."""

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_NAME
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened: {error.strerror}", hint="see to the rights on it") from error
        try:
            _lock(self._file)
        except OSError as error:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            os.close(self._file)
            who = f", in process {holder}" if holder else ""
            hint = "wait for its end, or stop it with Ctrl-C there"
            raise ConfigError(f"the run in {folder} is still going on{who}", hint=hint) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_held(folder: Path) -> bool:
    """Whether a run goes on in this folder."""
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def _lock(file: int) -> None:
    for tries_left in reversed(range(TRIES)):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not tries_left:
                raise
            time.sleep(PAUSE_S)
