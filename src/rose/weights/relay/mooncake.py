"""A relay on a Mooncake Store, the store that the paper used. Needs the extra `mooncake`.

It is a cache for values in the memory of other processes: it can lose everything, it has no passwords, and its library
can crash the process it is in. So the library lives in a process of its own (`mooncake_client`), which is started
again when it is gone; calls have deadlines of ours; and a master that is not on this machine is refused unless the
network is declared as trusted. What TCP it speaks is slower than our own server's; its point is RDMA.

    mooncake://HOST:PORT            the master's address; its metrics, which list the keys, are at port 9003
    mooncake://HOST:PORT/METRICS    or at this port
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from rose.errors import ConfigError, Unavailable
from rose.weights.relay.base import Buffer, Chunks, Entry
from rose.weights.relay.tcp import TcpRelay, split_address

METRICS_PORT = 9003
START_S = 30.0  # the library alone takes seconds to load on a busy machine
KNOCK_S = 2.0  # setting up against a master that is not there would block for 90 s
SILENCE_S = 45.0  # more than the client's own repeats
CLIENT = "rose.weights.relay.mooncake_client"


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
        self._relay: TcpRelay | None = None
        self._lock = threading.Lock()

    def put_new(self, key: str, chunks: Chunks) -> int:
        return self._client().put_new(key, chunks)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        return self._client().get(key, start, stop)

    def list(self, prefix: str = "") -> Sequence[Entry]:
        return self._client().list(prefix)

    def delete(self, key: str) -> bool:
        return self._client().delete(key)

    def close(self) -> None:
        with self._lock:
            self._stop()

    @property
    def process_id(self) -> int | None:
        """Of the client, while there is one."""
        return None if self._process is None else self._process.pid

    def _client(self) -> TcpRelay:
        """The client, started if there is none or it has died."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()
            if self._relay is None:
                self._knock()
                self._start()
            assert self._relay is not None
            return self._relay

    def _knock(self) -> None:
        try:
            socket.create_connection((self._host, self._port), timeout=KNOCK_S).close()
        except OSError as error:
            raise Unavailable(
                f"there is no Mooncake master at {self._host}:{self._port}: {error}",
                hint="start one with: rose relay up --backend mooncake",
            ) from error

    def _start(self) -> None:
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
            self._relay = TcpRelay(ready_line(self._process.stdout, START_S), secret, silence_s=SILENCE_S)
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


def ready_line(pipe: IO[bytes], limit_s: float) -> str:
    """What follows "ready" on the line that says so; the library may print lines of its own before it."""
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
    try:
        addresses = {item[4][0] for item in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"`{host}` is not a known host: {error}") from error
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise ConfigError(
            f"Mooncake at {host} is not on this machine, and has no passwords: anybody could read and replace values",
            hint="set relay.trusted_network: true only if nobody else is on that network",
        )
