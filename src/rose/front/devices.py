"""What a device leaves in the user's cache while it runs, so that `rose lend` finds it: addresses and tokens.

One file per device, readable by its user only, removed when the device stops. What a killed device left behind is
told by its process id and skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec


class DeviceCard(msgspec.Struct, frozen=True):
    process_id: int
    model: str
    rollout_model: str
    url: str
    rollout_url: str
    owner_token: str
    rollout_token: str


def folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rose" / "devices"


@contextmanager
def shown(card: DeviceCard) -> Iterator[None]:
    """While the device runs. A cache that cannot be written is no reason not to serve."""
    path = folder() / f"{card.process_id}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(card))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def running() -> list[DeviceCard]:
    """Every lent device of this user on this machine."""
    found = []
    for path in sorted(folder().glob("*.json")):
        with suppress(OSError, msgspec.DecodeError):
            card = msgspec.json.decode(path.read_bytes(), type=DeviceCard)
            if Path(f"/proc/{card.process_id}").exists():
                found.append(card)
    return found
