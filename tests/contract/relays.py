"""The relays that the contract suite runs on. To put another under contract, add its kind here.

A kind knows how to set up a store of its own, how a client reaches it (also from another process), how the store
dies and comes back, and how to get one with little room.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.opening import RelayAccess, open_relay
from rose.weights.relay.relay_base import Relay

SECRET = b"a secret of the tests, long enough"
ROOM_BYTES = 1 << 20  # of a store with little room

# Starts a program whose files may not grow beyond a size: a full disk, without mounting one.
LIMITED = (
    "import os, resource, sys\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)


class Store:
    """One store and its clients. The base is the memory relay: no process, nothing that outlives it."""

    name = "memory"
    address: str | None = None  # for clients in other processes, if there can be any
    can_restart = False
    access = RelayAccess()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._relay: Relay = MemoryRelay()
        self._opened: list[Relay] = []

    def open(self) -> Relay:
        if self.address is None:
            return self._relay
        self._opened.append(open_relay(self.address, self.access))
        return self._opened[-1]

    def restart(self) -> None:
        """Kill whatever serves, without warning, and start it again."""

    def small(self) -> contextlib.AbstractContextManager[Relay]:
        """A relay with room for `ROOM_BYTES`."""
        return contextlib.nullcontext(MemoryRelay(capacity_bytes=ROOM_BYTES))

    def leave(self) -> None:
        """Close the clients."""
        while self._opened:
            self._opened.pop().close()

    def close(self) -> None:
        self.leave()


class FolderStore(Store):
    name = "filesystem"
    can_restart = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.address = str(folder / "relay")

    @contextlib.contextmanager
    def small(self) -> Iterator[Relay]:
        import resource

        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, before[1]))
        try:
            yield open_relay(str(self.folder / "small"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


class HttpStore(Store):
    name = "http"
    can_restart = True
    access = RelayAccess(secret=SECRET)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._port = 0
        self._start()

    def _start(self) -> None:
        self._process, line = start_server(self.folder / "relay", f"127.0.0.1:{self._port}")
        self.address = server_address(line)
        self._port = int(self.address.rpartition(":")[2])

    def restart(self) -> None:
        self._process.kill()
        self._process.wait()
        self._start()

    @contextlib.contextmanager
    def small(self) -> Iterator[Relay]:
        process, line = start_server(self.folder / "small", "127.0.0.1:0", "-c", LIMITED, str(ROOM_BYTES))
        relay = open_relay(server_address(line), self.access)
        try:
            yield relay
        finally:
            relay.close()
            process.kill()
            process.wait()

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.wait()


def start_server(folder: Path, listen: str, *before: str) -> tuple[subprocess.Popen[str], str]:
    """The server's process, and the line it says when it listens."""
    secret = folder.parent / "secret"
    secret.write_bytes(SECRET + b"\n")
    command = ["-m", "rose", "relay", "up", "--folder", str(folder), "--secret-file", str(secret), "--listen", listen]
    process = subprocess.Popen([sys.executable, *before, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert "://" in line
    return process, line


def server_address(line: str) -> str:
    """Return the address in the line that `rose relay up` prints."""
    return line.split(" at ")[-1].split(";")[0]


class ObjectStore(Store):
    name = "object"
    can_restart = False  # the store is a mock that lives in one process's memory; real ones do not lose what they acked

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("obstore", reason="needs the extra `object`: pip install 'rose-rl[object]'")
        pytest.importorskip("moto", reason="needs a mock of S3: pip install 'moto[s3]' flask flask-cors")
        super().__init__(folder)
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        bucket = f"weights-{uuid.uuid4().hex}"  # what the mock holds outlives its server
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT"), timeout=30).close()
        options = {
            "endpoint": endpoint,
            "access_key_id": "x",
            "secret_access_key": "y",
            "region": "us-east-1",
            "allow_http": "true",
            "virtual_hosted_style_request": "false",
        }
        self.access = RelayAccess(object_options=tuple(options.items()))
        self.address = f"s3://{bucket}/of/tests"

    def small(self) -> contextlib.AbstractContextManager[Relay]:
        pytest.skip("an object store has no size of its own that a test could reach")

    def close(self) -> None:
        super().close()
        self._server.stop()


class MooncakeStore(Store):
    name = "mooncake"
    can_restart = False  # a Mooncake Store that restarts has lost everything: see test_mooncake.py

    def __init__(self, folder: Path) -> None:
        if why := mooncake_is_missing():
            pytest.skip(why)
        super().__init__(folder)
        from rose.weights.relay.mooncake import MooncakeCluster

        self._cluster = MooncakeCluster(holders=1, holder_bytes=256 << 20, log_folder=folder)
        self.address = f"mooncake://{self._cluster.address}"

    @contextlib.contextmanager
    def small(self) -> Iterator[Relay]:
        from rose.weights.relay.mooncake import MooncakeCluster

        with MooncakeCluster(holders=1, holder_bytes=16 << 20, log_folder=self.folder) as cluster:
            relay = open_relay(f"mooncake://{cluster.address}")
            try:
                # 16 MiB is the least a holder takes: leave about as much as the other kinds have.
                relay.put_new("filler", [bytes((14 << 20) - 32)])
                yield relay
            finally:
                relay.close()

    def close(self) -> None:
        super().close()
        self._cluster.close()


def mooncake_is_missing() -> str | None:
    """Why Mooncake cannot be used here; asked in another process, since its library may fail in its own ways."""
    command = [sys.executable, "-c", "from mooncake.store import MooncakeDistributedStore"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if told.returncode == 0:
        return None
    last = (told.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
    return f"needs the extra `mooncake` and its system libraries (make system-packages): {last}"


QUICK = [Store, FolderStore, HttpStore]
SLOW = [ObjectStore, MooncakeStore]
KINDS = [pytest.param(kind, id=kind.name) for kind in QUICK] + [
    pytest.param(kind, id=kind.name, marks=pytest.mark.slow) for kind in SLOW
]


def run_elsewhere(code: str, store: Store, *arguments: str) -> subprocess.Popen[str]:
    """Run code in another process, where `relay` is a client of the store and `arguments` are `sys.argv[2:]`."""
    assert store.address is not None
    head = (
        "import os, signal, sys, time\n"
        "from rose.weights.relay.opening import RelayAccess, open_relay\n"
        f"relay = open_relay(sys.argv[1], {store.access!r})\n"
    )
    command = [sys.executable, "-c", head + code, store.address, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy())
