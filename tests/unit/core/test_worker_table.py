"""The columns of the worker table and the prefixes that workers hold."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rose.core.worker_table import (
    CALIBRATION_MAX,
    CALIBRATION_WEIGHT,
    COLUMNS,
    RATE_WEIGHT,
    Prefixes,
    ReclaimHistory,
    WorkerTable,
    WorkerView,
)

A = WorkerView("a", max_concurrency=4, kv_tokens=1000, prefill_tok_s=1000.0, decode_tok_s=50.0)
LENT = replace(A, name="0 lent", is_dedicated=False)


def new_table(*workers: WorkerView) -> WorkerTable:
    table = WorkerTable(ReclaimHistory(), crowding=2.0, promise_share=0.9)
    for worker in workers:
        table.put(worker)
    return table


def test_rows_are_dedicated_workers_first_and_then_by_name() -> None:
    table = new_table(LENT, replace(A, name="b"), A)
    assert table.names == ["a", "b", "0 lent"]
    assert table.index == {"a": 0, "b": 1, "0 lent": 2}


def test_counters_move_with_their_rows() -> None:
    table = new_table(replace(A, name="b"))
    table.add_turns(0, 2, 300, 1.5, 0.0)
    table.put(A)
    row = table.index["b"]
    assert (row, table.turns[row], table.held_tokens[row], table.urgency[row]) == (1, 2, 300, 1.5)
    table.remove("a")
    assert table.turns.tolist() == [2.0] and len(table) == 1
    assert {len(getattr(table, name)) for name in COLUMNS} == {1}


def test_room_is_free_memory_within_the_concurrency_limit() -> None:
    table = new_table(A)
    assert math.isinf(table.room_tokens[0]), "an empty worker takes any turn"
    table.add_turns(0, 1, 400, 1.0, 0.0)
    table.idle_tokens[0] = 100
    table.refresh(0)
    assert (table.room_tokens[0], table.spare_tokens[0], table.free_tokens[0]) == (600, 400, 500)
    assert not table.is_full
    table.add_turns(0, 3, 0, 1.0, 0.0)
    table.refresh(0)
    assert table.room_tokens[0] == table.spare_tokens[0] == -1 and table.is_full
    table.add_turns(0, -4, -400, -2.0, 7.0)
    assert (table.empty_since_s[0], table.urgency[0]) == (7.0, 0.0)


def test_a_first_rate_is_taken_as_it_is_and_later_ones_are_smoothed() -> None:
    table = new_table(A)
    assert table.prefill_s[0] == pytest.approx(0.001)
    table.put(replace(A, prefill_tok_s=500.0))
    assert table.prefill_s[0] == pytest.approx(0.001 + RATE_WEIGHT * 0.001)
    table.put(replace(A, name="b", prefill_tok_s=None))
    assert table.prefill_s[1] == table.prefill_s[0], "a worker without a rate gets the median of the others"


def test_the_calibration_of_one_turn_is_bounded() -> None:
    table = new_table(A)
    table.calibrate(0, 1e9, 1.0)
    assert table.calibration[0] == pytest.approx(1 + (CALIBRATION_MAX - 1) * CALIBRATION_WEIGHT)


def test_reclaims_raise_the_rate_and_decay_back_to_that_of_the_kind() -> None:
    table, history = new_table(LENT, A), ReclaimHistory()
    row = table.index["0 lent"]
    table.rate(0.0)
    assert table.reclaims_per_s[row] == pytest.approx(history.borrowed_per_s)
    assert table.reclaims_per_s[table.index["a"]] == pytest.approx(history.dedicated_per_s)
    table.observe(row, 10.0, 3, 10.0)
    risen = float(table.reclaims_per_s[row])
    assert risen > 5 * history.borrowed_per_s
    table.rate(10.0 + 20 * history.half_life_s)
    assert table.reclaims_per_s[row] == pytest.approx(history.borrowed_per_s, rel=0.01)


def test_closed_and_long_blocked_workers_are_not_able() -> None:
    table = new_table(
        A, replace(A, name="b", closed_until_s=11.0), replace(A, name="c", is_open=False),
        replace(A, name="d", blocked_since_s=7.0), replace(A, name="e", blocked_since_s=9.0),
    )  # fmt: skip
    assert np.array(table.names)[table.able(10.0, 2.0)].tolist() == ["a", "e"]
    assert math.isinf(table.largest(10.0, 2.0))
    assert new_table(replace(A, is_open=False)).largest(10.0, 2.0) == -1.0


def test_a_prefix_has_one_holder_and_is_idle_between_turns() -> None:
    prefixes = Prefixes()
    prefixes.begin("t", "a", 100)
    assert prefixes.holder("t") == ("a", 100) and not prefixes.idle_tokens
    prefixes.end("t", "a", 150)
    assert prefixes.holder("t") == ("a", 150) and prefixes.idle_tokens == {"a": 150}
    prefixes.begin("t", "b", 160)
    assert prefixes.holder("t") == ("b", 160) and prefixes.idle_tokens == {"a": 0}


def test_idle_prefixes_are_evicted_in_the_order_of_their_last_use() -> None:
    prefixes = Prefixes()
    for trajectory in ("first", "second", "third", "first"):
        prefixes.end(trajectory, "a", 100)
    prefixes.trim("a", 250)
    assert [prefixes.holder(name) is not None for name in ("first", "second", "third")] == [True, False, True]
    prefixes.empty("a")
    assert prefixes.holder("first") is None and prefixes.idle_tokens == {}
    assert prefixes.forget("first") is None
