"""Whatever the loads, however late they are seen: moves are bounded, and no worker goes back and forth."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from rose.core.shard_balance import BalanceRules, ShardBalance, ShardLoad, loads_of

JOIN_S = 1
RULES = BalanceRules(moves_per_minute=8)


@dataclass
class Cluster:
    """Shards with workers and demands, in steps of a second; the others' loads are seen a few seconds late."""

    chance: random.Random
    shards: int
    turns_per_worker: int
    demand: list[int]
    now_s: int = 0
    homes: list[set[int]] = field(default_factory=list)
    joined_s: dict[int, int] = field(default_factory=dict)
    travelling: list[tuple[int, int, int]] = field(default_factory=list)  # arrival, worker, target
    moves: list[tuple[int, int, int, int]] = field(default_factory=list)  # time, worker, from, to

    def __post_init__(self) -> None:
        self.homes = [set() for _ in range(self.shards)]
        for worker in range(self.chance.randint(1, 24)):
            self.homes[self.chance.randrange(self.shards)].add(worker)
            self.joined_s[worker] = 0
        self._policies = [ShardBalance(shard, RULES) for shard in range(self.shards)]
        self._past: deque[list[ShardLoad]] = deque(maxlen=4)

    def load(self, shard: int) -> ShardLoad:
        workers, per_worker, demand = self.homes[shard], self.turns_per_worker, self.demand[shard]
        free = max(0, len(workers) - demand // per_worker)
        idle = sorted(workers)[-(-demand // per_worker) :]
        movable = sum(self.now_s - self.joined_s[worker] >= RULES.hold_s for worker in idle)
        return ShardLoad(shard, max(0, demand - per_worker * len(workers)), free, movable, per_worker)

    def step(self) -> None:
        self.now_s += 1
        for arrival_s, worker, target in [one for one in self.travelling if one[0] <= self.now_s]:
            self.travelling.remove((arrival_s, worker, target))
            self.homes[target].add(worker)
            self.joined_s[worker] = self.now_s
        self._past.append([self.load(shard) for shard in range(self.shards)])
        for shard, policy in enumerate(self._policies):
            seen = [self.chance.choice(list(self._past))[other] for other in range(self.shards) if other != shard]
            own = self.load(shard)
            for move in policy.decide(loads_of([*seen, own]), self.now_s):
                assert own.waiting_turns == 0 and 0 < move.count <= own.idle_workers
                assert next(load for load in seen if load.shard == move.target).is_starving
                self._send(shard, move.target, move.count)

    def _send(self, shard: int, target: int, count: int) -> None:
        idle = sorted(self.homes[shard])[-(-self.demand[shard] // self.turns_per_worker) :]
        movable = [worker for worker in idle if self.now_s - self.joined_s[worker] >= RULES.hold_s]
        for worker in movable[:count]:
            self.homes[shard].remove(worker)
            self.travelling.append((self.now_s + JOIN_S, worker, target))
            self.moves.append((self.now_s, worker, shard, target))

    def check(self) -> None:
        for begin_s, _, donor, _ in self.moves:
            window = [at_s for at_s, _, shard, _ in self.moves if shard == donor and 0 <= at_s - begin_s < 60]
            assert len(window) <= RULES.moves_per_minute
        for worker in self.joined_s:
            times = [at_s for at_s, moved, _, _ in self.moves if moved == worker]
            assert all(late - early >= RULES.hold_s for early, late in pairwise(times))
        assert sum(map(len, self.homes)) + len(self.travelling) == len(self.joined_s), "no worker is lost"


def cluster(seed: int) -> Cluster:
    chance = random.Random(seed)
    shards = chance.randint(2, 6)
    demand = [chance.choice([0, 0, 3, 10, 40]) for _ in range(shards)]
    return Cluster(chance, shards, chance.choice([1, 2, 8]), demand)


@pytest.mark.parametrize("seed", range(40))
def test_under_changing_loads_moves_are_bounded(seed: int) -> None:
    found = cluster(seed)
    for _ in range(400):
        if found.chance.random() < 0.1:
            found.demand[found.chance.randrange(found.shards)] = found.chance.choice([0, 1, 5, 20, 60])
        found.step()
    found.check()


@pytest.mark.parametrize("seed", range(40))
def test_under_constant_loads_no_worker_returns_and_moves_end(seed: int) -> None:
    found = cluster(seed)
    for _ in range(900):
        found.step()
    found.check()
    left = Counter((worker, shard) for _, worker, shard, _ in found.moves)
    assert not any((worker, target) in left for _, worker, _, target in found.moves), "a worker went back"
    assert all(at_s < 600 for at_s, *_ in found.moves), "moves never end"
    loads = [found.load(shard) for shard in range(found.shards)]
    assert not any(load.is_starving for load in loads) or not any(load.spare_workers for load in loads)
