"""Cores, priorities and parents of a device's processes.

A device is a set of cores, and pinning needs Linux. The cores are checked twice: by the front before it starts an
engine, so that the error comes at once, and by the kernel when the engine pins itself. Where there are other cores, the
front keeps off the device's: the kernel likes to wake a process on the core of its sender, and a front that was woken
there by every step took a tenth of the engine's time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rose.config.server_settings import cores_of
from rose.errors import ConfigError

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
READING_NICENESS = 10  # as trainers; more, and others on the core could keep it from giving Python's lock back
# What this process was started with; later it may keep off a device's cores, and still start an engine on them.
USABLE = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()


def check_device(device: str) -> tuple[int, ...]:
    """Return the cores of a device. Raises ConfigError if this process may not use all of them."""
    cores = cores_of(device)
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"a device pins its engine to cores, which needs Linux, and this is {sys.platform}",
            hint="run `rose doctor` to see what works on this machine",
        )
    usable = sorted(USABLE)
    missing = [core for core in cores if core not in usable]
    if missing:
        raise ConfigError(
            f"device `{device}` names {_cores(missing)}, but this process may use {_cores(usable)}",
            hint=f"for example --device cpu:{usable[0]}",
        )
    return cores


def thread_environment(cores: tuple[int, ...]) -> dict[str, str]:
    """Return variables that give every numeric library one thread per core, which does not spin while it waits."""
    count = str(len(cores))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**dict.fromkeys(names, count), "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


def pin(cores: tuple[int, ...]) -> None:
    """Bind this process to these cores; threads it starts later inherit it."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError(f"the engine cannot be pinned to {_cores(list(cores))}: {error.strerror}") from error


def lower_priority() -> None:
    """Give this thread, which only reads weights, a tenth of what others on its cores get; where denied, do nothing."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(READING_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


@contextmanager
def kept_off(cores: tuple[int, ...]) -> Iterator[None]:
    """Keep this process off these cores meanwhile, if there are others."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, (USABLE - set(cores)) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent goes, however that happens."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the line above
        os._exit(1)


def _cores(numbers: list[int]) -> str:
    return ("core " if len(numbers) == 1 else "cores ") + ", ".join(map(str, numbers))
