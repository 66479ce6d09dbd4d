"""Baseline routers: rules that no user should run, to compare with.

`least`   the least loaded worker that has room.
`sticky`  the worker of the trajectory's last turn for as long as that worker accepts turns, even if it is full.
"""

from __future__ import annotations

from typing import Any

from rose.core.router import Router
from rose.core.routing_rules import ROUTER_KINDS, Chosen, TurnOutlook, TurnView, Wait, full, least_loaded
from rose.core.worker_table import Column, WorkerTable


class LeastLoadedRouter(Router):
    """Balances load, and ignores prefixes, lengths and reclaims."""

    def __init__(self, **options: Any) -> None:
        super().__init__("paper", **options)  # turns wait in arrival order and leave a blocked worker at once
        self._room_is_memory = True

    def _select(self, turn: TurnView, outlook: TurnOutlook, able: Column, now_s: float) -> Chosen | Wait:
        return _by_load(self._table, outlook, able)


class StickyRouter(Router):
    """Keeps every trajectory on one worker."""

    def __init__(self, **options: Any) -> None:
        super().__init__("paper", **options)

    def _select(self, turn: TurnView, outlook: TurnOutlook, able: Column, now_s: float) -> Chosen | Wait:
        table, live = self._table, self._live.get(turn.trajectory)
        name = live.worker if live is not None else turn.last_worker
        row = table.index.get(name, -1) if name is not None else -1
        if row < 0 or not able[row]:
            return _by_load(table, outlook, able)
        if table.room_tokens[row] < outlook.need_tokens:
            return Wait(f"`{name}`, where it began, is full", is_for_all=False)
        return row, "where it began"


def _by_load(table: WorkerTable, turn: TurnOutlook, able: Column) -> Chosen | Wait:
    room = able & (table.room_tokens >= turn.need_tokens)
    return (least_loaded(table, room), "the least loaded") if room.any() else full(able)


BASELINES: dict[str, type[Router]] = {"least": LeastLoadedRouter, "sticky": StickyRouter}
ROUTERS = (*ROUTER_KINDS, *BASELINES)


def make_router(name: str, **options: Any) -> Router:
    baseline = BASELINES.get(name)
    return baseline(**options) if baseline is not None else Router(name, **options)  # type: ignore[arg-type]
