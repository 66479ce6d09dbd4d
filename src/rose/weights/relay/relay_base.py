"""The seam between the chain of weight versions and the store of its bytes: put once, read ranges, list, delete.

A relay knows nothing of versions, manifests or tensors, and may lose everything it holds; `weights.chain` handles both.
In return every relay keeps the same few promises, checked by one contract suite:

- a key is written once: `put_new` on a key that exists raises `KeyExists` and changes nothing;
- a value appears whole or not at all, also when its writer dies halfway, and what was read once reads the same again;
- a missing key is `KeyMissing`, never an empty value; a range outside the value is refused, never cut short;
- no room is `RelayFull`, and leaves what is there as it was;
- everything else that fails is `Unavailable`: the call may or may not have happened, and may be tried again.

Calls block; a relay is safe to share between threads. Keys look like paths, such as
`run/e1763258031/v0000000007/delta.0000/manifest`. A key is never also the folder of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rose.errors import RequestRefused, Unavailable

Buffer = bytes | bytearray | memoryview
Buffers = Iterable[Buffer]

KEY_CHARACTERS_MAX = 512
SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}"
_KEY = re.compile(rf"{SEGMENT}(?:/{SEGMENT})*")


class KeyExists(RequestRefused):
    """The key was written before; nothing was changed."""

    def __init__(self, key: str) -> None:
        super().__init__(f"`{key}` is already in the relay, and keys are written once")


class KeyMissing(RequestRefused):
    """There is no such key: never written, deleted, or lost by the relay."""

    def __init__(self, key: str) -> None:
        super().__init__(f"`{key}` is not in the relay")


class RangeRefused(RequestRefused):
    """The range does not lie within the value."""

    def __init__(self, key: str, start: int, stop: int | None, size: int) -> None:
        super().__init__(f"`{key}` has {size} bytes, so there is no range {start}:{'' if stop is None else stop}")
        self.size_bytes = size


class RelayFull(Unavailable):
    """The value does not fit; nothing was changed."""


@dataclass(frozen=True, slots=True, order=True)
class RelayEntry:
    key: str
    size_bytes: int


class Relay(Protocol):
    """A store of values under keys."""

    def put_new(self, key: str, buffers: Buffers) -> int:
        """Store the buffers as one value and return its size. If `buffers` raises, that passes, and nothing is stored.

        Each buffer is valid until the next is asked for.
        """

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of the value from `start` up to `stop`, or to its end."""

    def list(self, prefix: str = "") -> Sequence[RelayEntry]:
        """Return what lies below the folder `prefix` (everything if it is empty), in order of keys."""

    def delete(self, key: str) -> bool:
        """Delete a value; return False if there was none. A concurrent reader gets all of it or an error."""

    def close(self) -> None:
        """Release files and connections; stored values stay."""


def is_key(key: str) -> bool:
    return len(key) <= KEY_CHARACTERS_MAX and _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    if not is_key(key):
        raise RequestRefused(
            f"`{key[:80]}` is not a key of a relay",
            hint="use letters, digits and . _ = - between slashes, not beginning with a dot",
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return a prefix without the optional slash at its end."""
    return check_key(prefix.removesuffix("/")) if prefix else ""


def is_below(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(f"{prefix}/")


def check_range(key: str, start: int, stop: int | None, size: int) -> tuple[int, int]:
    """Return the range with its end filled in."""
    end = size if stop is None else stop
    if not 0 <= start <= end <= size:
        raise RangeRefused(key, start, stop, size)
    return start, end
