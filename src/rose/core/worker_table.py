"""The router's knowledge of workers: a table of facts and counters, and which worker holds the prefix of a trajectory.

The table has one array per column, so that a decision scans 1,000 workers in microseconds. Rows are sorted in the order
of ties, dedicated before borrowed and then by name, so `argmin` returns the right one. Values derived from facts and
counters are updated when a row changes; workers join and leave rarely.

A prefix holder is the worker of a trajectory's last turn. Running turns hold their own memory. The rest of a worker's
memory keeps the prefixes of trajectories between two turns; when it shrinks, the least recently used prefix is assumed
to be evicted. New weights empty the cache.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rose.core.versions import VersionDemand

Column = npt.NDArray[Any]
Number = TypeVar("Number", float, Column)

PREFILL_TOK_S = 4000.0  # of a worker without a reported rate, if no worker has one
DECODE_TOK_S = 40.0  # the same, for one sequence
RATE_WEIGHT = 0.1  # of the newest heartbeat; they come every second or so
CALIBRATION_WEIGHT = 0.1  # of the newest turn in a worker's ratio of actual to predicted time
CALIBRATION_MAX = 8.0  # bounds the ratio of a single turn
STALL_WEIGHT = 0.2  # of the newest stall in a worker's usual one
STALL_MAX = 10.0  # times the usual length bounds a single stall


@dataclass(frozen=True, slots=True)
class WorkerView:
    """Facts of one worker. The router itself counts what was placed there.

    `is_open` says that it accepts turns: it is not draining, and turns may run on its weights. `decode_tok_s` is the
    rate of one sequence in the current batch; unknown rates and slack are None. `gated_since_s` is when its admission
    became blocked, or None, and `opened_s` when that last ended. Another `version` means an empty prefix cache;
    `version_number` is its place in the order of publishing, -1 for weights that were never published.
    """

    name: str
    is_dedicated: bool = True
    is_open: bool = True
    max_concurrency: int = 1
    kv_tokens: int = 0
    closed_until_s: float = 0.0
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    slack_s: float | None = None
    blocked_since_s: float | None = None
    version: str = ""
    opened_s: float = 0.0
    version_number: int = -1


@dataclass(frozen=True, slots=True)
class ReclaimHistory:
    """How a worker's past predicts reclaims, as a rate per second that turns run there.

    Observations decay by half every `half_life_s`, back to the rate expected of the worker's kind.
    """

    half_life_s: float = 120.0
    observed_s: float = 60.0  # weight of the expected rate, as time of observation
    borrowed_per_s: float = 1 / 300
    dedicated_per_s: float = 1 / 36_000
    stall_s: float = 5.0  # length of a stall, before any was observed


class WorkerTable:
    """All workers of a pool. `index` maps names to rows; it changes when a worker joins or leaves.

    `crowding` is the relative slowdown of a sequence on a full worker. `promise_share` is how much of a worker's memory
    may be promised to trajectories that have begun.
    """

    is_dedicated: Column
    max_concurrency: Column
    kv_tokens: Column
    closed_until_s: Column  # infinite while it accepts no turns
    blocked_since_s: Column  # infinite while admission is not blocked
    slack_s: Column
    version_number: Column
    prefill_s: Column  # per token
    decode_s: Column  # per token of one sequence on an empty worker
    turns: Column
    held_tokens: Column
    idle_tokens: Column  # prefixes of trajectories between two turns
    urgency: Column  # sum over its turns
    empty_since_s: Column  # infinite while it has turns
    busy_until_s: Column  # with prompts placed there
    calibration: Column  # actual over predicted time of its turns
    reclaims: Column
    observed_s: Column
    updated_s: Column
    usual_stall_s: Column  # usual length of its admission stalls
    room_tokens: Column  # the largest turn it can take
    spare_tokens: Column  # the same for a trajectory without a prefix
    free_tokens: Column  # neither held nor idle prefixes; negative if overcommitted
    crowd_s: Column  # that each held token adds to a token's time
    token_s: Column  # per token of one more sequence
    lasting_s: Column  # that all its trajectories add to a token's time if all run
    expected_per_s: Column
    reclaims_per_s: Column  # as of `_rated_s`

    def __init__(self, history: ReclaimHistory, crowding: float, promise_share: float) -> None:
        self.history, self._crowding, self._promise_share = history, crowding, promise_share
        self.index: dict[str, int] = {}
        self.names: list[str] = []
        self.versions: dict[str, str] = {}
        self._order: list[tuple[bool, str]] = []
        self._rated_s = -1.0
        self._roomy: set[int] = set()
        for name in COLUMNS:
            setattr(self, name, np.zeros(0))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_full(self) -> bool:
        """Return whether no worker has room for even the shortest turn."""
        return not self._roomy

    # Workers

    def put(self, view: WorkerView) -> int:
        """Set a worker's facts, keep its counters, and return its row."""
        row = self.index.get(view.name)
        if row is None:
            row = self._insert(view)
        self.max_concurrency[row], self.kv_tokens[row] = view.max_concurrency, view.kv_tokens
        stall_s = view.opened_s - float(self.blocked_since_s[row])
        if stall_s > 0 and math.isfinite(self.closed_until_s[row]):  # while closed by the owner it is no stall
            usual_s = float(self.usual_stall_s[row])
            self.usual_stall_s[row] += STALL_WEIGHT * (min(stall_s, STALL_MAX * usual_s) - usual_s)
        self.closed_until_s[row] = view.closed_until_s if view.is_open else math.inf
        self.blocked_since_s[row] = math.inf if view.blocked_since_s is None else view.blocked_since_s
        self.version_number[row] = view.version_number
        self.slack_s[row] = math.inf if view.slack_s is None else view.slack_s
        # The first reported rate is taken as it is, and later ones are smoothed, so that a busy moment repels no turns.
        weight = RATE_WEIGHT if view.name in self.versions else 1.0
        if view.prefill_tok_s:
            self.prefill_s[row] += (1.0 / view.prefill_tok_s - self.prefill_s[row]) * weight
        if view.decode_tok_s:
            share = float(self.held_tokens[row]) / max(1, view.kv_tokens)
            decode_s = 1.0 / view.decode_tok_s / (1.0 + self._crowding * share)
            self.decode_s[row] += (decode_s - self.decode_s[row]) * weight
        self.versions[view.name] = view.version
        self.refresh(row)
        return row

    def _insert(self, view: WorkerView) -> int:
        key = (not view.is_dedicated, view.name)
        row = bisect.bisect_left(self._order, key)
        self._order.insert(row, key)
        history = self.history
        prefill_s, decode_s = 1.0 / PREFILL_TOK_S, 1.0 / DECODE_TOK_S
        if self.names:  # the median of the others, until the worker reports a rate
            prefill_s, decode_s = float(np.median(self.prefill_s)), float(np.median(self.decode_s))
        cells = {"prefill_s": prefill_s, "decode_s": decode_s, "is_dedicated": view.is_dedicated, "calibration": 1.0}
        cells |= {"empty_since_s": -math.inf, "gated_since_s": math.inf, "usual_stall_s": history.stall_s}
        cells["expected_per_s"] = history.dedicated_per_s if view.is_dedicated else history.borrowed_per_s
        cells["reclaims_per_s"] = cells["expected_per_s"]
        for name in COLUMNS:
            setattr(self, name, np.insert(getattr(self, name), row, cells.get(name, 0.0)))
        self._renumber()
        return row

    def remove(self, name: str) -> None:
        row = self.index[name]
        del self._order[row], self.versions[name]
        for column in COLUMNS:
            setattr(self, column, np.delete(getattr(self, column), row))
        self._renumber()

    def _renumber(self) -> None:
        self.names = [name for _, name in self._order]
        self.index = {name: row for row, name in enumerate(self.names)}
        self._roomy = set((self.room_tokens >= 0).nonzero()[0].tolist())

    # Counters

    def add_turns(self, row: int, turns: int, tokens: int, urgency: float, now_s: float) -> None:
        """Add turns and what they hold; negative numbers remove them."""
        there = float(self.turns[row]) + turns
        self.turns[row], self.held_tokens[row] = there, float(self.held_tokens[row]) + tokens
        self.empty_since_s[row] = math.inf if there else now_s
        self.urgency[row] = float(self.urgency[row]) + urgency if there else 0.0

    def refresh(self, row: int) -> None:
        """Update the derived values of a row."""
        turns, turns_max = float(self.turns[row]), float(self.max_concurrency[row])
        kv, held, idle = float(self.kv_tokens[row]), float(self.held_tokens[row]), float(self.idle_tokens[row])
        room, spare = kv - held, self._promise_share * kv - held - idle
        if turns >= turns_max:
            room = spare = -1.0
        elif turns == 0:
            room = math.inf
        decode_s = float(self.decode_s[row])
        self.room_tokens[row], self.spare_tokens[row], self.free_tokens[row] = room, spare, kv - held - idle
        self.crowd_s[row] = crowd_s = self._crowding * decode_s / max(1.0, kv)
        self.token_s[row] = decode_s + crowd_s * held
        self.lasting_s[row] = crowd_s * (held + idle)
        (self._roomy.add if room >= 0 else self._roomy.discard)(row)

    def calibrate(self, row: int, taken_s: float, predicted_s: float) -> None:
        """Update a worker's calibration by one turn.

        The mean is arithmetic, as costs are: for a worker that is fast at times and blocked at others, a geometric mean
        would predict only the lucky turns.
        """
        seen = min(CALIBRATION_MAX, max(1.0 / CALIBRATION_MAX, taken_s / max(predicted_s, 1e-6)))
        calibration = float(self.calibration[row])
        self.calibration[row] = calibration + (seen - calibration) * CALIBRATION_WEIGHT

    def observe(self, row: int, seconds: float, reclaims: int, now_s: float) -> None:
        """Record the time that a turn spent on a worker, and whether it was reclaimed."""
        before_s = float(self.updated_s[row])
        updated_s = max(now_s, before_s)
        fade = 0.5 ** ((updated_s - before_s) / self.history.half_life_s)
        seen, observed_s = float(self.reclaims[row]) * fade + reclaims, float(self.observed_s[row]) * fade + seconds
        self.updated_s[row], self.reclaims[row], self.observed_s[row] = updated_s, seen, observed_s
        since_s = max(0.0, self._rated_s - updated_s)
        self.reclaims_per_s[row] = self._per_s(since_s, seen, observed_s, float(self.expected_per_s[row]))

    def rate(self, now_s: float) -> None:
        """Decay the observations of reclaims, at most once a second, so that most decisions skip it."""
        second = math.floor(now_s)
        if second != self._rated_s:
            self._rated_s = second
            since_s = np.maximum(0.0, second - self.updated_s)
            self.reclaims_per_s = self._per_s(since_s, self.reclaims, self.observed_s, self.expected_per_s)

    def _per_s(self, since_s: Number, reclaims: Number, observed_s: Number, expected_per_s: Number) -> Number:
        """Return the reclaim rate, of one worker or of all, from observations `since_s` ago."""
        history = self.history
        fade = 0.5 ** (since_s / history.half_life_s)
        return (reclaims * fade + expected_per_s * history.observed_s) / (observed_s * fade + history.observed_s)

    def able(self, now_s: float, blocked_patience_s: float) -> Column:
        """Return which workers accept turns and have not been blocked for long."""
        able = self.closed_until_s <= now_s
        able &= self.blocked_since_s >= now_s - blocked_patience_s
        return able

    def allowed(self, demand: VersionDemand) -> Column:
        """Return which workers run weights that the demand allows."""
        pairs = zip(self.names, self.version_number.tolist())
        return np.array([demand.allows(self.versions[name], number) for name, number in pairs], np.bool_)

    def largest(self, now_s: float, blocked_patience_s: float) -> float:
        """Return the tokens of the largest turn that any able worker could take; negative if none can."""
        return float(np.where(self.able(now_s, blocked_patience_s), self.room_tokens, -1.0).max(initial=-1.0))


COLUMNS = tuple(WorkerTable.__annotations__)


class Prefixes:
    """The table of holders. `idle_tokens` is what a worker keeps for trajectories between two turns."""

    def __init__(self) -> None:
        self._prefix_holder: dict[str, tuple[str, int]] = {}
        self._there: dict[str, set[str]] = {}
        self._idle: dict[str, dict[str, int]] = {}  # worker: trajectories between two turns, oldest first
        self.idle_tokens: dict[str, int] = {}

    def holder(self, trajectory: str) -> tuple[str, int] | None:
        """Return the worker that holds the prefix, and how many tokens of it."""
        return self._prefix_holder.get(trajectory)

    def begin(self, trajectory: str, worker: str, tokens: int) -> None:
        """Record that a turn began: the memory of the prefix is the turn's now."""
        self.forget(trajectory)
        self._prefix_holder[trajectory] = (worker, tokens)
        self._there.setdefault(worker, set()).add(trajectory)

    def end(self, trajectory: str, worker: str, tokens: int) -> None:
        self.begin(trajectory, worker, tokens)
        self._idle.setdefault(worker, {})[trajectory] = tokens
        self.idle_tokens[worker] = self.idle_tokens.get(worker, 0) + tokens

    def trim(self, worker: str, room_tokens: int) -> None:
        """Forget idle prefixes until the others fit into `room_tokens`."""
        idle = self._idle.get(worker)
        while idle and self.idle_tokens[worker] > room_tokens:
            self.forget(next(iter(idle)))

    def forget(self, trajectory: str) -> str | None:
        """Forget a prefix, and return the worker that held it."""
        holder = self._prefix_holder.pop(trajectory, None)
        if holder is None:
            return None
        worker = holder[0]
        self._there[worker].discard(trajectory)
        tokens = self._idle.get(worker, {}).pop(trajectory, 0)
        if tokens:
            self.idle_tokens[worker] -= tokens
        return worker

    def empty(self, worker: str) -> None:
        for trajectory in self._there.pop(worker, ()):
            del self._prefix_holder[trajectory]
        self._idle.pop(worker, None)
        self.idle_tokens.pop(worker, None)
