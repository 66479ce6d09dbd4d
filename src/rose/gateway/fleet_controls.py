"""Carries out an operator's orders to workers, and keeps them: over reconnections, and in the ledger over restarts.

`core.fleet_orders` says what an order means for each worker. A paused or drained worker gets no turns, and those that
it has continue elsewhere; a drained device also parks its rollout model. A device's owner has the last word: an order
never resumes what the owner stopped on the device. Orders take effect before they are durable, because a device must be
free at once also while the ledger cannot be written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from rose.api.fleet_orders import HISTORY_MAX, OrderBody, OrderRecord, StandingRow, StoredOrders
from rose.bounds import TEXT_CHARACTERS_MAX, UNREADABLE
from rose.core.fleet_orders import (
    Orders,
    StandingOrder,
    Target,
    after_order,
    order_for,
    orders_for,
    targets_of,
)
from rose.errors import ConfigError
from rose.gateway.ledger import NoLedger
from rose.gateway.pool import Pool, PoolWorker
from rose.gateway.provisioning import Provisioning
from rose.gateway.turn_scheduler import Scheduler

logger = logging.getLogger("rose.gateway")

_stored: msgspec.msgpack.Decoder[StoredOrders] = msgspec.msgpack.Decoder(StoredOrders)


class FleetControls:
    """The orders of one gateway; the only writer of `PlacementState.order`."""

    def __init__(self, pool: Pool, scheduler: Scheduler, provisioning: Provisioning, ledger: NoLedger) -> None:
        """Continue with the orders of the ledger. Raises ConfigError if they are damaged."""
        self._pool, self._scheduler, self._provisioning, self._ledger = pool, scheduler, provisioning, ledger
        self._orders: Orders = {}
        self._number = 0
        self._history: list[OrderRecord] = []
        kept = ledger.read_orders()
        if kept is not None:
            self._restore(kept)

    @property
    def stored(self) -> StoredOrders:
        """What holds now, and the newest orders."""
        rows = [
            StandingRow(
                target.name,
                dict(target.labels),
                order.state,
                order.state_number,
                order.turns_max,
                order.limit_number,
            )
            for target, order in self._orders.items()
        ]
        return StoredOrders(self._number, rows, self._history)

    @property
    def newest_number(self) -> int:
        """The number of the newest order, 0 before the first."""
        return self._number

    def newest(self, count: int) -> list[OrderRecord]:
        """Return the newest orders, the latest last."""
        return self._history[-count:]

    def apply(self, body: OrderBody, at: str, now_s: float) -> tuple[OrderRecord, list[str], list[str]]:
        """Carry out an order; return its record, the names of the workers that it matched, and the absent names."""
        targets = targets_of(body.workers, body.labels)
        self._number += 1
        self._orders = after_order(self._orders, self._number, targets, body.action, body.turns_max)
        if body.workers:
            matched = [worker for name in dict.fromkeys(body.workers) if (worker := self._pool.get(name)) is not None]
        else:
            matched = [worker for worker in self._pool if targets[0].includes(worker.name, worker.registration.labels)]
        self._enforce(matched, now_s)
        record = OrderRecord(
            self._number, at, body.action, _text_of(targets), body.turns_max if body.action == "limits" else None,
            len(matched),
        )  # fmt: skip
        self._history = [*self._history, record][-HISTORY_MAX:]
        self._ledger.set_orders(msgspec.msgpack.encode(self.stored))
        logger.warning("order %d: %s %s, %d workers", record.number, record.action, record.target, len(matched))
        present = {worker.name for worker in matched}
        return record, [worker.name for worker in matched], [name for name in body.workers if name not in present]

    def on_joined(self, worker: PoolWorker) -> None:
        """Give a worker that joins the orders that hold for it."""
        worker.placement.order = order_for(self._orders, worker.name, worker.registration.labels)

    def _enforce(self, workers: Sequence[PoolWorker], now_s: float) -> None:
        """Set the orders of workers, take their turns back, and place these elsewhere, once for all workers."""
        known = [(worker.name, worker.registration.labels) for worker in workers]
        for worker, order in zip(workers, orders_for(self._orders, known)):
            worker.placement.order = order
        chosen = {id(worker): worker for worker in workers}
        by_worker: dict[int, list[tuple[int, str]]] = {}
        for turn in self._scheduler.placed:
            if id(turn.worker) in chosen:
                by_worker.setdefault(id(turn.worker), []).append((turn.attempt_id, turn.request.request_id))
        for key, turns in by_worker.items():
            worker = chosen[key]
            kept = worker.turns_max if worker.placement.order.state == "lending" else 0
            for _, request_id in sorted(turns)[kept:]:  # the newest have the least to compute again
                self._scheduler.evict(request_id, now_s)
        if workers:
            self._scheduler.update_worker(workers[0], now_s, *workers[1:])
        for worker in workers:
            self._provisioning.on_worker_change(worker, now_s)
            if worker.kind == "borrowed":
                self._provisioning.reconcile(worker, now_s)

    def _restore(self, kept: bytes) -> None:
        try:
            stored = _stored.decode(kept)
        except UNREADABLE as error:
            hint = "is its disk sound? restore a copy, or start with a new file"
            raise ConfigError(f"the orders in the ledger are damaged: {error}", hint=hint) from error
        self._number, self._history = stored.number, stored.history
        self._orders = {
            Target(row.name, tuple(sorted(row.labels.items()))): StandingOrder(
                row.state, row.state_number, row.turns_max, row.limit_number
            )
            for row in stored.standing
        }


def _text_of(targets: Sequence[Target]) -> str:
    if targets[0].is_all:
        return "all workers"
    if targets[0].labels:
        return ", ".join(f"{key}={value}" for key, value in targets[0].labels)
    return ", ".join(target.name for target in targets)[:TEXT_CHARACTERS_MAX]
