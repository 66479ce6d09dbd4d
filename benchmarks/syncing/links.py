"""A link between two clusters on one machine: two network namespaces, a pair of virtual cards, a rate on each.

The trainer's side holds the publisher and the relay, the workers' side the receivers, so what a receiver pulls crosses
the link. Where namespaces are not permitted (no CAP_NET_ADMIN), everything is on loopback and the receivers hold
themselves to the rate with a token bucket around their relay; rows say which it was.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

TRAINER, WORKERS = "rose-sync-t", "rose-sync-w"
CARDS = {TRAINER: "rose-sync-t0", WORKERS: "rose-sync-w0"}
ADDRESSES = {TRAINER: "10.213.7.1", WORKERS: "10.213.7.2"}
BURST_S = 0.004  # a bucket of this much time: enough that timers do not lower the rate, little against a transfer


def _sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


class Link:
    """Made on entering, removed on leaving."""

    def __init__(self) -> None:
        self.is_shaped_by_kernel = False
        self.why_not = ""
        self.mbit_s: int | None = None

    @classmethod
    def none(cls) -> Link:
        """For relays that are measured as they are, everything on this machine."""
        link = cls()
        link.why_not = "not shaped"
        return link

    def __enter__(self) -> Link:
        self._remove()
        try:
            self._make()
            self.shape(200)
            self.shape(None)
            self.is_shaped_by_kernel = True
        except (OSError, subprocess.SubprocessError) as error:
            self.why_not = str(getattr(error, "stderr", "") or error).strip()
            self._remove()
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    @property
    def shaping(self) -> str:
        return "namespaces and tc" if self.is_shaped_by_kernel else "token bucket"

    def inside(self, side: str, command: Sequence[str]) -> list[str]:
        """The command, on this side of the link."""
        return ["ip", "netns", "exec", side, *command] if self.is_shaped_by_kernel else list(command)

    @property
    def trainer_address(self) -> str:
        return ADDRESSES[TRAINER] if self.is_shaped_by_kernel else "127.0.0.1"

    def shape(self, mbit_s: int | None) -> None:
        """The rate in each direction from now on; None is as fast as the machine can."""
        self.mbit_s = mbit_s
        if self.why_not:
            return
        for side, card in CARDS.items():
            within = ["ip", "netns", "exec", side, "tc", "qdisc"]
            if mbit_s is None:
                subprocess.run([*within, "del", "dev", card, "root"], capture_output=True, timeout=30)
                continue
            burst = max(32_000, int(mbit_s * 1e6 / 8 * BURST_S))
            rate = ["tbf", "rate", f"{mbit_s}mbit", "burst", str(burst), "latency", "100ms"]
            _sh(*within, "replace", "dev", card, "root", *rate)

    def _make(self) -> None:
        for side in CARDS:
            _sh("ip", "netns", "add", side)
            _sh("ip", "-n", side, "link", "set", "lo", "up")
        pair = [CARDS[TRAINER], "netns", TRAINER, "type", "veth", "peer", "name", CARDS[WORKERS], "netns", WORKERS]
        _sh("ip", "link", "add", *pair)
        for side, card in CARDS.items():
            _sh("ip", "-n", side, "address", "add", f"{ADDRESSES[side]}/24", "dev", card)
            _sh("ip", "-n", side, "link", "set", card, "up")

    def _remove(self) -> None:
        for side in CARDS:
            if os.path.exists(f"/run/netns/{side}"):
                subprocess.run(["ip", "netns", "del", side], capture_output=True, timeout=30)


class Throttled:
    """A relay whose reads take as long as on a link of this rate."""

    CHUNK_BYTES = 4 << 20

    def __init__(self, relay: Any) -> None:
        self._relay = relay
        self.mbit_s: int | None = None
        self._free_s = 0.0
        self._lock = threading.Lock()

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Any:
        data = self._relay.get(key, start, stop)
        if self.mbit_s is not None:
            with self._lock:
                self._free_s = max(self._free_s, time.monotonic()) + len(data) * 8 / (self.mbit_s * 1e6)
                until_s = self._free_s
            time.sleep(max(0.0, until_s - time.monotonic()))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._relay, name)
