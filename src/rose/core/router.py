"""The router: which worker runs a turn. Every turn is placed anew, and the router predicts from what it placed.

`cost`, the default, places a turn where its cost in seconds is least:

    own     the queue of prompts there, the part of the prompt without a cached prefix, the answer at the speed of that
            batch, and part of what the trajectory will still generate after this turn
    others  what the other turns there lose: time while the prompt is computed, and speed to a larger batch
    risk    the probability that the worker is reclaimed before that, times what must then be recomputed

A worker's ratio of actual to predicted times corrects all of it. Own time and risk weigh more, the longer the
trajectory is expected to be (`core.lengths`); others' losses weigh by *their* expected lengths. So long trajectories
move to dedicated, roomy workers and short ones to borrowed ones. Ties go to dedicated workers, then by name.

Room is memory: the prompt and the 95th percentile of answers must fit beside what was placed there before. An idle
worker takes any turn, since a turn too long for it is too long for all, and the engine reports that best. A trajectory
between two turns keeps its prefix only while its worker does not need the memory, and recomputing it costs more than
the turn. So a worker takes a trajectory without a prefix there only if its memory is not promised to trajectories that
have one, or after it was empty for a while. `rank` puts turns with a prefix first, then trajectories that have begun,
then new ones, and among equals the longest.

`paper`   the prefix holder, a dedicated worker, a borrowed one with slack, the least loaded; at most 16 turns each.

By both rules a worker that refused a turn gets none for the time that it asked for, and one that has been blocked for
`blocked_patience_s` gets no more; `migration_candidates` returns the turns to move. By `cost` a trajectory may
wait for a blocked prefix holder, and leaves only one that is blocked for far longer than usual or than its prompt takes
elsewhere: most unblock sooner than a long prompt is recomputed, and recomputing takes others' time.

`choose` changes nothing; the caller reports what it did with `placed` and `ended`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from rose.core.lengths import Answers, Lengths
from rose.core.routing_rules import (
    NO_VERSION,
    PROMISED,
    ROUTER_KINDS,
    Chosen,
    MigrationCandidate,
    Outcome,
    Place,
    RouterKind,
    RoutingCosts,
    TurnOutlook,
    TurnView,
    Wait,
    by_cost,
    by_the_paper,
    costs_s,
)
from rose.core.worker_table import Column, Prefixes, ReclaimHistory, WorkerTable, WorkerView
from rose.errors import ConfigError

BLOCKED_PATIENCE_S = 2.0  # the paper's time limit for a stalled turn
STALL_LONG = 3.0  # times the usual length: one in twenty exponentially distributed stalls is longer
USUAL_WEIGHT = 0.05  # of the newest turn in the usual remaining length
LATER = 1e12  # in a rank: after all turns without it


@dataclass(slots=True)
class _Placement:
    """A turn on a worker."""

    turn: TurnView
    worker: str
    incarnation: int  # of the worker: one that left and rejoined starts with empty counters
    need_tokens: int
    urgency: float
    since_s: float
    predicted_s: float  # without the worker's calibration


@dataclass(frozen=True, slots=True)
class _MemoryRefusal:
    """A turn was refused at `now_s` because all memory is promised; `room_tokens` is the largest room then."""

    now_s: float
    need_tokens: int
    room_tokens: float


@dataclass(slots=True)
class _LiveTrajectory:
    """A trajectory that has begun."""

    tokens: int  # generated so far
    worker: str  # of its last turn


class Router:
    """The router of a pool. Report workers, placements and ends; ask `choose`, and `rank` if several turns wait."""

    def __init__(
        self,
        kind: RouterKind = "cost",
        *,
        settings: RoutingCosts | None = None,
        history: ReclaimHistory | None = None,
        blocked_patience_s: float = BLOCKED_PATIENCE_S,
    ) -> None:
        if kind not in ROUTER_KINDS:
            raise ConfigError(f"unknown router {kind!r}", hint=f"use {', '.join(ROUTER_KINDS)}")
        self.kind: RouterKind = kind
        self.settings = settings or RoutingCosts()
        self._room_is_memory = kind == "cost"  # if no worker has any, no turn needs to be examined
        self.blocked_patience_s = blocked_patience_s
        self.lengths, self.answers = Lengths(), Answers()
        self._table = WorkerTable(history or ReclaimHistory(), self.settings.crowding, self.settings.promise_share)
        self._prefixes = Prefixes()
        self._turns: dict[str, _Placement] = {}
        self._turns_on: dict[str, dict[str, None]] = {}
        self._live: dict[str, _LiveTrajectory] = {}
        self._incarnations: dict[str, int] = {}
        self._incarnation = itertools.count(1)
        self.usual_tokens = 0.0  # that a trajectory still generates after a placement; 0 if unknown
        self._expected: tuple[TurnView, TurnOutlook] | None = None  # of the last choice, until an event
        self._refused: _MemoryRefusal | None = None  # the last refusal, until an event

    # Workers

    def put_worker(self, view: WorkerView) -> None:
        """Add a worker, or replace its facts."""
        self._forget_choices()
        table = self._table
        row = table.index.get(view.name)
        if row is not None and bool(table.is_dedicated[row]) != view.is_dedicated:
            self.remove_worker(view.name)  # another worker with the same name
        if view.name not in table.index:
            self._incarnations[view.name] = next(self._incarnation)
            self._turns_on[view.name] = {}
        elif table.versions[view.name] != view.version:
            self._prefixes.empty(view.name)
        self._trim(view.name, table.put(view))

    def remove_worker(self, name: str) -> None:
        """Remove a worker. Its turns must be reported as lost, before or after."""
        self._forget_choices()
        if name in self._table.index:
            self._table.remove(name)
            self._prefixes.empty(name)
            del self._turns_on[name], self._incarnations[name]

    # Decisions

    def choose(self, turn: TurnView, now_s: float) -> Place | Wait:
        if self._table.is_full and len(self._table) and self._room_is_memory:
            return Wait(f"all {len(self._table)} workers are full")
        if self._waits_too(turn, now_s):
            return PROMISED
        outlook = self._outlook(turn)
        self._expected = (turn, outlook)
        decision = self._choose(turn, outlook, now_s)
        if decision is PROMISED and turn.demand is None:
            self._refused = _MemoryRefusal(
                now_s, outlook.need_tokens, self._table.largest(now_s, self.blocked_patience_s)
            )
        return decision

    def _choose(self, turn: TurnView, outlook: TurnOutlook, now_s: float) -> Place | Wait:
        table = self._table
        table.rate(now_s)
        able = table.able(now_s, self.blocked_patience_s)
        if turn.demand is not None:
            allowed = table.allowed(turn.demand)
            if not allowed.any():
                return NO_VERSION
            able &= allowed
        chosen = self._select(turn, outlook, able, now_s)
        if isinstance(chosen, Wait):
            return chosen if turn.demand is None else replace(chosen, is_for_all=False)
        row, reason = chosen
        wait_s = max(0.0, now_s - float(table.blocked_since_s[row]))
        return Place(
            table.names[row], reason, wait_s + self._predict_s(outlook, row, now_s) * float(table.calibration[row])
        )

    def _select(self, turn: TurnView, outlook: TurnOutlook, able: Column, now_s: float) -> Chosen | Wait:
        """Apply the rule; a subclass with another rule replaces this."""
        if self.kind == "cost":
            return by_cost(self._table, outlook, able, now_s, self.settings)
        return by_the_paper(self._table, outlook, able)

    def rank(self, turn: TurnView) -> float:
        """Return the rank of a waiting turn: the lowest goes first, equal ones in arrival order."""
        if self.kind != "cost" or not turn.trajectory:
            return 0.0
        live = self._live.get(turn.trajectory)
        remaining = self.lengths.remaining(turn.group, live.tokens if live is not None else 0) or 0.0
        return LATER * ((live is None) + (self._prefix_holder(turn)[0] < 0)) - remaining

    def migration_candidates(self, now_s: float, limit: int = 16) -> list[MigrationCandidate]:
        """Return turns to evict from blocked workers.

        By `cost` a turn leaves if another worker costs less than waiting as long again. If the blocked worker still
        accepts turns, the stall must also be far longer than usual there, or than the prompt takes elsewhere.
        By `paper` it leaves if another worker takes it.
        """
        candidates: list[MigrationCandidate] = []
        table = self._table
        able = table.able(now_s, self.blocked_patience_s)
        token_costs = table.prefill_s * (1.0 + self.settings.interference * table.urgency)
        redo_s = float(np.where(able, token_costs, math.inf).min(initial=math.inf))  # per token of a prompt elsewhere
        if math.isinf(redo_s):
            return candidates
        for row in (now_s - table.blocked_since_s > self.blocked_patience_s).nonzero()[0]:
            name, blocked_s = table.names[row], now_s - float(table.blocked_since_s[row])
            is_patient = self.kind == "cost" and table.closed_until_s[row] <= now_s
            usual_s = float(table.usual_stall_s[row]) if is_patient else 0.0
            for turn_id in self._turns_on[name]:
                placement = self._turns[turn_id]
                if len(candidates) >= limit:
                    return candidates
                if now_s - placement.since_s < self.blocked_patience_s:
                    continue
                if blocked_s >= STALL_LONG * min(usual_s, redo_s * placement.turn.prompt_tokens) and self._would_leave(
                    placement.turn, int(row), now_s
                ):
                    candidates.append(
                        MigrationCandidate(turn_id, name, f"`{name}` has been blocked for {blocked_s:.1f} s")
                    )
        return candidates

    def _would_leave(self, turn: TurnView, row: int, now_s: float) -> bool:
        outlook = self._outlook(turn)
        without_prefix = replace(outlook, holder=-1, cached_tokens=0)
        chosen = self._choose(turn, without_prefix, now_s)
        if not isinstance(chosen, Place) or self.kind != "cost":
            return isinstance(chosen, Place)
        staying = replace(outlook, holder=row, cached_tokens=turn.prompt_tokens)
        stay_s = costs_s(self._table, staying, now_s, self.settings)[row]
        leave_s = costs_s(self._table, without_prefix, now_s, self.settings)[self._table.index[chosen.worker]]
        return bool(leave_s < stay_s)

    # What happened

    def on_placed(self, turn_id: str, turn: TurnView, worker: str, now_s: float) -> None:
        """Record that the caller placed the turn."""
        assert turn_id not in self._turns, f"turn `{turn_id}` is placed already"
        table, expected = self._table, self._expected  # that `choose` used, if no event came between
        outlook = expected[1] if expected is not None and expected[0] is turn else self._outlook(turn)
        self._forget_choices()
        row = table.index[worker]
        predicted_s = self._predict_s(outlook, row, now_s)
        urgency, need_tokens = outlook.urgency, outlook.need_tokens
        self._turns[turn_id] = _Placement(
            turn, worker, self._incarnations[worker], need_tokens, urgency, now_s, predicted_s
        )
        self._turns_on[worker][turn_id] = None
        prefill_s = float(table.prefill_s[row]) * (outlook.prompt_tokens - self._cached(outlook, row))
        table.busy_until_s[row] = max(float(table.busy_until_s[row]), now_s) + prefill_s
        table.add_turns(row, 1, need_tokens, urgency, now_s)
        if turn.trajectory:
            if outlook.later_tokens:
                remaining = outlook.answer_tokens + outlook.later_tokens
                usual = self.usual_tokens or remaining
                self.usual_tokens = usual + USUAL_WEIGHT * (remaining - usual)
            self._live.setdefault(turn.trajectory, _LiveTrajectory(0, worker)).worker = worker
            before = self._prefixes.holder(turn.trajectory)
            self._prefixes.begin(turn.trajectory, worker, turn.prompt_tokens)
            if before is not None and before[0] != worker:
                self._trim(before[0], table.index[before[0]])
        self._trim(worker, row)

    def on_ended(self, turn_id: str, outcome: Outcome, generated_tokens: int, now_s: float) -> None:
        """Free the room of a turn; `generated_tokens` is the output of this placement."""
        self._forget_choices()
        placement = self._turns.pop(turn_id)
        turn, worker = placement.turn, placement.worker
        if outcome == "ended":
            self.answers.add(generated_tokens)
        live = self._live.get(turn.trajectory)
        if live is not None:
            live.tokens += generated_tokens
        if self._incarnations.get(worker) != placement.incarnation:
            return
        row = self._table.index[worker]
        del self._turns_on[worker][turn_id]
        taken_s = max(0.0, now_s - placement.since_s)
        self._table.add_turns(row, -1, -placement.need_tokens, -placement.urgency, now_s)
        if outcome == "ended" and generated_tokens > 0:
            self._table.calibrate(row, taken_s, placement.predicted_s)
        self._table.observe(row, taken_s, int(outcome in ("evicted", "lost")), now_s)
        if live is not None and live.worker == worker:
            if outcome in ("ended", "cancelled"):
                self._prefixes.end(turn.trajectory, worker, turn.prompt_tokens + generated_tokens)
            else:
                self._prefixes.forget(turn.trajectory)
        self._trim(worker, row)

    def on_finished(self, trajectory: str, group: str | None, turns: int, tokens: int) -> None:
        """Record the end of a trajectory that generated `tokens`, and forget its prefix."""
        self._forget_choices()
        self._live.pop(trajectory, None)
        worker = self._prefixes.forget(trajectory)
        if worker is not None and worker in self._table.index:
            self._trim(worker, self._table.index[worker])
        if turns > 0:
            self.lengths.on_finished(group, tokens)

    # Predicting

    def _waits_too(self, turn: TurnView, now_s: float) -> bool:
        """Return whether it must be refused like a smaller turn in the same moment, without a prefix to go to."""
        refused = self._refused
        if refused is None or refused.now_s != now_s or not turn.trajectory:
            return False
        need = turn.prompt_tokens + self.answers.high(turn.max_tokens)
        holder, _ = self._prefix_holder(turn)
        return refused.need_tokens <= need <= refused.room_tokens and (
            holder < 0 or bool(self._table.room_tokens[holder] < need)
        )

    def _forget_choices(self) -> None:
        self._expected = self._refused = None

    def _outlook(self, turn: TurnView) -> TurnOutlook:
        answer = self.answers.mean(turn.max_tokens)
        need = turn.prompt_tokens + self.answers.high(turn.max_tokens)
        if not turn.trajectory:
            return TurnOutlook(turn.prompt_tokens, need, answer)
        live = self._live.get(turn.trajectory)
        remaining = self.lengths.remaining(turn.group, live.tokens if live is not None else 0)
        holder, cached = self._prefix_holder(turn)
        activity = min(1.0, len(self._turns) / max(1, len(self._live)))
        urgency, later = 1.0, 0.0
        if remaining is not None:
            urgency = remaining / self.usual_tokens if self.usual_tokens else 1.0
            urgency = min(self.settings.urgency_max, max(self.settings.urgency_min, urgency))
            later = max(0.0, remaining - answer)
        return TurnOutlook(turn.prompt_tokens, need, answer, later, activity, urgency, holder, cached, True)

    def _prefix_holder(self, turn: TurnView) -> tuple[int, int]:
        """Return the row of the prefix holder, and how much of this prompt it holds."""
        holder = self._prefixes.holder(turn.trajectory)
        if holder is not None:
            row = self._table.index[holder[0]]
            may_run = turn.demand is None or bool(self._table.allowed(turn.demand)[row])
            return (row, min(holder[1], turn.prompt_tokens)) if may_run else (-1, 0)
        if turn.trajectory in self._live or turn.last_worker is None:
            return -1, 0
        return self._table.index.get(turn.last_worker, -1), turn.prompt_tokens

    @staticmethod
    def _cached(outlook: TurnOutlook, row: int) -> int:
        return outlook.cached_tokens if row == outlook.holder else 0

    def _predict_s(self, outlook: TurnOutlook, row: int, now_s: float) -> float:
        """Return how long the turn takes on that worker by its rates, without calibration."""
        table = self._table
        wait_s = max(0.0, float(table.busy_until_s[row]) - now_s)
        prefill_s = float(table.prefill_s[row]) * (outlook.prompt_tokens - self._cached(outlook, row))
        share = (float(table.held_tokens[row]) + outlook.need_tokens) / max(1.0, float(table.kv_tokens[row]))
        token_s = float(table.decode_s[row]) * (1.0 + self.settings.crowding * share)
        return wait_s + prefill_s + outlook.answer_tokens * token_s

    def _trim(self, worker: str, row: int) -> None:
        table = self._table
        self._prefixes.trim(worker, int(table.kv_tokens[row] - table.held_tokens[row]))
        table.idle_tokens[row] = self._prefixes.idle_tokens.get(worker, 0)
        table.refresh(row)
