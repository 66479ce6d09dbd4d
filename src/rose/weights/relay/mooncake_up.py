"""Starts a Mooncake Store on this machine: a master and the holders that give it memory. All end with this process.

Holders are processes of their own, neither in the trainer nor in a worker, so that neither takes values along when it
leaves. Leases are long, since a read that outlives its lease is thrown away; a holder that is gone is noticed soon.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import IO

from rose.errors import ConfigError, Unavailable
from rose.weights.relay.mooncake import CLIENT, START_S, check_loopback, ready_line

LEASE_S = 120
HOLDER_TTL_S = 5
PR_SET_PDEATHSIG = 1
HOLDER_BYTES_MIN = 16 << 20  # the smallest segment that the store takes


class MooncakeCluster:
    """A master and its holders; `address` is what a `MooncakeRelay` takes."""

    def __init__(
        self,
        *,
        holders: int = 2,
        holder_bytes: int = 4 << 30,
        host: str = "127.0.0.1",
        log_folder: Path | None = None,
        trusted_network: bool = False,
    ) -> None:
        if holders < 1 or holder_bytes < HOLDER_BYTES_MIN:
            raise ConfigError(f"a Mooncake Store needs a holder, and every holder {HOLDER_BYTES_MIN} bytes or more")
        if not trusted_network:
            check_loopback(host)
        self.master = f"{host}:{_free_port(host)}"
        self._metrics_port = _free_port(host)
        self.address = f"{self.master}/{self._metrics_port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._log_folder = log_folder
        try:
            self._start_master(host)
            for number in range(holders):
                self._start_holder(number, holder_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MooncakeCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.processes = []

    def _start_master(self, host: str) -> None:
        program = Path(sys.executable).with_name("mooncake_master")
        if not program.exists():
            hint = "pip install 'rose-rl[mooncake]'"
            raise ConfigError("the program mooncake_master is not installed beside this Python", hint=hint)
        flags = {
            "rpc_address": host,
            "rpc_port": self.master.rpartition(":")[2],
            "metrics_host": host,
            "metrics_port": self._metrics_port,
            "rpc_thread_num": 2,
            "logtostderr": "true",
            "default_kv_lease_ttl": f"{LEASE_S}s",
            "client_ttl": HOLDER_TTL_S,
        }
        command = [str(program), *(f"--{name}={value}" for name, value in flags.items())]
        self._start("master", command, subprocess.DEVNULL)
        self._wait_for_master(f"http://{host}:{self._metrics_port}/health")

    def _start_holder(self, number: int, holder_bytes: int) -> None:
        command = [sys.executable, "-m", CLIENT, "hold", self.master, str(holder_bytes)]
        process = self._start(f"holder-{number}", command, subprocess.PIPE)
        assert process.stdout is not None
        ready_line(process.stdout, START_S)

    def _start(self, name: str, command: list[str], output: int) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            log: int | IO[bytes] = subprocess.DEVNULL
            if self._log_folder is not None:
                log = stack.enter_context(open(self._log_folder / f"mooncake-{name}.log", "ab"))
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                preexec_fn=_die_with_parent,
            )
        self.processes.append(process)
        return process

    def _wait_for_master(self, url: str) -> None:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            if self.processes[0].poll() is not None:
                hint = "run mooncake_master by hand to see what it lacks; often system libraries (make system-packages)"
                raise Unavailable(f"mooncake_master left with code {self.processes[0].returncode}", hint=hint)
            with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=1) as answer:
                if json.load(answer).get("service_ready"):
                    return
            time.sleep(0.1)
        raise Unavailable(f"mooncake_master was not ready after {START_S:.0f} s")


def _die_with_parent() -> None:
    """In the child, before its program: the kernel ends it when the thread that started it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])
