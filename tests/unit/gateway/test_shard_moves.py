"""Which workers a shard gives to others, and what it tells them."""

from __future__ import annotations

from typing import Any

import pytest

from rose.api.worker_messages import EvictTurn, Heartbeat, Join, Leave, Move, ToAgent
from rose.config.server_settings import GatewaySettings
from rose.core.shard_balance import ShardLoad
from rose.engines.base import Request, Sampling
from rose.engines.token_stream import TokenStream
from rose.gateway.gateway_core import GatewayCore

SETTINGS = GatewaySettings(shards=("http://0", "http://1"), shard=0)
BUSY = ShardLoad(1, 6, 0, 0, 2)


class Shard:
    def __init__(self, settings: GatewaySettings = SETTINGS) -> None:
        self.core, self.now_s = GatewayCore("m", settings), 0.0
        self.sent: dict[str, list[ToAgent]] = {}
        self.records: list[Any] = []
        self.core.shard_moves.record = lambda now_s, seen, moves: self.records.append((seen, list(moves)))

    def join(self, name: str, **changes: Any) -> None:
        sent = self.sent[name] = []
        join = Join(name, "dedicated", "m", "0", 2, 1 << 16, 4096, **{"shards": 2, **changes})  # type: ignore[arg-type]
        self.core.join(join, sent.append, self.now_s)

    def pass_time(self, seconds: int, *others: ShardLoad) -> None:
        for _ in range(seconds):
            self.now_s += 1
            for worker in list(self.core.pool):
                heartbeat = Heartbeat(0, 0, 0, 1 << 16, "0", gate_open=True, is_offered=worker.registration.is_offered)
                self.core.receive(worker, heartbeat, self.now_s)
            self.core.tick(self.now_s)
            self.core.shard_moves.update(others, self.now_s)

    def turn(self, name: str) -> None:
        self.core.scheduler.submit(Request(name, (1, 2), Sampling(max_tokens=4)), TokenStream(), self.now_s)

    def moved(self) -> list[str]:
        return [name for name, sent in self.sent.items() if any(isinstance(message, Move) for message in sent)]


def test_a_worker_that_was_not_moved_before_may_move_at_once() -> None:
    shard = Shard()
    shard.join("a")
    shard.pass_time(4, BUSY)
    assert shard.moved() == ["a"]


def test_idle_workers_move_once_they_have_been_here_for_long() -> None:
    shard = Shard()
    for name in ("a", "b", "c", "d"):
        shard.join(name, has_moved=True)
    shard.pass_time(29, BUSY)
    assert shard.moved() == [] and shard.core.shard_moves.load(shard.now_s).idle_workers == 0
    shard.pass_time(3, BUSY)
    assert shard.moved() == ["a", "b", "c"] and shard.core.shard_moves.moved == 3
    [(seen, [move])] = shard.records
    assert (seen.loads[1], move.target, move.count) == (BUSY, 1, 3)
    worker = shard.core.pool.get("a")
    assert worker is not None
    shard.core.remove_worker(worker, shard.now_s)
    shard.turn("t")
    assert len(shard.core.pool.get("d").placement.attempt_ids) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "what, changes",
    [("knows one gateway only", {"shards": 0}), ("another list", {"shards": 3}), ("held back", {"is_offered": False})],
)
def test_some_workers_never_move(what: str, changes: dict[str, Any]) -> None:
    shard = Shard()
    shard.join("a", **changes)
    shard.pass_time(60, BUSY)
    assert shard.moved() == [], what


def test_a_single_gateway_moves_nothing() -> None:
    shard = Shard(GatewaySettings())
    shard.join("a")
    shard.pass_time(60, BUSY)
    assert shard.moved() == []


def test_a_worker_with_a_turn_stays() -> None:
    shard = Shard()
    shard.join("a")
    shard.turn("t")
    shard.pass_time(60, BUSY)
    assert shard.moved() == []


def test_a_worker_hands_its_turns_back_before_it_moves() -> None:
    shard = Shard()
    shard.join("a")
    shard.turn("t")
    worker = shard.core.pool.get("a")
    assert worker is not None
    shard.core.scheduler.drain(worker, shard.now_s, move_to=1)
    assert isinstance(shard.sent["a"][-1], EvictTurn)
    shard.core.remove_worker(worker, shard.now_s)
    assert shard.core.scheduler.waiting == 1, "its turn waits for another worker here"


def test_a_drained_worker_without_a_target_leaves() -> None:
    shard = Shard()
    shard.join("a")
    worker = shard.core.pool.get("a")
    assert worker is not None
    shard.core.scheduler.drain(worker, shard.now_s)
    assert isinstance(shard.sent["a"][-1], Leave)


def test_a_parked_device_counts_as_free() -> None:
    shard = Shard()
    shard.join("a", place="parked")
    assert shard.core.shard_moves.load(0.0).free_workers == 1
