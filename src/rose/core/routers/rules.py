"""The rules a router can follow: of the workers that can take a turn, which one, and why.

Each takes the fleet and what is known of the turn, and returns a row and a reason, or the word to wait. Nothing here
changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rose.core.routers.fleet import Column, Fleet
from rose.core.routers.views import Wait

PAPER_TURNS_MAX = 16  # per worker, for Qwen3 at 32K of context
PROMISED = Wait("all memory is promised to trajectories whose prefix is there", is_for_all=False)
REDO_FIXED_S = 1.0  # to notice, to queue again and to begin elsewhere

Chosen = tuple[int, str]


@dataclass(frozen=True, slots=True)
class CostSettings:
    """How the parts of a cost weigh. They are seconds, so most weights are 1 and are not here."""

    crowding: float = 2.0  # a sequence on a full worker is this much slower again than alone
    interference: float = 0.5  # of a prompt's time is lost to each turn that decodes beside it
    foresight: float = 0.3  # of what a trajectory has still to generate after this turn is counted: it may move again
    # Of a worker's memory is promised to trajectories; they grow into the rest, so that nobody is pushed out at once.
    promise_share: float = 0.9
    empty_s: float = 2.0  # a worker without turns waits for its trajectories to come back, then takes any other
    urgency_min: float = 0.25
    urgency_max: float = 4.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a turn: the memory it needs, tokens of its answer, and of all that follows it.

    `urgency` is 1 for a trajectory as long as usual and more for a long one. `home` is the row that holds
    `cached_tokens` of its prefix, or -1. `is_tracked` means that it has a trajectory.
    """

    prompt_tokens: int
    need_tokens: int
    answer_tokens: float
    later_tokens: float = 0.0
    activity: float = 1.0  # share of trajectories that have a turn under way
    urgency: float = 1.0
    home: int = -1
    cached_tokens: int = 0
    is_tracked: bool = False


def by_cost(fleet: Fleet, turn: Outlook, able: Column, now_s: float, settings: CostSettings) -> Chosen | Wait:
    some = room = able & (fleet.room_tokens >= turn.need_tokens)
    if turn.is_tracked:
        some = fleet.spare_tokens >= turn.need_tokens
        some |= fleet.empty_since_s <= now_s - settings.empty_s
        some &= room
        if turn.home >= 0:
            some[turn.home] = room[turn.home] = _is_open_to(fleet, turn, now_s)
    rows = some.nonzero()[0]
    if not len(rows):
        return PROMISED if room.any() else full(able)
    row = int(rows[0])
    if len(rows) > 1:
        row = int(np.where(some, costs_s(fleet, turn, now_s, settings), np.inf).argmin())
    return row, "it holds the prefix" if row == turn.home else "the least cost"


def _is_open_to(fleet: Fleet, turn: Outlook, now_s: float) -> bool:
    """Whether its home takes it: also behind a gate, since gates open again, and a prefix left behind is lost."""
    return bool(fleet.closed_until_s[turn.home] <= now_s and fleet.room_tokens[turn.home] >= turn.need_tokens)


def costs_s(fleet: Fleet, turn: Outlook, now_s: float, settings: CostSettings) -> Column:
    """What it would cost to place the turn, on every worker: its own time, what others lose, and what is at risk."""
    prefill_s = fleet.prefill_s * turn.prompt_tokens
    risk = prefill_s + REDO_FIXED_S
    risk *= fleet.reclaims_per_s
    risk += 1.0
    displaced = turn.need_tokens - fleet.free_tokens
    lasting_s = fleet.lasting_s
    if turn.home >= 0:
        home, cached = turn.home, turn.cached_tokens
        prefill_s[home] = fleet.prefill_s[home] * (turn.prompt_tokens - cached)
        displaced[home] -= cached
        lasting_s = lasting_s.copy()
        lasting_s[home] -= fleet.crowd_s[home] * cached
    own_s = fleet.crowd_s * turn.need_tokens
    lasting_s = (own_s + lasting_s) * turn.activity
    own_s += fleet.token_s
    own_s *= turn.answer_tokens
    lasting_s += fleet.decode_s
    lasting_s *= settings.foresight * turn.later_tokens
    own_s += lasting_s
    own_s += np.maximum(fleet.busy_until_s - now_s, 0.0)
    own_s += np.maximum(now_s - fleet.gated_since_s, 0.0)
    own_s += prefill_s
    own_s *= fleet.pace
    own_s *= risk  # so many reclaims in that time, and what each would redo
    own_s *= turn.urgency
    others_s = fleet.crowd_s * (turn.need_tokens * turn.answer_tokens)
    prefill_s *= settings.interference
    others_s += prefill_s
    others_s *= fleet.urgency
    own_s += others_s
    np.maximum(displaced, 0.0, out=displaced)
    displaced *= fleet.prefill_s  # prefixes that give way are computed again
    own_s += displaced
    return own_s


def by_the_paper(fleet: Fleet, turn: Outlook, able: Column) -> Chosen | Wait:
    room = able & (fleet.turns < np.minimum(fleet.seats, PAPER_TURNS_MAX))
    if turn.home >= 0 and room[turn.home]:
        return turn.home, "it holds the prefix"
    for some, reason in (
        (room & (fleet.is_dedicated > 0), "a dedicated worker"),
        (room & (fleet.slack_s > 0), "a borrowed worker with slack"),
        (room, "the least loaded"),
    ):
        if some.any():
            return _least_loaded(fleet, some), reason
    return full(able)


def by_load(fleet: Fleet, turn: Outlook, able: Column) -> Chosen | Wait:
    room = able & (fleet.room_tokens >= turn.need_tokens)
    return (_least_loaded(fleet, room), "the least loaded") if room.any() else full(able)


def by_habit(fleet: Fleet, turn: Outlook, able: Column, last: int) -> Chosen | Wait:
    """Where the trajectory was before, as long as that worker takes turns at all."""
    if last < 0 or not able[last]:
        return by_load(fleet, turn, able)
    if fleet.room_tokens[last] < turn.need_tokens:
        return Wait(f"`{fleet.names[last]}`, where it began, is full", is_for_all=False)
    return last, "where it began"


def full(able: Column) -> Wait:
    if not len(able):
        return Wait("no worker has joined")
    count = int(able.sum())
    return Wait(f"all {count} workers are full" if count else f"none of {len(able)} workers takes turns now")


def _least_loaded(fleet: Fleet, some: Column) -> int:
    return int(np.where(some, (fleet.turns + 1) / np.maximum(fleet.seats, 1), np.inf).argmin())
