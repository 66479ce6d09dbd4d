"""What an operator ordered for the workers of a pool, and what follows for one worker.

An order goes to one worker by its name, to all workers with some labels, or to all workers. It holds until a later
order replaces it, also for workers that join later. For one worker the newest order counts that its name, its labels or
the whole pool was given; the state and the limit are ordered apart. An order to all workers replaces what was ordered
before, so the memory is bounded by the names and labels that were ordered since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

OrderedState = Literal["lending", "paused", "drained"]
"""`paused`: no turns, the rollout model stays loaded. `drained`: no turns, and its memory goes back to serving."""
OrderAction = Literal["pause", "resume", "drain", "limits"]
STATES: Mapping[OrderAction, OrderedState] = {"pause": "paused", "resume": "lending", "drain": "drained"}
TARGETS_MAX = 1 << 16  # names and sets of labels with orders; then the oldest are forgotten


@dataclass(frozen=True, slots=True)
class Target:
    """One worker by its `name`, or the workers that have all `labels` (sorted), or all workers without either."""

    name: str = ""
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def is_all(self) -> bool:
        return not self.name and not self.labels

    def includes(self, name: str, labels: Mapping[str, str]) -> bool:
        """Return whether a worker belongs to this target."""
        if self.name:
            return self.name == name
        return all(labels.get(key) == value for key, value in self.labels)


@dataclass(frozen=True, slots=True)
class StandingOrder:
    """The newest order to one target. A number is that of the order, 0 for none; `turns_max` None sets no limit."""

    state: OrderedState = "lending"
    state_number: int = 0
    turns_max: int | None = None
    limit_number: int = 0


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What holds for one worker."""

    state: OrderedState = "lending"
    turns_max: int | None = None


NO_ORDER = WorkerOrder()
Orders = dict[Target, StandingOrder]


def targets_of(names: Iterable[str], labels: Mapping[str, str]) -> list[Target]:
    """Return the targets that an order names; all workers if it names none."""
    named = [Target(name) for name in dict.fromkeys(names)]
    return named or [Target(labels=tuple(sorted(labels.items())))]


def after_order(
    orders: Orders, number: int, targets: Iterable[Target], action: OrderAction, turns_max: int | None = None
) -> Orders:
    """Return what holds after one more order. Its number is greater than that of every order before."""
    result = dict(orders)
    for target in targets:
        if target.is_all:
            result = _without(result, action)
        known = result.pop(target, StandingOrder())
        if action == "limits":
            result[target] = replace(known, turns_max=turns_max, limit_number=number)
        else:
            result[target] = replace(known, state=STATES[action], state_number=number)
    if len(result) > TARGETS_MAX:
        newest = sorted(result.items(), key=lambda item: max(item[1].state_number, item[1].limit_number))
        result = dict(newest[-TARGETS_MAX:])
    return result


def _without(orders: Orders, action: OrderAction) -> Orders:
    """Return the orders without those that an order to all workers replaces."""
    kept: Orders = {}
    for target, order in orders.items():
        if action == "limits":
            order = replace(order, turns_max=None, limit_number=0)
        else:
            order = replace(order, state="lending", state_number=0)
        if order.state_number or order.limit_number:
            kept[target] = order
    return kept


def order_for(orders: Orders, name: str, labels: Mapping[str, str]) -> WorkerOrder:
    """Return what holds for one worker."""
    return orders_for(orders, [(name, labels)])[0]


def orders_for(orders: Orders, workers: Iterable[tuple[str, Mapping[str, str]]]) -> list[WorkerOrder]:
    """Return the same for many workers, in their order. Orders by name are looked up, the others are tried."""
    wide = {target: order for target, order in orders.items() if not target.name}
    result = []
    for name, labels in workers:
        named = orders.get(Target(name))
        candidates = _wide(wide, labels)
        result.append(_newest([*candidates, named] if named is not None else candidates))
    return result


def _wide(orders: Orders, labels: Mapping[str, str]) -> list[StandingOrder]:
    return [order for target, order in orders.items() if not target.name and target.includes("", labels)]


def _newest(candidates: list[StandingOrder]) -> WorkerOrder:
    state = max(candidates, key=lambda order: order.state_number, default=StandingOrder())
    limit = max(candidates, key=lambda order: order.limit_number, default=StandingOrder())
    return WorkerOrder(
        state.state if state.state_number else "lending", limit.turns_max if limit.limit_number else None
    )
