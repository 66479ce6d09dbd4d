"""The process that speaks to a Mooncake Store, so that only it dies when the library does.

It wraps the store's raw calls (`DirectRelay`) and serves them like any other relay over a socket on loopback:

- a put onto an existing key reports success and keeps the old value. So every value begins with its writer's mark,
  which is read back after the put: another mark means that another writer was first. So no value is empty either.
- values are evicted when memory gets scarce. Ours are pinned hard, so a full store says so instead.
- calls fail for reasons that pass (a holder that left, a lease that ran out): they are repeated for a few seconds.

    python -m rose.weights.relay.mooncake_client serve MASTER METRICS     the client; reads a secret from its input
    python -m rose.weights.relay.mooncake_client hold MASTER BYTES        a holder: gives memory to the store
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rose.errors import Unavailable
from rose.weights.relay.relay_base import (
    Buffer,
    Buffers,
    KeyExists,
    KeyMissing,
    RelayEntry,
    RelayFull,
    check_key,
    check_prefix,
    check_range,
    is_below,
)
from rose.weights.relay.relay_server import RelayServer

MARK_BYTES = 32
STAGING_BYTES = 16 << 20  # the library's own buffer, which our calls do not use
REPEAT_S = 8.0  # longer than the store needs to notice that a holder is gone
FULL_REPEAT_S = 1.0
LISTING_S = 10.0
LISTING_BYTES_MAX = 64 << 20  # some hundred thousand keys

OK, NO_SPACE, MISSING = 0, -200, -704
PASSING = {-703: "being written", -707: "lease expired", -800: "transfer failed", -900: "master does not answer"}


def connect(master: str, give_bytes: int) -> Any:
    """Return a store that is set up, to be kept for the life of the process: closing it crashes."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    host = socket.gethostbyname(master.rpartition(":")[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only asks which of our addresses would be used
        local = "127.0.0.1" if host.startswith("127.") else str(probe.getsockname()[0])
    code = store.setup(local, "P2PHANDSHAKE", give_bytes, STAGING_BYTES, "tcp", "", master)
    if code != OK:
        raise Unavailable(f"the Mooncake master at {master} did not take this process: code {code}")
    return store


class DirectRelay:
    """A relay on the library's calls, in this process."""

    def __init__(self, store: Any, metrics: str) -> None:
        from mooncake.store import ReplicateConfig

        self._store = store
        self._metrics = metrics
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True

    def put_new(self, key: str, buffers: Buffers) -> int:
        check_key(key)
        if self._value_bytes(key) is not None:
            raise KeyExists(key)
        mark = os.urandom(MARK_BYTES)
        value = bytearray(mark)
        for buffer in buffers:
            value += memoryview(buffer).cast("B")
        array = np.frombuffer(value, np.uint8)
        code = self._repeat(lambda: self._store.put_from(key, array.ctypes.data, array.nbytes, self._pinned))
        if code == NO_SPACE:
            hint = "give the store more or larger holders, or let the trainer keep fewer versions"
            raise RelayFull(f"no room for {array.nbytes} bytes in the Mooncake Store", hint=hint)
        self._check(key, code)
        if bytes(self._read(key, 0, MARK_BYTES)) != mark:
            raise KeyExists(key)
        return len(value) - MARK_BYTES

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        check_key(key)
        size = self._value_bytes(key)
        if size is None:
            raise KeyMissing(key)
        start, stop = check_range(key, start, stop, size - MARK_BYTES)
        return self._read(key, MARK_BYTES + start, stop - start) if start < stop else b""

    def list(self, prefix: str = "") -> Sequence[RelayEntry]:
        prefix = check_prefix(prefix)
        try:
            with urllib.request.urlopen(f"http://{self._metrics}/get_all_keys", timeout=LISTING_S) as response:
                keys = response.read(LISTING_BYTES_MAX).decode().split()
        except (OSError, urllib.error.URLError, ValueError) as error:
            raise Unavailable(f"the Mooncake master does not list its keys at {self._metrics}: {error}") from error
        sizes = {key: self._value_bytes(key) for key in keys if is_below(key, prefix)}
        return sorted(RelayEntry(key, size - MARK_BYTES) for key, size in sizes.items() if size is not None)

    def delete(self, key: str) -> bool:
        # Forced: a value that was just read is leased, and would stay for a minute.
        code = self._repeat(lambda: self._store.remove(check_key(key), True))
        if code == MISSING:
            return False
        self._check(key, code)
        return True

    def close(self) -> None:
        """Do nothing: closing the store with a call in flight would end the process."""

    def _value_bytes(self, key: str) -> int | None:
        size = self._repeat(lambda: self._store.get_size(key))
        if size == MISSING:
            return None
        self._check(key, size)
        return size

    def _read(self, key: str, start: int, count: int) -> Buffer:
        array = np.empty(count, np.uint8)
        address = array.ctypes.data
        self._check(key, self._store.register_buffer(address, count))
        try:
            read = self._repeat(
                lambda: self._store.get_into_ranges([address], [[key]], [[[0]]], [[[start]]], [[[count]]])[0][0][0]
            )
        finally:
            self._store.unregister_buffer(address)
        self._check(key, read)
        if read != count:
            raise Unavailable(f"{read} of {count} bytes of `{key}` came from the Mooncake Store")
        return array.data

    def _repeat(self, call: Callable[[], int]) -> int:
        """Call until the result is not of a kind that passes, or the time is up."""
        began_s = time.monotonic()
        wait_s = 0.05
        while True:
            code = call()
            limit_s = REPEAT_S if code in PASSING else FULL_REPEAT_S if code == NO_SPACE else 0.0
            if time.monotonic() - began_s + wait_s > limit_s:
                return code
            time.sleep(wait_s)
            wait_s = min(1.0, 2 * wait_s)

    def _check(self, key: str, code: int) -> None:
        if code == MISSING:
            raise KeyMissing(key)
        if code < 0:
            raise Unavailable(f"the Mooncake Store failed at `{key}`: code {code}, {PASSING.get(code, 'see its log')}")


def main(arguments: Sequence[str]) -> int:
    task, master, argument = arguments
    _die_with_parent()
    if task == "hold":
        store = connect(master, int(argument))
        print("ready", flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        del store
        os._exit(0)
    secret = sys.stdin.buffer.readline().strip()
    served = RelayServer(DirectRelay(connect(master, 0), argument), secret)
    print(f"ready {served.address}", flush=True)
    sys.stdin.buffer.read()  # until the parent closes it or dies
    os._exit(0)  # without the library's own cleanup, which can crash


def _die_with_parent() -> None:
    """End this process when its parent ends, however that happens."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
