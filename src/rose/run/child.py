"""Starter of a process of a run: ties its life to its parent's, sets its priority and cores, and executes its command.

    python -m rose.run.child PARENT_PID NICENESS CORES COMMAND...

The kernel kills such a child when its parent ends, however that ends, and everything the child starts dies with it.
"""

from __future__ import annotations

import os
import sys

from rose.device.os_process import die_with_parent


def main(parent: str, niceness: str, cores: str, *command: str) -> None:
    die_with_parent(int(parent))
    os.nice(int(niceness))
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    os.execv(command[0], list(command))


if __name__ == "__main__":
    main(*sys.argv[1:])
