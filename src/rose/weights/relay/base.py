"""The seam between the chain of weight versions and wherever its bytes lie: put once, read ranges, list, delete.

A relay is dumb. It knows nothing of versions, manifests or tensors, and it may lose everything it holds; whatever is
clever lives in `weights.chain`. In return every relay keeps the same few promises, checked by one contract suite:

- a key is written once: `put_new` on a key that exists raises `KeyExists` and changes nothing;
- a value appears whole or not at all, also when its writer dies halfway, and what was read once reads the same again;
- a missing key is `KeyMissing`, never an empty value; a range outside the value is refused, never cut short;
- no room is `RelayFull`, and leaves what is there as it was;
- everything else that fails is `Unavailable`: the call may or may not have happened, and may be tried again.

Calls block. The publisher is a thread beside a training loop and the receiver lives beside an event loop, so both
call a relay from threads of their own; a relay is safe to share between threads.

Keys look like paths (`run/e1763258031/v0000000007/delta.0000/manifest`). A key is never also the folder of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rose.errors import RequestRefused, Unavailable

Buffer = bytes | bytearray | memoryview
Chunks = Iterable[Buffer]

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


class RelayFull(Unavailable):
    """The value does not fit; nothing was changed."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    key: str
    size_bytes: int


class Relay(Protocol):
    def put_new(self, key: str, chunks: Chunks) -> int:
        """Store the chunks as one value and return its size. If `chunks` raises, that passes, and nothing is stored."""

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        """The bytes of the value from `start` up to `stop`, or to its end."""

    def list(self, prefix: str = "") -> Sequence[Entry]:
        """What lies below the folder `prefix` (everything if it is empty), in order of keys."""

    def delete(self, key: str) -> bool:
        """Forget a value; False if there was none. Whoever reads it at this moment gets all of it or an error."""

    def close(self) -> None:
        """Let go of files and connections; what is stored stays."""


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
    """A prefix without the slash at its end, which may be written or not."""
    return check_key(prefix.removesuffix("/")) if prefix else ""


def is_below(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(f"{prefix}/")


def check_range(key: str, start: int, stop: int | None, size: int) -> tuple[int, int]:
    """The range with its end filled in."""
    end = size if stop is None else stop
    if not 0 <= start <= end <= size:
        raise RangeRefused(key, start, stop, size)
    return start, end


def one(data: Buffer) -> Iterator[Buffer]:
    """Chunks that are a single buffer."""
    yield data
