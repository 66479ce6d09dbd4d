"""A batch of trajectories on dedicated and borrowed workers under the real router, pacer and provisioner.

`rose.sim.world` runs the whole gateway, ledger and agents for seconds of virtual time. This model runs thousands of
trajectories for hours, so it keeps only the decisions: turns wait in the router's order, every worker sends a heartbeat
once a second, and a borrowed device is active a fixed time after it is requested. Events are a turn that arrives, a
turn that ends, and a heartbeat, which also carries the KV limit of a device. A heartbeat reports admission stalls by
the rule of the pending agent (`core.admission_stalls`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from rose.core.provision import Borrow, Cycle, Demand, DeviceView, Provision, ProvisionRules, Return
from rose.core.router import Router
from rose.core.routing_rules import Outcome, Place, TurnView
from rose.core.stalls import ObservedStall, Pacer
from rose.core.worker_table import WorkerView
from rose.engines.profiles import StepProfile
from rose.sim.batch_worker import BatchTurn, BatchWorker
from rose.sim.lent_timeline import BIN_S, SEQUENCES, LentTimeline
from rose.sim.supply_terms import SupplyTerms

HEARTBEAT_S = 1.0
MAX_TOKENS = 4096  # `max_tokens` of every turn
SLACK_MIN_S = 0.02  # a bin that lent less has no slack
UNCACHED_RANK = 1e11  # of a turn without a cached prefix: if one finds no memory, no other does
TRIES = 64  # waiting turns examined in a row that find no worker


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """Lengths of one turn, and the time that the environment takes after it."""

    prompt_tokens: int
    output_tokens: int
    env_s: float


@dataclass(frozen=True, slots=True)
class PlannedTrajectory:
    """All turns of one episode."""

    name: str
    group: str
    turns: tuple[PlannedTurn, ...]

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_tokens for turn in self.turns)


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn that waits or runs."""

    progress: TrajectoryProgress
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    order: int
    placement: int = 0
    is_rerouted: bool = False
    worker: BatchWorker | None = None
    turn_id: str = ""

    def view(self) -> TurnView:
        trajectory = self.progress.trajectory
        return TurnView(trajectory.name, trajectory.group, self.prompt_tokens, MAX_TOKENS)


@dataclass(slots=True, eq=False)
class TrajectoryProgress:
    """One trajectory in progress."""

    trajectory: PlannedTrajectory
    turn: int = 0
    context_tokens: int = 0  # computed for it before
    end_s: float = math.nan


@dataclass(slots=True)
class BatchResult:
    """Times and counts of a run."""

    completion_s: float = 0.0
    turn_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)  # of trajectories
    prompt_tokens: int = 0
    cached_tokens: int = 0
    known_tokens: int = 0  # of prompts, computed before by some worker
    evictions: int = 0
    idle_s: float = 0.0
    usable_s: float = 0.0
    borrowed_s: float = 0.0
    output_tokens: int = 0  # of turns that ended


class Feed:
    """Decides which trajectories join a running batch and when it is over; this one plays what was given at first."""

    def on_finished(self, trajectory: PlannedTrajectory) -> Sequence[PlannedTrajectory]:
        """Return the trajectories to begin now that this one has finished."""
        return ()

    def is_over(self, left: int) -> bool:
        """Return whether the batch is complete with `left` trajectories unfinished."""
        return left == 0


class BatchCluster:
    """The workers and the turns; `run` returns the result.

    With `tries_every_arrival` a new turn is tried even if an earlier one found no worker: the router's rule gives each
    trajectory a worker of its own. Virtual time begins at `start_s`; a router may be used again after `close`.
    """

    def __init__(
        self, router: Router, profile: StepProfile, dedicated: int, timelines: Sequence[LentTimeline],
        trajectories: Sequence[PlannedTrajectory], *, tries_every_arrival: bool = False,
        terms: SupplyTerms | None = None, feed: Feed | None = None, start_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.router, self.pacer, self._tries_every_arrival = router, Pacer(), tries_every_arrival
        self.profile, self.timelines = profile, timelines
        self.result = BatchResult()
        self.terms, self._feed = terms or SupplyTerms(), feed or Feed()
        idle_s = math.inf if self.terms.is_kept else ProvisionRules().idle_s
        self.provision = Provision(ProvisionRules(serving_max=len(timelines), idle_s=idle_s))
        self.now_s = self.start_s = start_s
        self.cycles: dict[str, Cycle] = {}  # of devices that are borrowed now
        self.past_cycles: list[Cycle] = []
        self.workers: dict[str, BatchWorker] = {}
        self._turns: dict[str, PendingTurn] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._next: dict[str, int] = {}
        self._order = count()
        self._waiting: list[tuple[float, int, PendingTurn]] = []
        self._active_from_s: dict[str, float] = {}
        self._stalls: dict[str, ObservedStall] = {}
        self._is_stuck = False
        self._left = 0
        for number in range(dedicated):
            self._join(BatchWorker(f"dedicated-{number:03}", profile, None, start_s))
        self._progresses: list[TrajectoryProgress] = []
        self.add(trajectories)
        if self.terms.is_kept and start_s > 0:
            for number in range(len(timelines)):
                if self.terms.is_on_offer(number, start_s):
                    self._borrow(f"borrowed-{number:03}", "kept from the step before", 0.0)
        self._at(start_s, self._heartbeat)

    def add(self, trajectories: Sequence[PlannedTrajectory]) -> None:
        """Begin these trajectories now."""
        self._left += len(trajectories)
        begun = [TrajectoryProgress(trajectory) for trajectory in trajectories]
        self._progresses += begun
        for progress in begun:
            self._at(self.now_s, partial(self._arrive, progress))

    def run(self) -> BatchResult:
        while not self._feed.is_over(self._left):
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return self._sum_up()

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    # Turns

    def _arrive(self, progress: TrajectoryProgress) -> None:
        turn = progress.trajectory.turns[progress.turn]
        pending = PendingTurn(progress, turn.prompt_tokens, turn.output_tokens, self.now_s, next(self._order))
        rank = self._wait(pending)
        if self._is_stuck:
            self._try_alone(pending, rank)
        else:
            self._place()

    def _try_alone(self, pending: PendingTurn, rank: float) -> None:
        """Try a turn that arrives while others wait: it can be placed only if it ranks before all of them."""
        if not self._tries_every_arrival and self._waiting[0][2] is not pending and rank >= self._waiting[0][0]:
            return
        view = pending.view()
        decision = self.router.choose(view, self.now_s)
        if isinstance(decision, Place):
            self._start(pending, view, decision.worker)

    def _wait(self, pending: PendingTurn) -> float:
        rank = self.router.rank(pending.view())
        heapq.heappush(self._waiting, (rank, pending.order, pending))
        return rank

    def _place(self) -> None:
        unplaced: list[tuple[float, int, PendingTurn]] = []
        while self._waiting and len(unplaced) < TRIES:
            entry = heapq.heappop(self._waiting)
            pending = entry[2]
            if pending.worker is not None:
                continue
            view = pending.view()
            decision = self.router.choose(view, self.now_s)
            if isinstance(decision, Place):
                if self.pacer.may_place(self.now_s, pending.is_rerouted):
                    self._start(pending, view, decision.worker)
                    continue
                unplaced.append(entry)
                continue
            unplaced.append(entry)
            if decision.is_for_all or entry[0] >= UNCACHED_RANK:
                break
        self._is_stuck = bool(unplaced)
        for entry in unplaced:
            heapq.heappush(self._waiting, entry)

    def _start(self, pending: PendingTurn, view: TurnView, name: str) -> None:
        worker = self.workers[name]
        pending.placement += 1
        pending.turn_id, pending.worker, pending.is_rerouted = f"{pending.order}.{pending.placement}", worker, False
        self._turns[pending.turn_id] = pending
        self.router.on_placed(pending.turn_id, view, name, self.now_s)
        self._advance(worker)
        trajectory = pending.progress.trajectory.name
        running = BatchTurn(pending.turn_id, trajectory, pending.prompt_tokens, pending.output_tokens)
        if worker.timeline is not None and self.terms.cold_start_s:
            worker.reserve(running)
            self._at(self.now_s + self.terms.cold_start_s, partial(self._begin, worker, running))
            return
        worker.add(running)
        self._schedule(worker)

    def _begin(self, worker: BatchWorker, running: BatchTurn) -> None:
        """Begin a turn after its cold start, unless it was taken away meanwhile."""
        if running.is_on_worker:
            self._advance(worker)
            worker.add(running)
            self._schedule(worker)

    def _finish_turn(self, running: BatchTurn) -> None:
        pending = self._turns.pop(running.turn_id)
        progress, result = pending.progress, self.result
        self._count_prompt(pending, running)
        progress.context_tokens = running.tokens
        result.output_tokens += running.output_tokens
        result.turn_s.append(self.now_s - pending.arrival_s)
        self.router.on_ended(running.turn_id, "ended", running.output_tokens, self.now_s)
        trajectory = progress.trajectory
        env_s = trajectory.turns[progress.turn].env_s
        progress.turn += 1
        if progress.turn < len(trajectory.turns):
            self._at(self.now_s + env_s, partial(self._arrive, progress))
        else:
            self._left -= 1
            progress.end_s = self.now_s
            self.router.on_finished(trajectory.name, trajectory.group, progress.turn, trajectory.output_tokens)
            self.add(self._feed.on_finished(trajectory))

    def _count_prompt(self, pending: PendingTurn, running: BatchTurn) -> None:
        self.result.prompt_tokens += running.prompt_tokens
        self.result.cached_tokens += running.cached_tokens
        self.result.known_tokens += min(pending.progress.context_tokens, running.prompt_tokens - 1)

    def _evict(self, turn_ids: Sequence[str], outcome: Outcome = "evicted") -> None:
        for turn_id in turn_ids:
            pending = self._turns.pop(turn_id)
            worker = pending.worker
            assert worker is not None
            running = worker.turns[turn_id]
            generated = worker.evict(turn_id)
            if running.begun_at is not None:
                self._count_prompt(pending, running)
                pending.progress.context_tokens = max(
                    pending.progress.context_tokens, pending.prompt_tokens + generated
                )
            self.router.on_ended(turn_id, outcome, generated, self.now_s)
            pending.prompt_tokens += generated
            pending.output_tokens -= generated
            pending.worker, pending.is_rerouted = None, True
            self._wait(pending)
        if turn_ids:
            self.result.evictions += len(turn_ids)
            self._notify_pacer(len(turn_ids))

    def _notify_pacer(self, count: int) -> None:
        blocked = {name for name, stall in self._stalls.items() if stall.blocked_since_s is not None}
        left = [worker for name, worker in self.workers.items() if name not in blocked]
        tokens_per_s = sum(worker.rates(self.now_s)[0] for worker in left)
        waiting = [pending.prompt_tokens for _, _, pending in self._waiting if pending.is_rerouted]
        self.pacer.set_capacity(len(left), tokens_per_s / max(1.0, sum(waiting) / max(1, len(waiting))))
        self.pacer.on_evicted(count, self.now_s)

    # Workers

    def _join(self, worker: BatchWorker) -> None:
        self.workers[worker.name] = worker
        self.router.put_worker(self._view(worker))

    def _advance(self, worker: BatchWorker) -> None:
        for running in worker.advance(self.now_s):
            self._finish_turn(running)

    def _schedule(self, worker: BatchWorker) -> None:
        """Schedule the worker's next event; an event scheduled before is void."""
        next_s = worker.next_s()
        if next_s == math.inf:
            self._next.pop(worker.name, None)
            return
        number = next(self._order)
        self._next[worker.name] = number
        event: Callable[[], None] = partial(self._wake, worker, number)
        heapq.heappush(self._events, (max(next_s, self.now_s), number, event))

    def _wake(self, worker: BatchWorker, number: int) -> None:
        if self._next.get(worker.name) != number:
            return
        self._advance(worker)
        self._schedule(worker)
        self._place()

    def _view(self, worker: BatchWorker) -> WorkerView:
        timeline = worker.timeline
        prefill_tok_s, decode_tok_s = worker.rates(self.now_s)
        if timeline is None:
            return WorkerView(worker.name, True, True, SEQUENCES, worker.kv_tokens, 0.0, prefill_tok_s, decode_tok_s)
        share = timeline.shares[timeline.bin_at(max(0.0, self.now_s - BIN_S))]
        stall = self._stalls.setdefault(worker.name, ObservedStall(self.now_s))
        stall.on_heartbeat(timeline.reported_block_s(self.now_s), self.now_s)
        return WorkerView(
            worker.name, False, True, SEQUENCES, worker.kv_tokens, 0.0, prefill_tok_s, decode_tok_s,
            slack_s=share * BIN_S - SLACK_MIN_S, blocked_since_s=stall.blocked_since_s, opened_s=stall.opened_s,
        )  # fmt: skip

    def _heartbeat(self) -> None:
        for worker in list(self.workers.values()):
            self._apply_kv_limit(worker)
            self.router.put_worker(self._view(worker))
        migrating: dict[str, list[str]] = {}
        for stray in self.router.migration_candidates(self.now_s):
            migrating.setdefault(stray.worker, []).append(stray.turn_id)
        for name, turn_ids in migrating.items():
            self._advance(self.workers[name])
            self._evict([turn_id for turn_id in turn_ids if turn_id in self._turns])
            self._schedule(self.workers[name])
        if self.timelines:
            self._provision()
        self._place()
        self._at(self.now_s + HEARTBEAT_S, self._heartbeat)

    def _apply_kv_limit(self, worker: BatchWorker) -> None:
        """Apply the KV limit that the device sets now."""
        if worker.timeline is None:
            return
        allowed = worker.timeline.kv_tokens[worker.timeline.bin_at(self.now_s)]
        if allowed == worker.kv_tokens:
            return
        self._advance(worker)
        self._evict(worker.shrink(allowed))
        self._schedule(worker)

    # Borrowing

    def _provision(self) -> None:
        dedicated = [worker for worker in self.workers.values() if worker.timeline is None]
        tok_s = sum(8 * worker.rates(self.now_s)[1] for worker in dedicated)  # in a typical batch of eight
        demand = Demand(len(self._turns) + len(self._waiting), 0.0, 0.0, len(dedicated), tok_s)
        devices = [self._device(number) for number in range(len(self.timelines))]
        for decision in self.provision.decide(demand, devices, self.now_s):
            if isinstance(decision, Borrow):
                self._borrow(decision.name, decision.reason, self.terms.activation_s)
            elif isinstance(decision, Return):
                self._give_back(decision.name)

    def _device(self, number: int) -> DeviceView:
        name = f"borrowed-{number:03}"
        worker, timeline = self.workers.get(name), self.timelines[number]
        at = timeline.bin_at(self.now_s)
        kv_use = 1 - timeline.kv_tokens[at] / max(timeline.kv_tokens)
        return DeviceView(
            name, name in self._active_from_s, self.terms.is_on_offer(number, self.now_s), kv_use,
            timeline.shares[at] * BIN_S, 0.0, self.terms.activation_s,
            len(worker.turns) if worker is not None else 0,
        )  # fmt: skip

    def _borrow(self, name: str, reason: str, activation_s: float) -> None:
        self._active_from_s[name] = self.now_s + activation_s
        self.cycles[name] = Cycle(0, name, self.now_s, self.now_s, reason)
        self._at(self.now_s + activation_s, partial(self._activate, name))

    def _activate(self, name: str) -> None:
        if name not in self._active_from_s or name in self.workers:
            return
        timeline = self.timelines[int(name.split("-")[1])]
        worker = BatchWorker(name, self.profile, timeline, self.now_s)
        worker.kv_tokens = timeline.kv_tokens[timeline.bin_at(self.now_s)]
        self.cycles[name].usable_s = self.now_s
        self._join(worker)
        self._place()

    def _give_back(self, name: str) -> None:
        since_s, cycle = self._active_from_s.pop(name), self.cycles.pop(name)
        cycle.returned_s = cycle.released_s = self.now_s
        self.past_cycles.append(cycle)
        worker = self.workers.get(name)
        if worker is None:
            return
        self._advance(worker)
        self._evict(list(worker.turns))
        self._account(worker, since_s)
        self._next.pop(name, None)
        del self.workers[name], self._stalls[name]
        self.router.remove_worker(name)

    # At the end

    def _account(self, worker: BatchWorker, since_s: float) -> None:
        timeline = worker.timeline
        usable_s = (
            self.now_s - since_s if timeline is None else timeline.lent_by(self.now_s) - timeline.lent_by(since_s)
        )
        self.result.usable_s += usable_s
        self.result.idle_s += max(0.0, usable_s - worker.busy_s)
        if timeline is not None:
            self.result.borrowed_s += self.now_s - since_s

    def _sum_up(self) -> BatchResult:
        for worker in self.workers.values():
            worker.advance(self.now_s)
            self._account(worker, worker.active_from_s)
        self.result.completion_s = self.now_s - self.start_s
        ends_s = (progress.end_s - self.start_s for progress in self._progresses)
        self.result.end_s = sorted(end_s for end_s in ends_s if not math.isnan(end_s))
        return self.result

    def close(self) -> None:
        """Cancel what still runs and remove all workers, so that the router can serve another batch."""
        for worker in list(self.workers.values()):
            self._evict(list(worker.turns), "cancelled")
            self.router.remove_worker(worker.name)
        for progress in self._progresses:
            if math.isnan(progress.end_s):
                self.router.on_finished(progress.trajectory.name, progress.trajectory.group, 0, 0)
        self.past_cycles += self.cycles.values()
