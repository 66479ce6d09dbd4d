"""Finds and ends every process that a kit has started, directly or not.

Engines start processes in sessions of their own, and some outlive the process that started them. All of them inherit
the environment, so the kit puts a mark there. vLLM's processes rename themselves, which would overwrite what the kernel
shows of the environment; SPT_NOENV keeps them from it. Descendants are counted as well, whatever they did to their
environment.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "ROSE_VERIFY_RUN"
GONE_S, POLL_S = 10.0, 0.05


def marked_environment(mark: str) -> dict[str, str]:
    """Return the variables by which the processes of one kit are found."""
    return {MARK_VARIABLE: mark, "SPT_NOENV": "1"}


def processes_of(mark: str, parent: int | None = None) -> set[int]:
    """Return the living processes with this mark, and the descendants of a process; this one is not among them."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with suppress(OSError, IndexError, ValueError):
            fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            parents[int(path.name)] = int(fields[1])
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                marked.add(int(path.name))
    found = marked | (_descendants(parents, parent) if parent is not None else set())
    return found - {os.getpid()}


def _descendants(parents: dict[int, int], ancestor: int) -> set[int]:
    found: set[int] = set()
    while more := {process for process, parent in parents.items() if parent in found | {ancestor}} - found:
        found |= more
    return found


def end_processes(mark: str, parent: int | None = None) -> set[int]:
    """Kill every process of a kit, and wait until all are gone. Return those that are still there."""
    deadline_s = time.monotonic() + GONE_S
    while (left := processes_of(mark, parent)) and time.monotonic() < deadline_s:
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(POLL_S)
    return left
