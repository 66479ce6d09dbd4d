"""A device is a set of cores: whether they exist, and how a process binds itself to them.

Core pinning needs Linux. The check is made twice, by the front before it starts an engine, so that the error comes at
once and in one line, and by the kernel when the engine pins itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from rose.config.device import cores_of
from rose.errors import ConfigError

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def check_device(device: str) -> tuple[int, ...]:
    """The cores of a device, all of which this process may use."""
    cores = cores_of(device)
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"a device pins its engine to cores, which needs Linux, and this is {sys.platform}",
            hint="run `rose doctor` to see what works on this machine",
        )
    usable = sorted(os.sched_getaffinity(0))
    missing = [core for core in cores if core not in usable]
    if missing:
        raise ConfigError(
            f"device `{device}` names {_cores(missing)}, but this process may use {_cores(usable)}",
            hint=f"for example --device cpu:{usable[0]}",
        )
    return cores


def thread_environment(cores: tuple[int, ...]) -> dict[str, str]:
    """One thread per core for every numeric library, and none of them spins while it waits."""
    count = str(len(cores))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**dict.fromkeys(names, count), "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


def pin(cores: tuple[int, ...]) -> None:
    """Bind this process to these cores; threads it starts later inherit it."""
    os.sched_setaffinity(0, cores)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent goes, however that happens."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the line above
        os._exit(1)


def _cores(numbers: list[int]) -> str:
    return ("core " if len(numbers) == 1 else "cores ") + ", ".join(map(str, numbers))
