"""The paper's routing rule with its limit on trajectories: at most 16 live on a worker, each keeps its place.

`core.routing_rules` counts turns, because a live worker sees no trajectories of its own. Here a trajectory holds one
of the worker's places from its first turn to its end, also while its environment runs, so its prefix stays.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from rose.core.router import Router
from rose.core.routing_rules import PAPER_TURNS_MAX, Chosen, TurnOutlook, TurnView, Wait, full, least_loaded
from rose.core.worker_table import Column, WorkerTable


class TrajectoryRouter(Router):
    """The paper's order of workers under a limit on the trajectories of each; `limit` is per worker."""

    def __init__(self, *, limit: int = PAPER_TURNS_MAX, **options: Any) -> None:
        super().__init__("paper", **options)
        self._limit = limit
        self._homes: dict[str, str] = {}
        self._count: Counter[str] = Counter()

    def _select(self, turn: TurnView, outlook: TurnOutlook, able: Column, now_s: float) -> Chosen | Wait:
        table = self._table
        home = table.index.get(self._homes.get(turn.trajectory, ""), -1)
        if home >= 0 and able[home]:
            return home, "it has a place there"
        counts = np.array([self._count[name] for name in table.names])
        room = able & (counts < np.minimum(table.max_concurrency, self._limit))
        for some, reason in (
            (room & (table.is_dedicated > 0), "a dedicated worker"),
            (room & (table.slack_s > 0), "a borrowed worker with slack"),
            (room, "the least loaded"),
        ):
            if some.any():
                return self._fewest(table, counts, some), reason
        return full(able)

    @staticmethod
    def _fewest(table: WorkerTable, counts: np.ndarray, some: Column) -> int:
        fewest = some & (counts == counts[some].min())
        return least_loaded(table, fewest)

    def rank(self, turn: TurnView) -> float:
        """Return the rank of a waiting turn: trajectories that have begun go first."""
        return 0.0 if turn.trajectory in self._live else 1.0

    def on_placed(self, turn_id: str, turn: TurnView, worker: str, now_s: float) -> None:
        super().on_placed(turn_id, turn, worker, now_s)
        before = self._homes.get(turn.trajectory)
        if before != worker:
            self._leave(turn.trajectory)
            self._homes[turn.trajectory] = worker
            self._count[worker] += 1

    def on_finished(self, trajectory: str, group: str | None, turns: int, tokens: int) -> None:
        super().on_finished(trajectory, group, turns, tokens)
        self._leave(trajectory)

    def remove_worker(self, name: str) -> None:
        super().remove_worker(name)
        for trajectory in [trajectory for trajectory, home in self._homes.items() if home == name]:
            self._leave(trajectory)

    def _leave(self, trajectory: str) -> None:
        home = self._homes.pop(trajectory, None)
        if home is not None:
            self._count[home] -= 1
