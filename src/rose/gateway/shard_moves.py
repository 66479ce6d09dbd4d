"""One of several gateways (a shard): its load, and the moves of its idle workers to shards that starve.

`core.shard_balance` decides. A worker is moved as it is drained: it gets no more turns, hands back what it has, and is
then told the number of the shard to join. It knows the addresses of the shards from its own settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rose.config.server_settings import GatewaySettings
from rose.core.shard_balance import BalanceRules, MoveWorkers, ShardBalance, ShardLoad, ShardLoads, loads_of
from rose.gateway.pool import Pool, PoolWorker
from rose.gateway.turn_scheduler import Scheduler

Record = Callable[[float, ShardLoads, Sequence[MoveWorkers]], None]


class ShardMoves:
    """The balance of one shard with the others. `record` is called with every decision and what it was based on."""

    def __init__(
        self, pool: Pool, scheduler: Scheduler, settings: GatewaySettings, rules: BalanceRules | None = None
    ) -> None:
        self.shard, self.shards = settings.shard, len(settings.shards)
        self.record: Record = lambda now_s, seen, moves: None
        self.moved = 0
        self._pool, self._scheduler = pool, scheduler
        self._rules = rules or BalanceRules(moves_per_minute=settings.shard_moves_per_minute)
        self._balance = ShardBalance(settings.shard or 0, self._rules)
        self._joined_s: dict[int, float] = {}  # by the number of the lease

    def load(self, now_s: float) -> ShardLoad:
        """Return the load of this shard."""
        workers = list(self._pool)
        leases = [worker.lease.number for worker in workers]
        self._joined_s = {lease: self._joined_s.get(lease, now_s) for lease in leases}
        concurrency = [worker.registration.max_concurrency for worker in workers]
        return ShardLoad(
            shard=self.shard or 0,
            waiting_turns=self._scheduler.waiting,
            free_workers=sum(self._is_free(worker) for worker in workers),
            idle_workers=len(self._movable(now_s)),
            turns_per_worker=max(1, int(statistics.mean(concurrency))) if concurrency else 1,
        )

    def update(self, others: Sequence[ShardLoad], now_s: float) -> None:
        """Move idle workers to shards that starve; to be called about once a second with the loads of the others."""
        seen = loads_of([self.load(now_s), *others])
        moves = self._balance.decide(seen, now_s)
        if not moves:
            return
        self.record(now_s, seen, moves)
        movable = self._movable(now_s)
        for move in moves:
            for worker in movable[: move.count]:
                self.moved += 1
                self._scheduler.drain(worker, now_s, move_to=move.target)
            movable = movable[move.count :]

    def _movable(self, now_s: float) -> list[PoolWorker]:
        """Return the idle workers that may be moved, those with the least to lose first."""
        movable = [
            worker
            for worker in self._pool
            if (joined_s := self._joined_s.get(worker.lease.number)) is not None
            and self._may_move(worker)
            and (now_s - joined_s >= self._rules.hold_s or not worker.registration.has_moved)
        ]
        return sorted(movable, key=lambda worker: (worker.placement.turns_ended, worker.name))

    def _may_move(self, worker: PoolWorker) -> bool:
        knows_shards = self.shard is not None and worker.registration.shards == self.shards
        is_idle = not worker.placement.attempt_ids and not worker.placement.is_draining
        return (
            knows_shards
            and is_idle
            and ((worker.heartbeat.gate_open and worker.heartbeat.is_offered) or _can_activate(worker))
        )

    def _is_free(self, worker: PoolWorker) -> bool:
        """Return whether a waiting turn could go to this worker, perhaps once it is activated."""
        if _can_activate(worker):
            return not worker.placement.is_draining
        has_slot = len(worker.placement.attempt_ids) < worker.registration.max_concurrency
        return has_slot and self._pool.view(worker).is_open


def _can_activate(worker: PoolWorker) -> bool:
    """Return whether a device does not have the rollout model loaded, and would load it if it was asked to."""
    return worker.heartbeat.place != "resident" and worker.heartbeat.is_offered
