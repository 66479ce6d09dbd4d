"""Borrows devices while there is work for them, and gives them back.

`core.provision` decides from turns and heartbeats which connected devices the gateway *wants*. This module carries the
decisions out, asks a device that is not in the wanted state again, and records allocation cycles. A cycle ends at once
when the owner takes the device back. A wanted device that is useless for long (gate blocked, weights behind, no turn
advances) is exchanged for another. Dedicated workers over the user's cap, the latest first, get no turns.
"""

from __future__ import annotations

import itertools
import math
from collections import deque

from rose.api.worker_messages import Activate, Park
from rose.core.provision import (
    Borrow,
    Cycle,
    Demand,
    DeviceView,
    Provision,
    ProvisionRules,
    allocation_overhead_s,
    allocation_overhead_share,
)
from rose.core.router import Router
from rose.gateway.pool import Pool, PoolWorker
from rose.gateway.turn_scheduler import Scheduler

LOOK_S = 0.25
TELL_AGAIN_S = 5.0  # a device that is not in the wanted state is asked again after this long
CYCLES_KEPT = 1024
KV_WEIGHT = 0.2  # of the newest sample of a device's memory
RATE_KEPT = 0.98  # of the best rate a worker has shown, per look while it works
SLOW_S = 5.0  # a dedicated worker that shows nothing for so long is not counted on
STUCK_S = 20.0  # none of its turns has advanced for so long: many times the longest prompt
PATIENCE_S = 10.0  # with a borrowed device that can have no turns, while others could
AVOIDED_S = 30.0
JOINED, OFFERED, LOST = "it joined with its model at hand", "its owner offers it again", "it is gone"
HELD = "its operator ordered so"
USELESS = "it was of no use, and there is another"


class Provisioning:
    """The only writer of `PoolWorker.provisioning`, and the keeper of the allocation cycles."""

    def __init__(
        self,
        pool: Pool,
        scheduler: Scheduler,
        router: Router,
        rules: ProvisionRules,
        *,
        first_number: int = 1,
        began_s: float = 0.0,
    ) -> None:
        self.rules, self.began_s = rules, began_s
        self.borrows = self.returns = 0
        self._pool, self._scheduler, self._router = pool, scheduler, router
        self._provision = Provision(rules)
        self._numbers = itertools.count(first_number)
        self._past: deque[Cycle] = deque(maxlen=CYCLES_KEPT)
        self._open: dict[PoolWorker, Cycle] = {}  # until the device is given back
        self._leaving: dict[PoolWorker, Cycle] = {}  # until its memory is released
        self._looked_s = -math.inf
        self._turns_enough = math.inf  # with more turns than these another device is wanted
        self._wanted_s: float | None = None  # since when there have been more

    @property
    def cycles(self) -> list[Cycle]:
        """The recent cycles, oldest first."""
        return sorted([*self._past, *self._leaving.values(), *self._open.values()], key=lambda cycle: cycle.number)

    @property
    def borrowed(self) -> int:
        return len(self._open)

    def overhead_s(self, now_s: float) -> float:
        """Sum the time in which some device was being borrowed or given back, over the cycles that are kept."""
        return allocation_overhead_s(self.cycles, self.began_s, now_s)

    def overhead_share(self, now_s: float) -> float | None:
        return allocation_overhead_share(self.cycles, self.began_s, now_s)

    # Events

    def on_turn(self, now_s: float) -> None:
        """Note when a new turn makes another device wanted."""
        if self._wanted_s is None and self._turns > self._turns_enough:
            self._wanted_s = now_s

    def on_worker_change(self, worker: PoolWorker, now_s: float) -> None:
        """Update the worker's cycle: it joined, or reported its state."""
        if worker.kind != "borrowed":
            return
        is_held = worker.placement.order.state != "lending"
        if is_held:
            self._end(worker, HELD, now_s)
        elif worker.provisioning.is_wanted and worker.heartbeat.is_offered:
            self._begin(worker, OFFERED if worker.provisioning.kv_use is not None else JOINED, now_s)
        else:
            self._end(worker, "its owner wants it back", now_s)
        self._record_progress(worker, now_s)

    def remove_worker(self, worker: PoolWorker, now_s: float) -> None:
        self._end(worker, LOST, now_s)
        self._release(worker, now_s)

    def update(self, now_s: float) -> None:
        """Decide which devices are wanted, and ask those in another state again; at most every `LOOK_S`."""
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        workers = list(self._pool)
        self._measure(workers)
        self._cap_dedicated(workers, now_s)
        borrowed = [worker for worker in workers if worker.kind == "borrowed"]
        self._avoid_useless(borrowed, now_s)
        devices = [self._device(worker, now_s) for worker in borrowed]
        for decision in self._provision.decide(self._demand(workers, now_s), devices, now_s):
            worker = self._pool.get(decision.name)
            assert worker is not None
            reason = USELESS if now_s < worker.provisioning.avoided_until_s else decision.reason
            self._set_wanted(worker, isinstance(decision, Borrow), reason, now_s)
        self._turns_enough = self._count_turns_enough(workers, now_s)
        if self._turns <= self._turns_enough:
            self._wanted_s = None
        self.on_turn(now_s)
        for worker in borrowed:
            self.reconcile(worker, now_s)

    # Decisions

    @property
    def _turns(self) -> int:
        return self._scheduler.waiting + self._scheduler.running

    def _count_turns_enough(self, workers: list[PoolWorker], now_s: float) -> float:
        """Return how many turns the present workers are enough for; infinite if no other can be borrowed."""
        if self.borrowed >= self.rules.serving_max or not any(
            worker.kind == "borrowed" and worker.heartbeat.is_offered and not worker.provisioning.is_wanted
            for worker in workers
        ):
            return math.inf
        return self.rules.turns_per_device * (self.borrowed + len(self._dedicated(workers, now_s)))

    def _demand(self, workers: list[PoolWorker], now_s: float) -> Demand:
        dedicated = self._dedicated(workers, now_s)
        rates = [rate for worker in dedicated if (rate := worker.heartbeat.decode_tok_s)]
        return Demand(
            turns=self._turns,
            work_tokens=self._turns * self._router.usual_tokens,
            dedicated_workers=len(dedicated),
            dedicated_tok_s=sum(worker.provisioning.best_tok_s for worker in dedicated),
            sequence_tok_s=sum(rates) / len(rates) if rates else 0.0,
        )

    def _dedicated(self, workers: list[PoolWorker], now_s: float) -> list[PoolWorker]:
        """Return the dedicated workers to count on; one that hangs must not keep others from being borrowed."""
        return [
            worker
            for worker in workers
            if worker.kind == "dedicated"
            and worker.provisioning.is_wanted
            and self._pool.accepts_turns(worker)
            and _is_advancing(worker, now_s, SLOW_S)
        ]

    def _avoid_useless(self, borrowed: list[PoolWorker], now_s: float) -> None:
        """Avoid a device that was of no use for long, if there are turns and there is another device."""
        has_another = any(
            worker.heartbeat.is_offered
            and not worker.provisioning.is_wanted
            and now_s >= worker.provisioning.avoided_until_s
            for worker in borrowed
        )
        for worker, cycle in self._open.items():
            state = worker.provisioning
            if _is_advancing(worker, now_s, STUCK_S) and self._pool.view(worker).is_open:
                state.usable_s = now_s
            useless_s = now_s - max(cycle.chosen_s, state.usable_s)
            if has_another and self._turns and useless_s > PATIENCE_S:
                state.avoided_until_s = now_s + AVOIDED_S

    @staticmethod
    def _device(worker: PoolWorker, now_s: float) -> DeviceView:
        heartbeat, state = worker.heartbeat, worker.provisioning
        placement = worker.placement
        is_lent = heartbeat.is_offered and not placement.is_draining and placement.order.state == "lending"
        return DeviceView(
            name=worker.name,
            is_borrowed=state.is_wanted and is_lent,
            is_on_offer=is_lent and now_s >= state.avoided_until_s,
            kv_use=state.kv_use or 0.0,
            slack_s=heartbeat.slack_s or 0.0,
            tok_s=state.best_tok_s,
            activation_s=heartbeat.activation_s or 0.0,
            turns=len(worker.placement.attempt_ids),
        )

    @staticmethod
    def _measure(workers: list[PoolWorker]) -> None:
        for worker in workers:
            state, use = worker.provisioning, worker.heartbeat.kv_use
            if use is not None:
                state.kv_use = use if state.kv_use is None else state.kv_use + KV_WEIGHT * (use - state.kv_use)
            if worker.placement.attempt_ids:
                state.best_tok_s = max(RATE_KEPT * state.best_tok_s, worker.heartbeat.tokens_per_s)

    def _cap_dedicated(self, workers: list[PoolWorker], now_s: float) -> None:
        dedicated = [worker for worker in workers if worker.kind == "dedicated"]
        most = self.rules.dedicated_max
        for rank, worker in enumerate(sorted(dedicated, key=lambda worker: worker.lease.number)):
            is_wanted = most is None or rank < most
            if is_wanted != worker.provisioning.is_wanted:
                worker.provisioning.is_wanted = is_wanted
                self._scheduler.update_worker(worker, now_s)

    # Actions

    def _set_wanted(self, worker: PoolWorker, is_wanted: bool, reason: str, now_s: float) -> None:
        worker.provisioning.is_wanted, worker.provisioning.requested = is_wanted, None
        if is_wanted:
            self._begin(worker, reason, now_s)
        else:
            self._end(worker, reason, now_s)
        self._scheduler.update_worker(worker, now_s)
        self._record_progress(worker, now_s)

    @staticmethod
    def reconcile(worker: PoolWorker, now_s: float) -> None:
        """Ask a device that is not in the wanted state to load or to park the rollout model."""
        heartbeat, state, ordered = worker.heartbeat, worker.provisioning, worker.placement.order.state
        if not heartbeat.can_park or not heartbeat.is_offered or worker.placement.is_draining or ordered == "paused":
            return
        is_wanted = state.is_wanted and ordered != "drained"
        if is_wanted == (heartbeat.place in ("resident", "activating")):
            state.requested = None
        elif state.requested != is_wanted or now_s >= state.retry_at_s:
            state.requested, state.retry_at_s = is_wanted, now_s + TELL_AGAIN_S
            why = HELD if ordered == "drained" else "there is no work"
            worker.send(Activate("there is work") if is_wanted else Park(why))

    # Cycles

    def _begin(self, worker: PoolWorker, reason: str, now_s: float) -> None:
        if worker in self._open:
            return
        self._release(worker, now_s)
        wanted_s = now_s if self._wanted_s is None else self._wanted_s
        self._open[worker] = Cycle(next(self._numbers), worker.name, wanted_s, now_s, reason)
        self._wanted_s = None
        self.borrows += 1

    def _end(self, worker: PoolWorker, reason: str, now_s: float) -> None:
        cycle = self._open.pop(worker, None)
        if cycle is not None:
            cycle.returned_s, cycle.why_returned = now_s, reason
            self._leaving[worker] = cycle
            self.returns += 1

    def _release(self, worker: PoolWorker, now_s: float) -> None:
        cycle = self._leaving.pop(worker, None)
        if cycle is not None:
            cycle.released_s = now_s
            self._past.append(cycle)

    def _record_progress(self, worker: PoolWorker, now_s: float) -> None:
        """Record which milestones a borrowed device has reached, in order, or that it is parked again."""
        heartbeat, cycle = worker.heartbeat, self._open.get(worker)
        is_loaded = heartbeat.place == "resident"
        if cycle is None:
            if not is_loaded or not heartbeat.is_offered or not heartbeat.can_park:
                self._release(worker, now_s)
            return
        if not is_loaded:
            return
        cycle.activated_s = now_s if cycle.activated_s is None else cycle.activated_s
        if not self._pool.may_run(worker):
            return
        cycle.synced_s = now_s if cycle.synced_s is None else cycle.synced_s
        if self._pool.view(worker).is_open and now_s >= worker.placement.closed_until_s:
            cycle.usable_s = now_s if cycle.usable_s is None else cycle.usable_s


def _is_advancing(worker: PoolWorker, now_s: float, patience_s: float) -> bool:
    return not worker.placement.attempt_ids or now_s - worker.placement.progress_s < patience_s
