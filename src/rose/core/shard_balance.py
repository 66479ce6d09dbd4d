"""Moves idle workers from one gateway of several (a shard) to another that has turns and no worker for them.

Every shard decides for itself, from the loads of all, which of its own idle workers to give away. All shards share the
need of a starving one among themselves by the same rule, so they hardly ever send it too many.

Four things prevent workers from going back and forth. A shard gives only after it has been idle for a while, and only
to a shard that has starved for a while. A worker that was moved stays for `hold_s`. A shard gives at most
`moves_per_minute`, and to the same target again only once the workers that it sent can have joined there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """The load of one shard. `idle_workers` may be moved; `turns_per_worker` is how many turns one of them takes."""

    shard: int
    waiting_turns: int
    free_workers: int  # that could take one more turn
    idle_workers: int
    turns_per_worker: int = 1

    @property
    def is_starving(self) -> bool:
        return self.waiting_turns > 0 and self.free_workers == 0

    @property
    def workers_needed(self) -> int:
        return -(-self.waiting_turns // max(1, self.turns_per_worker)) if self.is_starving else 0

    @property
    def spare_workers(self) -> int:
        """Return how many workers the shard can give."""
        return self.idle_workers if self.waiting_turns == 0 else 0


@dataclass(frozen=True, slots=True)
class ShardLoads:
    """A fact: the loads of all shards that answer."""

    loads: tuple[ShardLoad, ...]


@dataclass(frozen=True, slots=True)
class MoveWorkers:
    """Move so many idle workers to another shard."""

    target: int
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class BalanceRules:
    moves_per_minute: int = 60
    starving_s: float = 1.5  # two looks: a queue for a moment is no reason to move a device
    calm_s: float = 2.0
    hold_s: float = 30.0  # a worker that was moved has loaded weights and prefixes where it is
    settle_s: float = 4.0  # until workers that were moved have joined and show in the target's load


class ShardBalance:
    """The policy of one shard. Call `decide` about once a second, and move what it returns."""

    def __init__(self, shard: int, rules: BalanceRules | None = None) -> None:
        self.rules = rules if rules is not None else BalanceRules()
        self._shard = shard
        self._starving_since_s: dict[int, float] = {}
        self._calm_since_s: float | None = None
        self._moved_s: dict[int, float] = {}  # by target
        self._moves: deque[tuple[float, int]] = deque()  # of the last minute

    def decide(self, seen: ShardLoads, now_s: float) -> list[MoveWorkers]:
        loads = {load.shard: load for load in seen.loads}
        self._observe(loads, now_s)
        own = loads.get(self._shard)
        if own is None or self._calm_since_s is None or now_s - self._calm_since_s < self.rules.calm_s:
            return []
        moves = []
        left = {shard: load.spare_workers for shard, load in loads.items()}
        for target in sorted(self._starving_since_s, key=lambda shard: (-loads[shard].workers_needed, shard)):
            given = _shares(left, loads[target].workers_needed).get(self._shard, 0)
            count = min(given, self._budget(now_s))
            if count and self._may_send(target, now_s):
                self._moved_s[target] = now_s
                self._moves.append((now_s, count))
                why = f"shard {target} has {loads[target].waiting_turns} waiting turns and no free worker"
                moves.append(MoveWorkers(target, count, why))
        return moves

    def _observe(self, loads: dict[int, ShardLoad], now_s: float) -> None:
        starving = {shard for shard, load in loads.items() if load.is_starving}
        self._starving_since_s = {shard: self._starving_since_s.get(shard, now_s) for shard in sorted(starving)}
        own = loads.get(self._shard)
        if own is None or own.waiting_turns:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s
        while self._moves and now_s - self._moves[0][0] >= MINUTE_S:
            self._moves.popleft()

    def _may_send(self, target: int, now_s: float) -> bool:
        has_settled = now_s - self._moved_s.get(target, -self.rules.settle_s) >= self.rules.settle_s
        return has_settled and now_s - self._starving_since_s[target] >= self.rules.starving_s

    def _budget(self, now_s: float) -> int:
        return self.rules.moves_per_minute - sum(count for _, count in self._moves)


def _shares(left: dict[int, int], needed: int) -> dict[int, int]:
    """Divide a need among the shards with spare workers, and take their shares off `left`."""
    shares: dict[int, int] = {}
    for shard in sorted(left, key=lambda shard: (-left[shard], shard)):
        shares[shard] = min(left[shard], needed)
        left[shard] -= shares[shard]
        needed -= shares[shard]
    return shares


def loads_of(loads: Sequence[ShardLoad]) -> ShardLoads:
    """Return the fact, in the order of the shards."""
    return ShardLoads(tuple(sorted(loads, key=lambda load: load.shard)))
