"""A Slurm of one node, this machine: its two daemons in the foreground, with folders and ports of a test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rose.openai.http_server import free_port

START_S = 120.0
CONFIGURATION = """
ClusterName=rose
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
KillWait=10
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=60 State=UP
"""
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")


def missing() -> str:
    """Return why there can be no Slurm here; empty if there can."""
    if os.environ.get("ROSE_SLURM") != "1":
        return "`make test-slurm` runs it"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(absent)} is not installed" if absent else "" if os.geteuid() == 0 else "it needs root"


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Slurm; yields the environment that its commands need."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    file = folder / "slurm.conf"
    places = {"controller": free_port(), "daemon": free_port(), "cpus": os.cpu_count(), "folder": folder}
    file.write_text(CONFIGURATION.format(**places))
    environment = os.environ | {"SLURM_CONF": str(file)}
    processes = []
    try:
        for program in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"]):
            log = (folder / f"{program[0]}.log").open("wb")
            with log:
                processes.append(subprocess.Popen(program, stdout=log, stderr=subprocess.STDOUT, env=environment))
        deadline_s = time.monotonic() + START_S
        while "idle" not in _answer(["sinfo", "-h", "-o", "%T"], environment):
            logs = "".join(path.read_text() for path in folder.glob("*.log"))
            assert time.monotonic() < deadline_s and all(each.poll() is None for each in processes), logs
            time.sleep(0.1)
        yield environment
    finally:
        for each in reversed(processes):
            each.terminate()
            try:
                each.wait(60)
            finally:
                each.kill()
                each.wait()


def _answer(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60).stdout
