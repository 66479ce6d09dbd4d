"""A relay in this process: for tests, for simulation, and for a trainer and workers that share a process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

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


class MemoryRelay:
    """Values in a dict; `capacity_bytes` bounds their sum."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._values: dict[str, bytearray] = {}
        self._lock = threading.Lock()

    def put_new(self, key: str, buffers: Buffers) -> int:
        if check_key(key) in self._values:
            raise KeyExists(key)
        data = bytearray()
        for buffer in buffers:
            data += memoryview(buffer).cast("B")
        with self._lock:
            if key in self._values:
                raise KeyExists(key)
            if self._capacity_bytes is not None and self._used_bytes + len(data) > self._capacity_bytes:
                raise RelayFull(f"the relay holds at most {self._capacity_bytes} bytes; {len(data)} more do not fit")
            self._values[key] = data
            self._used_bytes += len(data)
        return len(data)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        data = self._values.get(check_key(key))
        if data is None:
            raise KeyMissing(key)
        start, stop = check_range(key, start, stop, len(data))
        return memoryview(data).toreadonly()[start:stop]

    def list(self, prefix: str = "") -> Sequence[RelayEntry]:
        prefix = check_prefix(prefix)
        with self._lock:
            return sorted(RelayEntry(key, len(data)) for key, data in self._values.items() if is_below(key, prefix))

    def delete(self, key: str) -> bool:
        with self._lock:
            data = self._values.pop(check_key(key), None)
            self._used_bytes -= len(data or b"")
        return data is not None

    def close(self) -> None:
        """Do nothing: the values live as long as this object."""
