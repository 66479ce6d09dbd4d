"""What the kernel knows of processes: who belongs to whom, where they may run, and how long they have run.

Which core is the device's is settled in the first process, which may use all of them; those it starts are told.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CORES = tuple(sorted(os.sched_getaffinity(0)))
DEVICE_CORE = CORES[0]
OTHER_CORES = CORES[1:] or CORES


@contextlib.contextmanager
def may_use(cores: tuple[int, ...]) -> Iterator[None]:
    """Processes that are started inside inherit these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def family(pid: int) -> list[int]:
    """A process and everything it has started, as far as it still runs."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def is_pinned(pid: int, core: int) -> bool:
    with contextlib.suppress(OSError):
        return os.sched_getaffinity(pid) == {core}
    return False


def move(pid: int, cores: tuple[int, ...]) -> None:
    """All threads of a process."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), cores)


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def core_busy_s() -> dict[int, float]:
    """For every core the time in which it was not idle."""
    found = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _idle, _wait, *rest = map(int, numbers)
            found[int(name[3:])] = (user + nice + system + sum(rest[:2])) * TICK_S
    return found


@dataclass(frozen=True, slots=True)
class Cores:
    """Who has which core: the device's engines, and everybody else."""

    device: int
    others: tuple[int, ...]
    engine_pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """How busy cores were. `foreign` is what somebody else than the engines had of the device's core."""

    device: float
    others: float
    foreign: float


class CoreWatch:
    """How busy cores are from now on."""

    def __init__(self, cores: Cores) -> None:
        self._cores, self._begun_s = cores, time.monotonic()
        self._before, self._engines_s = core_busy_s(), sum(map(cpu_s, cores.engine_pids))

    def shares(self) -> Shares:
        now, wall_s = core_busy_s(), time.monotonic() - self._begun_s
        engines = (sum(map(cpu_s, self._cores.engine_pids)) - self._engines_s) / wall_s
        shares = {core: (now[core] - self._before[core]) / wall_s for core in now}
        device = shares[self._cores.device]
        others = sum(shares[core] for core in self._cores.others) / len(self._cores.others)
        return Shares(round(device, 4), round(others, 4), round(max(0.0, device - engines), 4))
