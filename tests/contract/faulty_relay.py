"""A relay that misbehaves on order: requests get lost, answers get lost, calls come late, bits flip.

`faults` decides, call by call, by returning a `Fault`; the relay behind it stays what it is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from rose.errors import Unavailable
from rose.weights.relay.relay_base import Buffer, Buffers, Relay, RelayEntry


class Fault(enum.Enum):
    NONE = "nothing happens to it"
    REQUEST_LOST = "it never arrives"
    REPLY_LOST = "it is done, and the caller does not learn of it"
    LATE = "it is done, but only when the next call comes; the caller has given up by then"
    CORRUPT = "what is read has a flipped bit"


class FaultyRelay:
    def __init__(self, inner: Relay, faults: Callable[[str, str], Fault]) -> None:
        self.inner = inner
        self.faults = faults
        self.calls: list[tuple[str, str, Fault]] = []
        self._late: list[Callable[[], object]] = []

    def put_new(self, key: str, buffers: Buffers) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        return self._call("put_new", key, lambda: self.inner.put_new(key, [data]))

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        return self._call("get", key, lambda: self.inner.get(key, start, stop))

    def list(self, prefix: str = "") -> Sequence[RelayEntry]:
        return self._call("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, key: str) -> bool:
        return self._call("delete", key, lambda: self.inner.delete(key))

    def close(self) -> None:
        self.inner.close()

    def _call(self, name: str, key: str, call: Callable):
        self._catch_up()
        fault = self.faults(name, key)
        self.calls.append((name, key, fault))
        match fault:
            case Fault.REQUEST_LOST:
                raise Unavailable("the request was lost")
            case Fault.REPLY_LOST:
                call()
                raise Unavailable("the answer was lost")
            case Fault.LATE:
                self._late.append(call)
                raise Unavailable("no answer in time")
            case Fault.CORRUPT:
                return _flipped(call())
        return call()

    def _catch_up(self) -> None:
        late, self._late = self._late, []
        for call in late:
            try:
                call()
            except Exception:  # nobody waits for its outcome any more
                continue


def _flipped(result):
    """One bit of what was read is wrong; other results cannot be."""
    if not isinstance(result, bytes | bytearray | memoryview) or not len(result):
        return result
    data = bytearray(result)
    data[len(data) // 2] ^= 0x10
    return data
