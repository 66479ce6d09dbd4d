"""The transfer of TRL's weights to the pool.

Versions are numbered as TRL numbers them: the n-th transfer is version n. A trainer that starts again counts from 1, in
a new epoch of the relay. TRL transfers in two steps, and so does this module: `send_weights` puts a version into the
relay, and `resume`, which TRL calls after all ranks have sent, tells the gateway. A trainer that dies between the two
leaves a version that no worker is asked to load.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rose.adapters.rose_pool import RosePool
from rose.adapters.streamed import StreamedPublisher
from rose.weights.publish import PublishedVersion


class TrlWeights:
    """TRL's WeightTransferProtocol: puts each version into the relay, and then tells the gateway."""

    def __init__(self, pool: RosePool, **options: Any) -> None:
        self._pool, self._options = pool, options
        self._publisher: StreamedPublisher | None = None
        self._published: PublishedVersion | None = None
        self._count = 0

    def init_weight_transfer(self) -> None:
        """Claim the run in the relay. Raises ConfigError, RequestRefused or Unavailable if TRL could not train."""
        self._publisher = self._pool.publisher(**self._options)

    def pause(self) -> None:
        """Do nothing: workers swap weights between two steps of their engines, and turns go on."""

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Put the next version into the relay. If this raises, workers keep the version before."""
        assert self._publisher is not None, "TRL calls init_weight_transfer first"
        self._count += 1
        self._published = self._publisher.publish(self._count, iterator)

    def resume(self) -> None:
        """Tell the gateway of the version; do not wait for its workers."""
        new = self._published
        assert new is not None
        self._pool.numbers[new.label] = self._count
        self._pool.ask(lambda client: self._pool.announce(client, new))

    def destroy(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
