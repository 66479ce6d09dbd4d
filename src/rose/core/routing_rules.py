"""The routing rules: which of the able workers runs a turn, and why.

A rule takes the worker table and the outlook of a turn, and returns a row and a reason, or `Wait`. It changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rose.core.versions import VersionDemand
from rose.core.worker_table import Column, WorkerTable

RouterKind = Literal["cost", "paper"]
ROUTER_KINDS: tuple[RouterKind, ...] = ("cost", "paper")
Outcome = Literal["ended", "evicted", "lost", "cancelled"]


@dataclass(frozen=True, slots=True)
class TurnView:
    """Facts of a turn. A turn without a trajectory has no cached prefix and no later turns.

    `prompt_tokens` is all that must be in the KV cache before the next token, with the partial output of a turn that
    continues elsewhere. `last_worker` counts only if the router has not placed the trajectory itself. Only weights that
    `demand` allows may sample it.
    """

    trajectory: str = ""
    group: str | None = None
    prompt_tokens: int = 0
    max_tokens: int = 0
    last_worker: str | None = None
    demand: VersionDemand | None = None

    @property
    def tokens_max(self) -> int:
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Place:
    """Run the turn on `worker`. `predicted_s` is the expected duration with waiting."""

    worker: str
    reason: str
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Place the turn on no worker now. Unless `is_for_all`, another waiting turn may find one."""

    reason: str
    is_for_all: bool = True


@dataclass(frozen=True, slots=True)
class MigrationCandidate:
    """A turn to evict from its worker and to place anew."""

    turn_id: str
    worker: str
    reason: str


PAPER_TURNS_MAX = 16  # per worker; the paper's for Qwen3 at 32K of context
NO_VERSION = Wait("no worker runs the weights that it demands", is_for_all=False)
PROMISED = Wait("all memory is promised to trajectories whose prefix is there", is_for_all=False)
REDO_FIXED_S = 1.0  # to detect a reclaim, queue again and begin elsewhere

Chosen = tuple[int, str]


@dataclass(frozen=True, slots=True)
class RoutingCosts:
    """Weights of the parts of a cost. Parts are seconds, so most weights are 1 and not listed."""

    crowding: float = 2.0  # relative slowdown of a sequence on a full worker
    interference: float = 0.5  # of a prompt's time that each turn decoding beside it loses
    foresight: float = 0.3  # of the output after this turn that counts: the trajectory may move again
    promise_share: float = 0.9  # of a worker's memory promised to trajectories, which then grow into the rest
    empty_s: float = 2.0  # an empty worker waits so long for its trajectories before it takes others
    urgency_min: float = 0.25
    urgency_max: float = 4.0


@dataclass(frozen=True, slots=True)
class TurnOutlook:
    """The prediction for a turn: the memory it needs, its answer in tokens, and the output of later turns.

    `urgency` is 1 for a trajectory of usual length and more for a long one. `holder` is the row that holds
    `cached_tokens` of its prefix, or -1. `is_tracked` means that the turn belongs to a trajectory.
    """

    prompt_tokens: int
    need_tokens: int
    answer_tokens: float
    later_tokens: float = 0.0
    activity: float = 1.0  # share of trajectories with a running turn
    urgency: float = 1.0
    holder: int = -1
    cached_tokens: int = 0
    is_tracked: bool = False


def by_cost(table: WorkerTable, turn: TurnOutlook, able: Column, now_s: float, settings: RoutingCosts) -> Chosen | Wait:
    some = room = able & (table.room_tokens >= turn.need_tokens)
    if turn.is_tracked:
        some = table.spare_tokens >= turn.need_tokens
        some |= table.empty_since_s <= now_s - settings.empty_s
        some &= room
        if turn.holder >= 0:
            # A blocked holder counts too: it will unblock, and a prefix left behind is lost.
            takes_it = table.closed_until_s[turn.holder] <= now_s and table.room_tokens[turn.holder] >= turn.need_tokens
            some[turn.holder] = room[turn.holder] = takes_it
    rows = some.nonzero()[0]
    if not len(rows):
        return PROMISED if room.any() else full(able)
    row = int(rows[0])
    if len(rows) > 1:
        row = int(np.where(some, costs_s(table, turn, now_s, settings), np.inf).argmin())
    return row, "it holds the prefix" if row == turn.holder else "the least cost"


def costs_s(table: WorkerTable, turn: TurnOutlook, now_s: float, settings: RoutingCosts) -> Column:
    """Return the cost of the turn on every worker: its own time, the loss of others, and the risk."""
    prefill_s = table.prefill_s * turn.prompt_tokens
    risk = prefill_s + REDO_FIXED_S
    risk *= table.reclaims_per_s
    risk += 1.0
    displaced = turn.need_tokens - table.free_tokens
    lasting_s = table.lasting_s
    if turn.holder >= 0:
        holder, cached = turn.holder, turn.cached_tokens
        prefill_s[holder] = table.prefill_s[holder] * (turn.prompt_tokens - cached)
        displaced[holder] -= cached
        lasting_s = lasting_s.copy()
        lasting_s[holder] -= table.crowd_s[holder] * cached
    own_s = table.crowd_s * turn.need_tokens
    lasting_s = (own_s + lasting_s) * turn.activity
    own_s += table.token_s
    own_s *= turn.answer_tokens
    lasting_s += table.decode_s
    lasting_s *= settings.foresight * turn.later_tokens
    own_s += lasting_s
    own_s += np.maximum(table.busy_until_s - now_s, 0.0)
    own_s += np.maximum(now_s - table.blocked_since_s, 0.0)
    own_s += prefill_s
    own_s *= table.calibration
    own_s *= risk  # reclaims in that time, and what each recomputes
    own_s *= turn.urgency
    others_s = table.crowd_s * (turn.need_tokens * turn.answer_tokens)
    prefill_s *= settings.interference
    others_s += prefill_s
    others_s *= table.urgency
    own_s += others_s
    np.maximum(displaced, 0.0, out=displaced)
    displaced *= table.prefill_s  # displaced prefixes are recomputed
    own_s += displaced
    return own_s


def by_the_paper(table: WorkerTable, turn: TurnOutlook, able: Column) -> Chosen | Wait:
    room = able & (table.turns < np.minimum(table.max_concurrency, PAPER_TURNS_MAX))
    if turn.holder >= 0 and room[turn.holder]:
        return turn.holder, "it holds the prefix"
    for some, reason in (
        (room & (table.is_dedicated > 0), "a dedicated worker"),
        (room & (table.slack_s > 0), "a borrowed worker with slack"),
        (room, "the least loaded"),
    ):
        if some.any():
            return least_loaded(table, some), reason
    return full(able)


def full(able: Column) -> Wait:
    if not len(able):
        return Wait("no worker has joined")
    count = int(able.sum())
    return Wait(f"all {count} workers are full" if count else f"none of {len(able)} workers takes turns now")


def least_loaded(table: WorkerTable, some: Column) -> int:
    return int(np.where(some, (table.turns + 1) / np.maximum(table.max_concurrency, 1), np.inf).argmin())
