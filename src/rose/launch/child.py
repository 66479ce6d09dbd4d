"""The last step before a process of a run becomes what it is: it ties its life to its parent's, takes its priority and
its cores, and then turns into the command it was given.

    python -m rose.launch.child PARENT_PID NICENESS CORES COMMAND...

A child that is told in this way dies with its parent, however that ends, and everything it starts dies with it.
"""

from __future__ import annotations

import os
import sys

from rose.coserve.device import die_with_parent


def main(parent: str, niceness: str, cores: str, *command: str) -> None:
    die_with_parent(int(parent))
    os.nice(int(niceness))
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    os.execv(command[0], list(command))


if __name__ == "__main__":
    main(*sys.argv[1:])
