"""The processes that are measured, and what the kernel says they have used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
TOKENS = {f"ROSE_{role}_TOKEN": f"a-token-of-{role}" for role in ("AGENT", "WORKER", "TRAINER", "OPERATOR")}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def rose(*words: str) -> list[str]:
    return [sys.executable, "-m", "rose", *words]


def stub(gateway_url: str, model: str, delay_ms: float) -> list[str]:
    return [sys.executable, "-m", "doors.stub", gateway_url, model, f"{delay_ms:g}"]


@contextmanager
def process(command: Sequence[str], ready: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, from the line that says it is ready; with the address in that line."""
    paths = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent / "src")])
    variables = os.environ | TOKENS | {"PYTHONPATH": paths}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    try:
        assert running.stdout is not None
        for line in running.stdout:
            if ready in line:
                yield running, line.split()[-1].removesuffix("/v1")
                return
        raise SystemExit(f"`{' '.join(command)}` did not start")
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait()


def cpu_s(pid: int) -> float:
    """User and system time of one process so far, its children not counted."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S
