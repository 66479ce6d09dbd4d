"""Where versions of the weights lie in a simulated world: a real chain in a relay in memory, of very small weights.

The trainer publishes with the real publisher, every agent fetches with a real receiver of its own, delta by delta, and
what arrives is what was published or is refused. The number of a version stands in its weights, so that a device knows
what it truly runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rose.errors import Unavailable
from rose.rollout.messages import NewVersion
from rose.rollout.weights import Arrivals, Arrived
from rose.sim.agent import UNSEEN
from rose.sim.handle import folder_of
from rose.weights.chain import Patience
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver
from rose.weights.relay.base import Buffer, Chunks, Entry
from rose.weights.relay.memory import MemoryRelay

RUN, SECRET = "simulated", b"a secret of a simulated run"
AT_ONCE = Patience(limit_s=0.0)
NUMBERS = 32  # in the weights; the first few of them say which version it is
CHANGED = 4


class Shelf:
    """The trainer's end, and the door for everybody else."""

    def __init__(self) -> None:
        self.liars: set[str] = set()  # workers that go on with the weights before
        self.relay = Doorway(MemoryRelay())
        self._weights = {"weights": np.zeros(NUMBERS, np.float32)}
        self._publisher = Publisher(
            self._weights, self.relay.inside, run=RUN, secret=SECRET, dtype=None, patience=AT_ONCE
        )
        self._hashes = {0: "those that devices are started with"}

    def put(self, version: str) -> NewVersion:
        """New weights, as they are to be told to the gateway; the same again if they are there."""
        number = int(version)
        if number not in self._hashes:
            self._weights["weights"][:CHANGED] = number
            self._hashes[number] = self._publisher.publish(number).result().hash
        return NewVersion(version, relay="memory:", run=RUN, hash=self._hashes[number])

    def hash_of(self, number: int) -> str:
        return self._hashes[number]

    def close(self) -> None:
        self._publisher.close()


class Doorway:
    """The relay, as long as it can be reached."""

    def __init__(self, inside: MemoryRelay) -> None:
        self.inside, self.is_closed = inside, False

    def put_new(self, key: str, chunks: Chunks) -> int:
        return self._open().put_new(key, chunks)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        return self._open().get(key, start, stop)

    def list(self, prefix: str = "") -> Sequence[Entry]:
        return self._open().list(prefix)

    def delete(self, key: str) -> bool:
        return self._open().delete(key)

    def close(self) -> None:
        """It belongs to the world."""

    def _open(self) -> MemoryRelay:
        if self.is_closed:
            raise Unavailable("the relay is out of reach")
        return self.inside


class ShelfArrivals(Arrivals):
    """Where one agent's weights arrive."""

    def __init__(self, shelf: Shelf, name: str) -> None:
        super().__init__(UNSEEN)
        self._shelf, self._name = shelf, name
        self._chain = Receiver(shelf.relay, RUN, secret=SECRET, patience=AT_ONCE)

    def sweep(self) -> None:
        """Simulated devices leave nothing on this machine."""

    def bring(self, wanted: NewVersion) -> Arrived:
        received = self._chain.fetch(wanted.hash)
        assert received is not None and received.hash == wanted.hash, "other weights than those that were asked for"
        weights = int(received.tensors["weights"][0])
        if self._name in self._shelf.liars:
            return Arrived(folder_of(weights - 1), self._shelf.hash_of(weights - 1))
        return Arrived(folder_of(weights), received.hash, received)

    def installed(self, arrived: Arrived) -> None:
        if arrived.received is not None:
            self._chain.installed(arrived.received)
            self._chain.prepare()

    def close(self) -> None:
        self._chain.close()
