"""Where each trajectory's prefix is cached, as far as the gateway can know.

A trajectory has one home: the worker that ran its last turn, with as many tokens as that turn ended with. What runs
holds its memory; what is left of a worker's memory keeps the prefixes of trajectories that are between two turns, and
when it shrinks, the one that was used longest ago is taken to be gone. New weights empty a cache.
"""

from __future__ import annotations


class Prefixes:
    """`idle_tokens` of a worker is what it keeps for trajectories between turns."""

    def __init__(self) -> None:
        self._home: dict[str, tuple[str, int]] = {}
        self._there: dict[str, set[str]] = {}
        self._idle: dict[str, dict[str, int]] = {}  # worker: trajectories between turns, the oldest first
        self.idle_tokens: dict[str, int] = {}

    def home(self, trajectory: str) -> tuple[str, int] | None:
        """Which worker has how many tokens of it."""
        return self._home.get(trajectory)

    def begin(self, trajectory: str, worker: str, tokens: int) -> None:
        """A turn runs there: its memory is the turn's now, and nothing is kept elsewhere."""
        self._move_in(trajectory, worker, tokens)

    def end(self, trajectory: str, worker: str, tokens: int) -> None:
        self._move_in(trajectory, worker, tokens)
        self._idle.setdefault(worker, {})[trajectory] = tokens
        self.idle_tokens[worker] = self.idle_tokens.get(worker, 0) + tokens

    def trim(self, worker: str, room_tokens: int) -> None:
        """Only so many tokens are left for idle prefixes."""
        idle = self._idle.get(worker)
        while idle and self.idle_tokens[worker] > room_tokens:
            self.forget(next(iter(idle)))

    def forget(self, trajectory: str) -> str | None:
        """Returns where it was."""
        home = self._home.pop(trajectory, None)
        if home is None:
            return None
        worker = home[0]
        self._there[worker].discard(trajectory)
        tokens = self._idle.get(worker, {}).pop(trajectory, 0)
        if tokens:
            self.idle_tokens[worker] -= tokens
        return worker

    def empty(self, worker: str) -> None:
        for trajectory in self._there.pop(worker, ()):
            del self._home[trajectory]
        self._idle.pop(worker, None)
        self.idle_tokens.pop(worker, None)

    def _move_in(self, trajectory: str, worker: str, tokens: int) -> None:
        self.forget(trajectory)
        self._home[trajectory] = (worker, tokens)
        self._there.setdefault(worker, set()).add(trajectory)
