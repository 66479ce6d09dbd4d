"""The starter of a process: it dies with its parent, and has its priority and cores."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

from tests.unit.run.test_processes import SLEEPER, is_alive, until


def test_children_die_with_a_run_that_is_killed(tmp_path):
    program = f"""
import asyncio, os, signal, sys
from pathlib import Path
from rose.run.processes import Command, Processes
async def main():
    processes = Processes(Path({str(tmp_path)!r}), {{}}, print)
    await processes.prepare()
    running = await processes.start(Command("x", ("-c", {SLEEPER!r}), 0, (), {{"url": "ready at (http)"}}))
    print(running.process_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    child = int(done.stdout.split()[-1])
    asyncio.run(until(lambda: not is_alive(child)))
    assert done.returncode == -signal.SIGKILL


def test_a_child_has_its_priority_and_its_cores():
    core = min(os.sched_getaffinity(0))
    code = "import os; print(os.nice(0), os.sched_getaffinity(0))"
    command = [sys.executable, "-m", "rose.run.child", str(os.getpid()), "3", str(core), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"{os.nice(0) + 3} {{{core}}}"
