"""The transfer of TRL's weights to the pool.

Versions are numbered as TRL numbers them: the n-th transfer is version n. A trainer that starts again counts from 1, in
a new epoch of the relay. TRL transfers in two steps, and so does this module: `send_weights` puts a version into the
relay, and `resume`, which TRL calls after all ranks have sent, tells the gateway. A trainer that dies between the two
leaves a version that no worker is asked to load.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from rose.adapters.rose_pool import RosePool
from rose.adapters.streamed import StreamedPublisher
from rose.weights.publish import PublishedVersion

logger = logging.getLogger(__name__)


class TrlWeights:
    """TRL's WeightTransferProtocol: puts each version into the relay, and then tells the gateway."""

    def __init__(self, pool: RosePool, **options: Any) -> None:
        self._pool, self._options = pool, options
        self._publisher: StreamedPublisher | None = None
        self._published: PublishedVersion | None = None
        self._count = 0

    def init_weight_transfer(self) -> None:
        """Claim the run in the relay. Raises ConfigError, RequestRefused or Unavailable if TRL could not train."""
        pool = self._pool
        pool.ask(lambda client: client.pool())
        self._publisher = StreamedPublisher(
            pool.folder.path, pool.relay, run=pool.run, secret=pool.secret, **self._options
        )

    def pause(self) -> None:
        """Do nothing: workers swap weights between two steps of their engines, and turns go on."""

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Put the next version into the relay. If this raises, workers keep the version before."""
        assert self._publisher is not None, "TRL calls init_weight_transfer first"
        self._count += 1
        self._published = self._publisher.publish(self._count, iterator)

    def resume(self) -> None:
        """Tell the gateway of the version; do not wait for its workers."""
        new, pool = self._published, self._pool
        assert new is not None
        pool.numbers[new.label] = self._count
        pool.ask(lambda client: client.publish(new.label, relay=pool.relay, run=pool.run, hash=new.hash))
        logger.info("version %s: %s of %d bytes", new.label, new.kind, new.size_bytes)

    def destroy(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
