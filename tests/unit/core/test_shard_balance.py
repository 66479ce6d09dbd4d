"""When idle workers move from one shard to another, and how many."""

from __future__ import annotations

import pytest

from rose.core.shard_balance import BalanceRules, MoveWorkers, ShardBalance, ShardLoad, loads_of

BUSY, IDLE = ShardLoad(1, 20, 0, 0, 4), ShardLoad(0, 0, 6, 6, 4)
Look = tuple[float, list[ShardLoad], list[tuple[int, int]]]  # when, the loads seen, moves as (target, count)


@pytest.mark.parametrize(
    "story, looks",
    [
        ("as many as the turns need", [(0, [IDLE, BUSY], []), (1, [IDLE, BUSY], []), (2, [IDLE, BUSY], [(1, 5)])]),
        ("no more than are idle", [(0, [ShardLoad(0, 0, 2, 2, 4), BUSY], []),
                                   (2, [ShardLoad(0, 0, 2, 2, 4), BUSY], [(1, 2)])]),
        ("not while a worker is free there", [(0, [IDLE, ShardLoad(1, 20, 1, 0, 4)], []),
                                              (9, [IDLE, ShardLoad(1, 20, 1, 0, 4)], [])]),
        ("not for a moment's queue", [(0, [IDLE], []), (9, [IDLE, BUSY], []), (10, [IDLE, ShardLoad(1, 0, 1, 0)], []),
                                      (11, [IDLE, BUSY], [])]),
        ("not from a shard that was busy", [(0, [ShardLoad(0, 1, 0, 0), BUSY], []), (5, [IDLE, BUSY], []),
                                            (7, [IDLE, BUSY], [(1, 5)])]),
        ("again once those have joined", [(0, [IDLE, BUSY], []), (2, [IDLE, BUSY], [(1, 5)]), (3, [IDLE, BUSY], []),
                                          (6, [IDLE, BUSY], [(1, 5)])]),
        ("the donor with most goes first", [(0, [IDLE, BUSY, ShardLoad(2, 0, 9, 9, 4)], []),
                                            (2, [IDLE, BUSY, ShardLoad(2, 0, 9, 9, 4)], [])]),
        ("donors share a large need", [(0, [IDLE, ShardLoad(1, 44, 0, 0, 4), ShardLoad(2, 0, 9, 9, 4)], []),
                                       (2, [IDLE, ShardLoad(1, 44, 0, 0, 4), ShardLoad(2, 0, 9, 9, 4)], [(1, 2)])]),
        ("the neediest shard first", [(0, [IDLE, ShardLoad(1, 8, 0, 0, 4), ShardLoad(2, 20, 0, 0, 4)], []),
                                      (2, [IDLE, ShardLoad(1, 8, 0, 0, 4), ShardLoad(2, 20, 0, 0, 4)],
                                       [(2, 5), (1, 1)])]),
        ("nothing without its own load", [(0, [BUSY], []), (9, [BUSY], [])]),
    ],
)  # fmt: skip
def test_idle_workers_move_to_starving_shards(story: str, looks: list[Look]) -> None:
    balance = ShardBalance(0)
    for now_s, loads, moves in looks:
        decided = balance.decide(loads_of(loads), now_s)
        assert [(move.target, move.count) for move in decided] == moves, (story, now_s)


def test_moves_in_a_minute_are_bounded() -> None:
    balance, moved = ShardBalance(0, BalanceRules(moves_per_minute=7)), []
    for second in range(130):
        moved += [(second, move.count) for move in balance.decide(loads_of([IDLE, BUSY]), second)]
    assert [count for _, count in moved] == [5, 2, 5, 2, 5, 2]
    assert moved[2][0] - moved[0][0] >= 60


def test_a_decision_has_its_reason() -> None:
    balance = ShardBalance(0)
    balance.decide(loads_of([BUSY, IDLE]), 0.0)
    assert balance.decide(loads_of([BUSY, IDLE]), 2.0) == [
        MoveWorkers(1, 5, "shard 1 has 20 waiting turns and no free worker")
    ]
