"""Which worker takes this turn: the one that holds the trajectory's prefix if it has room, else the least loaded.

A worker has room while it has a free seat and the turn's tokens, at their most, fit beside those placed there before;
an idle worker takes any turn, since if it is too long for one it is too long for all, and the engine says so best. A
worker that just said no is left alone for the time it asked for. Dedicated workers go before borrowed ones on a tie.
When nobody has room the turn waits at the gateway, where the next free seat of any worker finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at the moment of a decision. `turns` and `tokens_held` count what was placed and has not ended."""

    name: str
    is_dedicated: bool
    is_open: bool
    turns: int
    seats: int
    tokens_held: int
    kv_tokens: int
    closed_until_s: float = 0.0

    @property
    def load(self) -> float:
        return (self.turns + 1) / max(1, self.seats)


@dataclass(frozen=True, slots=True)
class TurnView:
    """`tokens_max` is prompt and answer at their most; `last_worker` ran the trajectory's last turn."""

    tokens_max: int
    last_worker: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    reason: str


def choose(turn: TurnView, workers: Iterable[WorkerView], now_s: float) -> Place | Wait:
    known = list(workers)
    able = [worker for worker in known if worker.is_open and now_s >= worker.closed_until_s]
    roomy = [worker for worker in able if _has_room(worker, turn)]
    if not roomy:
        return Wait(_why(known, able))
    for worker in roomy:
        if worker.name == turn.last_worker:
            return Place(worker.name, "it holds the prefix")
    least = min(roomy, key=lambda worker: (worker.load, not worker.is_dedicated, worker.name))
    return Place(least.name, "the least loaded")


def _has_room(worker: WorkerView, turn: TurnView) -> bool:
    if worker.turns == 0:
        return worker.seats > 0
    return worker.turns < worker.seats and worker.tokens_held + turn.tokens_max <= worker.kv_tokens


def _why(known: list[WorkerView], able: list[WorkerView]) -> str:
    if not known:
        return "no worker has joined"
    if not able:
        return f"none of {len(known)} workers takes turns now"
    return f"all {len(able)} workers are full"
