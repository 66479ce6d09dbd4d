"""The rules of the router on a worker table: a row with a reason, or a reason to wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.core.routing_rules import (
    PAPER_TURNS_MAX,
    PROMISED,
    RoutingCosts,
    TurnOutlook,
    Wait,
    by_cost,
    by_the_paper,
    costs_s,
)
from rose.core.worker_table import ReclaimHistory, WorkerTable, WorkerView

NOW_S = 100.0
COSTS = RoutingCosts()
A = WorkerView("a", max_concurrency=32, kv_tokens=10_000, prefill_tok_s=10_000.0, decode_tok_s=100.0)
B = replace(A, name="b")
LENT = replace(A, name="lent", is_dedicated=False, slack_s=0.1)
TURN = TurnOutlook(1000, 1200, 100.0)


def new_table(*workers: WorkerView, turns: int = 0) -> WorkerTable:
    table = WorkerTable(ReclaimHistory(), COSTS.crowding, COSTS.promise_share)
    for worker in workers:
        table.put(worker)
    for row in range(len(workers)):
        table.add_turns(row, turns, 1000 * turns, float(turns), 0.0)
        table.refresh(row)
    table.rate(NOW_S)
    return table


def chosen(table: WorkerTable, turn: TurnOutlook = TURN) -> str | Wait:
    choice = by_cost(table, turn, table.able(NOW_S, 2.0), NOW_S, COSTS)
    return choice if isinstance(choice, Wait) else table.names[choice[0]]


def test_ties_go_to_dedicated_workers_and_then_by_name() -> None:
    assert chosen(new_table(LENT, B, A)) == "a"
    assert chosen(new_table(LENT)) == "lent"


def test_a_prefix_saves_its_part_of_the_prompt() -> None:
    table = new_table(A, B)
    held = replace(TURN, holder=1, cached_tokens=900)
    saved_s = costs_s(table, TURN, NOW_S, COSTS) - costs_s(table, held, NOW_S, COSTS)
    assert saved_s[0] == pytest.approx(0.0) and saved_s[1] > 900 / 10_000.0 * 0.9
    assert chosen(table, held) == "b"


def test_a_blocked_worker_costs_the_time_that_it_has_been_blocked() -> None:
    table = new_table(A, replace(B, blocked_since_s=NOW_S - 1.5))
    costs = costs_s(table, TURN, NOW_S, COSTS)
    assert costs[1] - costs[0] == pytest.approx(1.5, rel=0.01)


def test_urgency_weighs_own_time_and_not_the_loss_of_others() -> None:
    table = new_table(A, turns=2)
    usual, urgent = (costs_s(table, replace(TURN, urgency=urgency), NOW_S, COSTS)[0] for urgency in (1.0, 4.0))
    assert usual < urgent < 4 * usual


def test_a_tracked_turn_waits_while_its_room_is_promised() -> None:
    table = new_table(A, turns=1)
    table.idle_tokens[0] = 7500
    table.refresh(0)
    assert chosen(table) == "a"
    assert chosen(table, replace(TURN, is_tracked=True)) is PROMISED
    assert chosen(table, replace(TURN, is_tracked=True, holder=0, cached_tokens=900)) == "a"


@pytest.mark.parametrize(
    "workers, words",
    [
        ([], "no worker has joined"),
        ([replace(A, is_open=False)], "none of 1 workers takes turns now"),
        ([replace(A, max_concurrency=2), replace(B, max_concurrency=2)], "all 2 workers are full"),
    ],
)
def test_waiting_has_a_reason(workers: list[WorkerView], words: str) -> None:
    table = new_table(*workers, turns=2)
    for choice in (chosen(table), by_the_paper(table, TURN, table.able(NOW_S, 2.0))):
        assert isinstance(choice, Wait) and choice.reason == words and choice.is_for_all


def test_the_paper_prefers_holder_then_dedicated_then_slack_then_any() -> None:
    table = new_table(A, B, LENT, replace(LENT, name="no slack", slack_s=0.0), replace(LENT, name="tight", slack_s=0.0))
    able = table.able(NOW_S, 2.0)
    choices = []
    for turn in (replace(TURN, holder=3), TURN, TURN, TURN, TURN):
        choice = by_the_paper(table, turn, able)
        assert not isinstance(choice, Wait)
        choices.append((table.names[choice[0]], choice[1]))
        table.turns[choice[0]] = PAPER_TURNS_MAX
    assert choices == [
        ("no slack", "it holds the prefix"), ("a", "a dedicated worker"), ("b", "a dedicated worker"),
        ("lent", "a borrowed worker with slack"), ("tight", "the least loaded"),
    ]  # fmt: skip
    assert isinstance(by_the_paper(table, TURN, able), Wait)
