"""The origin of a run: what a reader of its report must know to judge the figures, and to get them again."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from rose import __version__
from rose.device.os_process import USABLE
from rose.observe.wall_clock import utc_text
from rose.run.run_records import OriginRecord

COMMAND_CHARACTERS_MAX = 4000


def origin_record() -> OriginRecord:
    """Return the record of this process: its version, command and machine, without names of host and user."""
    command = shlex.join(["rose", *sys.argv[1:]])[:COMMAND_CHARACTERS_MAX]
    return OriginRecord(version=__version__, command=command, machine=machine_text(), began_utc=utc_text()[:19] + "Z")


def machine_text() -> str:
    """Return the processor, the cores that this process may use, and the memory."""
    model = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    cores = len(USABLE)
    return f"{model}, {cores} core{'s' if cores != 1 else ''}, {memory_gib:.0f} GiB"
