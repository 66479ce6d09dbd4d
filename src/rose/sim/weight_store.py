"""The weight versions of a simulated world: a real chain in a relay in memory, of very small weights.

The trainer publishes with the real publisher, and every agent fetches with a real receiver, delta by delta. What
arrives is what was published, or is refused. The version number is stored in the weights, so that a device knows what
it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rose.api.worker_messages import NewVersion
from rose.errors import Unavailable
from rose.sim.simulated_agent import UNSEEN
from rose.sim.simulated_handle import folder_of
from rose.weights.chain import RetryPolicy
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.relay_base import Buffer, Buffers, RelayEntry
from rose.worker.weight_updater import FetchedWeights, WeightFetcher

RUN, SECRET = "simulated", b"a secret of a simulated run"
AT_ONCE = RetryPolicy(limit_s=0.0)
NUMBERS = 32  # values in the weights; the first few hold the version
CHANGED = 4


class WeightStore:
    """The publisher of the trainer, and the relay that all agents use."""

    def __init__(self) -> None:
        self.liars: set[str] = set()  # workers that keep the previous weights
        self.relay = ReachableRelay(MemoryRelay())
        self._weights = {"weights": np.zeros(NUMBERS, np.float32)}
        self._publisher = Publisher(self._weights, self.relay.inside, run=RUN, secret=SECRET, dtype=None, retry=AT_ONCE)
        self._hashes = {0: "the weights that devices start with"}

    def put(self, version: str) -> NewVersion:
        """Publish a version once, and return the message for the gateway."""
        number = int(version)
        if number not in self._hashes:
            self._weights["weights"][:CHANGED] = number
            self._hashes[number] = self._publisher.publish(number).result().hash
        return NewVersion(version, relay="memory:", run=RUN, hash=self._hashes[number])

    def hash_of(self, number: int) -> str:
        return self._hashes[number]

    def close(self) -> None:
        self._publisher.close()


class ReachableRelay:
    """The relay, with a switch that makes it unreachable."""

    def __init__(self, inside: MemoryRelay) -> None:
        self.inside, self.is_closed = inside, False

    def put_new(self, key: str, buffers: Buffers) -> int:
        return self._open().put_new(key, buffers)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        return self._open().get(key, start, stop)

    def list(self, prefix: str = "") -> Sequence[RelayEntry]:
        return self._open().list(prefix)

    def delete(self, key: str) -> bool:
        return self._open().delete(key)

    def close(self) -> None:
        """Do nothing: the world owns the relay."""

    def _open(self) -> MemoryRelay:
        if self.is_closed:
            raise Unavailable("the relay is out of reach")
        return self.inside


class StoreFetcher(WeightFetcher):
    """The weight fetcher of one agent."""

    def __init__(self, store: WeightStore, name: str) -> None:
        super().__init__(UNSEEN)
        self._store, self._name = store, name
        self._chain = Receiver(store.relay, RUN, secret=SECRET, retry=AT_ONCE)

    def sweep(self) -> None:
        """Do nothing: simulated devices leave no files."""

    def fetch(self, wanted: NewVersion) -> FetchedWeights:
        received = self._chain.fetch(wanted.hash)
        assert received is not None and received.hash == wanted.hash, "other weights than requested"
        weights = int(received.tensors["weights"][0])
        if self._name in self._store.liars:
            return FetchedWeights(folder_of(weights - 1), self._store.hash_of(weights - 1))
        return FetchedWeights(folder_of(weights), received.hash, received)

    def on_installed(self, arrived: FetchedWeights) -> None:
        if arrived.received is not None:
            self._chain.installed(arrived.received)
            self._chain.prepare()

    def close(self) -> None:
        self._chain.close()
