"""Which order holds for a worker: the newest that its name, its labels or the whole pool was given."""

from __future__ import annotations

import random

import pytest

from rose.core import fleet_orders
from rose.core.fleet_orders import NO_ORDER, Orders, Target, WorkerOrder, after_order, order_for, orders_for, targets_of

RACK = {"rack": "a3"}


def ordered(*orders: tuple[str, dict[str, object]]) -> Orders:
    result: Orders = {}
    for number, (action, scope) in enumerate(orders, 1):
        targets = targets_of(scope.get("names", ()), scope.get("labels", {}))  # type: ignore[arg-type]
        result = after_order(result, number, targets, action, scope.get("turns"))  # type: ignore[arg-type]
    return result


def test_without_orders_a_worker_is_lent_without_a_limit() -> None:
    assert order_for({}, "a", {}) == NO_ORDER == WorkerOrder("lending", None)


def test_the_newest_order_counts_whatever_it_was_given_to() -> None:
    orders = ordered(("pause", {}), ("resume", {"labels": RACK}), ("drain", {"names": ["a"]}))
    assert order_for(orders, "a", RACK).state == "drained"
    assert order_for(orders, "b", RACK).state == "lending"
    assert order_for(orders, "b", {"rack": "a4"}).state == "paused"


def test_an_order_to_all_replaces_those_before_and_leaves_the_other_kind() -> None:
    limited = ("limits", {"names": ["a"], "turns": 2})
    orders = ordered(("drain", {"names": ["a"]}), limited, ("pause", {"labels": RACK}), ("resume", {}))
    assert order_for(orders, "a", RACK) == WorkerOrder("lending", 2)
    assert set(orders) == {Target("a"), Target()}
    assert order_for(ordered(("limits", {"turns": 3}), ("limits", {})), "a", {}).turns_max is None


def test_a_worker_must_have_all_labels_of_an_order() -> None:
    orders = ordered(("pause", {"labels": {"rack": "a3", "team": "x"}}))
    assert order_for(orders, "a", {"team": "x", "rack": "a3", "more": ""}).state == "paused"
    assert order_for(orders, "a", RACK) == NO_ORDER


def test_orders_of_many_workers_are_those_of_each_one() -> None:
    chance = random.Random(3)
    orders: Orders = {}
    for number in range(1, 60):
        scope = chance.choice(([], ["a"], ["b", "c"])), chance.choice(({}, RACK, {"team": "x"}))
        action = chance.choice(("pause", "resume", "drain", "limits"))
        orders = after_order(orders, number, targets_of(*scope), action, chance.randrange(1, 5))  # type: ignore[arg-type]
    workers = [(name, labels) for name in "abcd" for labels in ({}, RACK, RACK | {"team": "x"})]
    assert orders_for(orders, workers) == [order_for(orders, name, labels) for name, labels in workers]


def test_the_oldest_targets_are_forgotten_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_orders, "TARGETS_MAX", 3)
    orders = ordered(*(("pause", {"names": [name]}) for name in "abcde"))
    assert sorted(target.name for target in orders) == ["c", "d", "e"]
