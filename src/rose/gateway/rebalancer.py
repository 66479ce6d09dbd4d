"""Moves turns away from workers where they do not advance, as far as other workers have room.

There are two kinds. On a worker whose gate is blocked, because serving needs the device, nothing has gone wrong: the
turns that the router names as migration candidates are asked back. On a worker that is open and yet reports nothing, by
the rule of `core.stalls`, the turn is reclaimed without asking and the worker is closed for a while. A turn that no
other worker can take stays where it is: it may still advance, and would be computed again for nothing.
"""

from __future__ import annotations

from rose.core.router import Router
from rose.core.routing_rules import Place
from rose.core.stalls import Stalls
from rose.gateway.pool import Pool, PoolWorker
from rose.gateway.turn_scheduler import Scheduler
from rose.gateway.turn_state import LiveTurn


class Rebalancer:
    """The periodic search for turns that should run elsewhere."""

    def __init__(self, pool: Pool, scheduler: Scheduler, router: Router, stalls: Stalls) -> None:
        self._pool, self._scheduler, self._router, self._stalls = pool, scheduler, router, stalls

    def rebalance(self, now_s: float) -> None:
        scheduler = self._scheduler
        scheduler.reclaim_overdue(now_s)
        if scheduler.is_held:
            return  # a turn that is moved would wait until the trainer resumes
        able = {worker.name: worker for worker in self._pool if self._is_able(worker, now_s)}
        room = sum(
            max(0, worker.registration.max_concurrency - len(worker.placement.attempt_ids)) for worker in able.values()
        )
        room -= scheduler.waiting + scheduler.evicting
        if room > 0:
            candidates = self._router.migration_candidates(now_s, room)
            room -= sum(scheduler.evict(candidate.turn_id, now_s) for candidate in candidates)
        for turn in scheduler.placed if room > 0 else ():
            worker = turn.worker
            if worker is None or len(able) == (worker.name in able) or not self._is_stuck(turn, worker, now_s):
                continue
            room -= self._move(turn, worker, now_s)
            if room <= 0:
                break
        scheduler.place(now_s)

    def _is_able(self, worker: PoolWorker, now_s: float) -> bool:
        """Return whether the worker can run turns now. Room behind a blocked gate does not count."""
        view = self._pool.view(worker)
        return view.is_open and view.blocked_since_s is None and now_s >= worker.placement.closed_until_s

    def _is_stuck(self, turn: LiveTurn, worker: PoolWorker, now_s: float) -> bool:
        """Return whether the turn has stalled. A worker that is blocked or loads weights has its reason to be quiet."""
        if turn.eviction_s is not None or now_s - turn.progress_s <= self._stalls.least_s:
            return False
        if worker.gate.blocked_since_s is not None or worker.weights.is_loading:
            return False
        quiet_s = worker.gate.quiet_s(turn.progress_s, now_s)
        predicted_s = self._stalls.predicted_s(worker.name, first_of=turn.first_of, whole_s=turn.predicted_s)
        return self._stalls.is_stalled(worker.name, quiet_s, predicted_s, now_s)

    def _move(self, turn: LiveTurn, worker: PoolWorker, now_s: float) -> bool:
        """Close the worker of a stuck turn, and reclaim the turn if another worker can take it."""
        until_s = self._stalls.mark(worker.name, now_s)
        if until_s > now_s:
            self._scheduler.close_worker(worker, until_s, "it does not advance its turns")
        decision = self._router.choose(turn.view(), now_s)
        if not isinstance(decision, Place) or decision.worker == worker.name:
            return False
        self._scheduler.counts.stalled += 1
        self._scheduler.reclaim(turn, now_s)
        return True
