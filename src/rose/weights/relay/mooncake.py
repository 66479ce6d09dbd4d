"""A relay on a Mooncake Store, the store that the paper used, and a local cluster of one. Needs the extra `mooncake`.

It is a cache for values in the memory of other processes: it can lose everything, it has no passwords, and its library
can crash the process it is in. So the library lives in a process of its own (`mooncake_client`), which is started again
when it is gone; calls have deadlines of ours; and a master that is not on this machine is refused unless the network is
declared as trusted. Over TCP it is slower than our own server; its point is RDMA.

    mooncake://HOST:PORT            the master's address; its metrics, which list the keys, are at port 9003
    mooncake://HOST:PORT/METRICS    or at this port

`MooncakeCluster` starts a master and the holders that give it memory; all end with this process. Holders are processes
of their own, so that no trainer or worker takes values along when it leaves. Leases are long, since a read that
outlives its lease is thrown away; a holder that is gone is noticed soon.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rose.errors import ConfigError, Unavailable
from rose.weights.relay.relay_api import split_address
from rose.weights.relay.relay_base import Buffer, Buffers, RelayEntry
from rose.weights.relay.relay_client import HttpRelay

METRICS_PORT = 9003
START_S = 30.0  # the library alone takes seconds to load on a busy machine
PROBE_S = 2.0  # setting up against a master that is not there would block for 90 s
SILENCE_S = 45.0  # more than the client's own repeats
CLIENT = "rose.weights.relay.mooncake_client"
LEASE_S = 120
HOLDER_TTL_S = 5
PR_SET_PDEATHSIG = 1
HOLDER_BYTES_MIN = 16 << 20  # the smallest segment that the store takes


class MooncakeRelay:
    """Values in a Mooncake Store, by way of a client process."""

    def __init__(self, address: str, *, trusted_network: bool = False) -> None:
        master, _, metrics_port = address.partition("/")
        self._host, self._port = split_address(master)
        self._metrics = f"{self._host}:{metrics_port or METRICS_PORT}"
        split_address(self._metrics)
        if not trusted_network:
            check_loopback(self._host)
        self._process: subprocess.Popen[bytes] | None = None
        self._relay: HttpRelay | None = None
        self._lock = threading.Lock()

    def put_new(self, key: str, buffers: Buffers) -> int:
        return self._client().put_new(key, buffers)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        return self._client().get(key, start, stop)

    def list(self, prefix: str = "") -> Sequence[RelayEntry]:
        return self._client().list(prefix)

    def delete(self, key: str) -> bool:
        return self._client().delete(key)

    def close(self) -> None:
        with self._lock:
            self._stop()

    @property
    def process_id(self) -> int | None:
        """Return the id of the client process, while there is one."""
        return None if self._process is None else self._process.pid

    def _client(self) -> HttpRelay:
        """Return the client, started if there is none or it has died."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()
            if self._relay is None:
                self._relay = self._start()
            return self._relay

    def _start(self) -> HttpRelay:
        try:
            socket.create_connection((self._host, self._port), timeout=PROBE_S).close()
        except OSError as error:
            raise Unavailable(
                f"there is no Mooncake master at {self._host}:{self._port}: {error}",
                hint="start one with: rose relay up --backend mooncake",
            ) from error
        command = [sys.executable, "-m", CLIENT, "serve", f"{self._host}:{self._port}", self._metrics]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        secret = secrets.token_hex(16).encode()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(secret + b"\n")
                self._process.stdin.flush()
            return HttpRelay(ready_line(self._process.stdout, START_S), secret, silence_s=SILENCE_S)
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._relay is not None:
            self._relay.close()
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process.wait()
        self._relay = self._process = None


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
                self.start_holder(number, holder_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MooncakeCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start_holder(self, number: int, holder_bytes: int) -> None:
        """Start a process that gives the store so much memory, and wait until it does."""
        command = [sys.executable, "-m", CLIENT, "hold", self.master, str(holder_bytes)]
        holder = self._start(f"holder-{number}", command, subprocess.PIPE)
        assert holder.stdout is not None
        ready_line(holder.stdout, START_S)

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
        process = self._start("master", command, subprocess.DEVNULL)
        url, until_s = f"http://{host}:{self._metrics_port}/health", time.monotonic() + START_S
        while time.monotonic() < until_s:
            if process.poll() is not None:
                hint = "run mooncake_master by hand to see what it lacks; often system libraries (make system-packages)"
                raise Unavailable(f"mooncake_master left with code {process.returncode}", hint=hint)
            with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=1) as response:
                if json.load(response).get("service_ready"):
                    return
            time.sleep(0.1)
        raise Unavailable(f"mooncake_master was not ready after {START_S:.0f} s")

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


def _die_with_parent() -> None:
    """Let the kernel end the child when the thread that started it is gone; runs in the child before its program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def ready_line(pipe: IO[bytes], limit_s: float) -> str:
    """Return what follows "ready" on its line; the library may print lines of its own before it."""
    until_s = time.monotonic() + limit_s
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while time.monotonic() < until_s and selector.select(until_s - time.monotonic()):
            byte = pipe.raw.read(1) if hasattr(pipe, "raw") else pipe.read(1)
            if not byte:
                hint = "install it with: pip install 'rose-rl[mooncake]', and the system libraries that it names"
                raise Unavailable("the Mooncake client could not start", hint=hint)
            if byte != b"\n":
                line += byte
                continue
            if line.startswith(b"ready"):
                return line.decode().removeprefix("ready").strip()
            line = b""
    raise Unavailable(f"the Mooncake client was not ready after {limit_s:.0f} s")


def check_loopback(host: str) -> None:
    """Raise ConfigError if a host is not this machine."""
    try:
        addresses = {item[4][0] for item in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"`{host}` is not a known host: {error}") from error
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise ConfigError(
            f"Mooncake at {host} is not on this machine, and has no passwords: any program there may change values",
            hint="set relay.trusted_network: true only if no other users are on that network",
        )
