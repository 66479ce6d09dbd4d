"""A batch of trajectories on dedicated and borrowed workers in virtual time, under the real router, pacer, provisioner.

What a gateway does with these decisions is done here in the simplest way: turns wait in a queue in the router's order,
heartbeats come every second, a borrowed device that is wanted is there after its activation. Events: a turn arrives
when its environment is done, something ends on a worker, a heartbeat, which also brings the memory that is allowed. Of
a device's gate a heartbeat tells what a live agent's tells, by the same rule (`core.gates`), and no more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from rose.config.gateway import GatewaySettings
from rose.core.gates import GateSeen
from rose.core.pacing import Pacer
from rose.core.provision import Borrow, Demand, DeviceView, Provision, ProvisionRules, Return
from rose.core.router import Place, Router, RouterKind, TurnView, WorkerView
from rose.engines.profiles import StepProfile
from scheduling.lending import BIN_S, Timeline
from scheduling.trajectories import Trajectory
from scheduling.worker import SEQUENCES, FluidWorker, Running

BEAT_S = 1.0
MAX_TOKENS = 4096  # what the agents ask for at most
ACTIVATION_S = 5.0  # to load a rollout model from the host; the paper's figure for 32B
SPARED_S = 0.02  # less than this of a quarter second is no slack
HOMELESS_RANK = 1e11  # of a turn whose prefix is nowhere: if one of those finds no memory, the others do not either
TRIES = 64  # waiting turns that are looked at in a row when the first ones find no place of their own


@dataclass(slots=True, eq=False)
class LiveTurn:
    player: Player
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    order: int
    placement: int = 0
    is_rerouted: bool = False
    worker: FluidWorker | None = None
    turn_id: str = ""

    def view(self) -> TurnView:
        trajectory = self.player.trajectory
        return TurnView(trajectory.name, trajectory.group, self.prompt_tokens, MAX_TOKENS)


@dataclass(slots=True, eq=False)
class Player:
    """One trajectory under way."""

    trajectory: Trajectory
    turn: int = 0
    context_tokens: int = 0  # that were computed for it before
    end_s: float = math.nan


@dataclass(slots=True)
class Result:
    completion_s: float = 0.0
    turn_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)  # of trajectories
    prompt_tokens: int = 0
    cached_tokens: int = 0
    known_tokens: int = 0  # of prompts, computed before
    evictions: int = 0
    moved: int = 0
    placements: int = 0
    idle_s: float = 0.0
    usable_s: float = 0.0
    borrowed_s: float = 0.0
    waiting_max: int = 0


class Cluster:
    def __init__(
        self, kind: RouterKind, profile: StepProfile, dedicated: int, timelines: Sequence[Timeline],
        trajectories: Sequence[Trajectory], *, router: Router | None = None,
    ) -> None:  # fmt: skip
        self.router, self.pacer = router or Router(kind, gate_patience_s=GatewaySettings().gated_s), Pacer()
        self.provision = Provision(ProvisionRules(serving_max=len(timelines)))
        self.profile, self.timelines = profile, timelines
        self.result = Result()
        self.now_s = 0.0
        self.workers: dict[str, FluidWorker] = {}
        self._turns: dict[str, LiveTurn] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._next: dict[str, int] = {}
        self._order = count()
        self._waiting: list[tuple[float, int, LiveTurn]] = []
        self._active_from_s: dict[str, float] = {}
        self._gates: dict[str, GateSeen] = {}
        self._is_stuck = False
        self._left = len(trajectories)
        for number in range(dedicated):
            self._join(FluidWorker(f"dedicated-{number:03}", profile, None))
        self._players = [Player(trajectory) for trajectory in trajectories]
        for player in self._players:
            self._at(0.0, lambda player=player: self._arrive(player))
        self._at(0.0, self._beat)

    def run(self) -> Result:
        while self._left:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return self._sum_up()

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    # Turns

    def _arrive(self, player: Player) -> None:
        turn = player.trajectory.turns[player.turn]
        live = LiveTurn(player, turn.prompt_tokens, turn.output_tokens, self.now_s, next(self._order))
        rank = self._wait(live)
        if self._is_stuck:
            self._try_alone(live, rank)
        else:
            self._place()

    def _try_alone(self, live: LiveTurn, rank: float) -> None:
        """Those before it found nothing, and nothing has changed since: no use for it unless it is before them."""
        if self.router.kind != "sticky" and self._waiting[0][2] is not live and rank >= self._waiting[0][0]:
            return
        view = live.view()
        decision = self.router.choose(view, self.now_s)
        if isinstance(decision, Place):
            self._put(live, view, decision.worker)

    def _wait(self, live: LiveTurn) -> float:
        rank = self.router.rank(live.view())
        heapq.heappush(self._waiting, (rank, live.order, live))
        self.result.waiting_max = max(self.result.waiting_max, len(self._waiting))
        return rank

    def _place(self) -> None:
        aside: list[tuple[float, int, LiveTurn]] = []
        while self._waiting and len(aside) < TRIES:
            entry = heapq.heappop(self._waiting)
            live = entry[2]
            if live.worker is not None:
                continue
            view = live.view()
            decision = self.router.choose(view, self.now_s)
            if isinstance(decision, Place):
                if self.pacer.may_place(self.now_s, live.is_rerouted):
                    self._put(live, view, decision.worker)
                    continue
                aside.append(entry)
                continue
            aside.append(entry)
            if decision.is_for_all or entry[0] >= HOMELESS_RANK:
                break
        self._is_stuck = bool(aside)
        for entry in aside:
            heapq.heappush(self._waiting, entry)

    def _put(self, live: LiveTurn, view: TurnView, name: str) -> None:
        worker = self.workers[name]
        live.placement += 1
        live.turn_id, live.worker, live.is_rerouted = f"{live.order}.{live.placement}", worker, False
        self._turns[live.turn_id] = live
        self.router.placed(live.turn_id, view, name, self.now_s)
        self.result.placements += 1
        self._advance(worker)
        trajectory = live.player.trajectory.name
        worker.add(Running(live.turn_id, trajectory, live.prompt_tokens, live.output_tokens))
        self._schedule(worker)

    def _ended(self, running: Running) -> None:
        live = self._turns.pop(running.turn_id)
        player, result = live.player, self.result
        self._count_prompt(live, running)
        player.context_tokens = running.tokens
        result.turn_s.append(self.now_s - live.arrival_s)
        self.router.ended(running.turn_id, "ended", running.output_tokens, self.now_s)
        trajectory = player.trajectory
        env_s = trajectory.turns[player.turn].env_s
        player.turn += 1
        if player.turn < len(trajectory.turns):
            self._at(self.now_s + env_s, lambda: self._arrive(player))
        else:
            self._left -= 1
            player.end_s = self.now_s
            self.router.finished(trajectory.name, trajectory.group, player.turn, trajectory.output_tokens)

    def _count_prompt(self, live: LiveTurn, running: Running) -> None:
        self.result.prompt_tokens += running.prompt_tokens
        self.result.cached_tokens += running.cached_tokens
        self.result.known_tokens += min(live.player.context_tokens, running.prompt_tokens - 1)

    def _evict(self, turn_ids: Sequence[str]) -> None:
        for turn_id in turn_ids:
            live = self._turns.pop(turn_id)
            worker = live.worker
            assert worker is not None
            running = worker.turns[turn_id]
            made = worker.evict(turn_id)
            if running.begun_at is not None:
                self._count_prompt(live, running)
                live.player.context_tokens = max(live.player.context_tokens, live.prompt_tokens + made)
            self.router.ended(turn_id, "evicted", made, self.now_s)
            live.prompt_tokens += made
            live.output_tokens -= made
            live.worker, live.is_rerouted = None, True
            self._wait(live)
        if turn_ids:
            self.result.evictions += len(turn_ids)
            self._tell_pacer(len(turn_ids))

    def _tell_pacer(self, count: int) -> None:
        left = [worker for name, worker in self.workers.items() if not self._is_gated(name)]
        tokens_per_s = sum(worker.rates(self.now_s)[0] for worker in left)
        waiting = [live.prompt_tokens for _, _, live in self._waiting if live.is_rerouted]
        self.pacer.survivors(len(left), tokens_per_s / max(1.0, sum(waiting) / max(1, len(waiting))))
        self.pacer.evicted(count, self.now_s)

    def _is_gated(self, name: str) -> bool:
        return name in self._gates and self._gates[name].gated_since_s is not None

    # Workers

    def _join(self, worker: FluidWorker) -> None:
        self.workers[worker.name] = worker
        self.router.put_worker(self._view(worker))

    def _advance(self, worker: FluidWorker) -> None:
        for running in worker.advance(self.now_s):
            self._ended(running)

    def _schedule(self, worker: FluidWorker) -> None:
        """Wake up when something ends there; whatever was scheduled before is void."""
        next_s = worker.next_s()
        if next_s == math.inf:
            self._next.pop(worker.name, None)
            return
        number = next(self._order)
        self._next[worker.name] = number
        heapq.heappush(self._events, (max(next_s, self.now_s), number, lambda: self._wake(worker, number)))

    def _wake(self, worker: FluidWorker, number: int) -> None:
        if self._next.get(worker.name) != number:
            return
        self._advance(worker)
        self._schedule(worker)
        self._place()

    def _view(self, worker: FluidWorker) -> WorkerView:
        timeline = worker.timeline
        prefill_tok_s, decode_tok_s = worker.rates(self.now_s)
        if timeline is None:
            return WorkerView(worker.name, True, True, SEQUENCES, worker.kv_tokens, 0.0, prefill_tok_s, decode_tok_s)
        share = timeline.shares[timeline.bin_at(max(0.0, self.now_s - BIN_S))]
        gate = self._gates.setdefault(worker.name, GateSeen(self.now_s))
        gate.told(timeline.told(self.now_s), self.now_s)
        return WorkerView(
            worker.name, False, True, SEQUENCES, worker.kv_tokens, 0.0, prefill_tok_s, decode_tok_s,
            slack_s=share * BIN_S - SPARED_S, gated_since_s=gate.gated_since_s, opened_s=gate.opened_s,
        )  # fmt: skip

    def _beat(self) -> None:
        for worker in list(self.workers.values()):
            self._remember(worker)
            self.router.put_worker(self._view(worker))
        strays: dict[str, list[str]] = {}
        for stray in self.router.strays(self.now_s):
            strays.setdefault(stray.worker, []).append(stray.turn_id)
        for name, turn_ids in strays.items():
            self.result.moved += len(turn_ids)
            self._advance(self.workers[name])
            self._evict([turn_id for turn_id in turn_ids if turn_id in self._turns])
            self._schedule(self.workers[name])
        if self.timelines:
            self._provide()
        self._place()
        self._at(self.now_s + BEAT_S, self._beat)

    def _remember(self, worker: FluidWorker) -> None:
        """The memory that the device allows rollouts now."""
        if worker.timeline is None:
            return
        allowed = worker.timeline.kv_tokens[worker.timeline.bin_at(self.now_s)]
        if allowed == worker.kv_tokens:
            return
        self._advance(worker)
        self._evict(worker.shrink(allowed))
        self._schedule(worker)

    # Borrowing

    def _provide(self) -> None:
        demand, devices = self._demand(), [self._device(i) for i in range(len(self.timelines))]
        for decision in self.provision.decide(demand, devices, self.now_s):
            if isinstance(decision, Borrow):
                self._active_from_s[decision.name] = self.now_s + ACTIVATION_S
                self._at(self.now_s + ACTIVATION_S, lambda name=decision.name: self._activate(name))
            elif isinstance(decision, Return):
                self._give_back(decision.name)

    def _demand(self) -> Demand:
        dedicated = [worker for worker in self.workers.values() if worker.timeline is None]
        tok_s = sum(_tok_s(worker, self.now_s) for worker in dedicated)
        return Demand(len(self._turns) + len(self._waiting), 0.0, 0.0, len(dedicated), tok_s)

    def _device(self, number: int) -> DeviceView:
        name = f"borrowed-{number:03}"
        worker, timeline = self.workers.get(name), self.timelines[number]
        at = timeline.bin_at(self.now_s)
        kv_use = 1 - timeline.kv_tokens[at] / max(timeline.kv_tokens)
        return DeviceView(
            name, name in self._active_from_s, True, kv_use, timeline.shares[at] * BIN_S, 0.0, ACTIVATION_S,
            len(worker.turns) if worker is not None else 0,
        )  # fmt: skip

    def _activate(self, name: str) -> None:
        if name not in self._active_from_s or name in self.workers:
            return
        timeline = self.timelines[int(name.split("-")[1])]
        worker = FluidWorker(name, self.profile, timeline, self.now_s)
        worker.kv_tokens = timeline.kv_tokens[timeline.bin_at(self.now_s)]
        self._join(worker)
        self._place()

    def _give_back(self, name: str) -> None:
        since_s = self._active_from_s.pop(name)
        worker = self.workers.get(name)
        if worker is None:
            return
        self._advance(worker)
        self._evict(list(worker.turns))
        self._account(worker, since_s)
        self._next.pop(name, None)
        del self.workers[name], self._gates[name]
        self.router.remove_worker(name)

    # At the end

    def _account(self, worker: FluidWorker, since_s: float) -> None:
        timeline = worker.timeline
        usable_s = (
            self.now_s - since_s if timeline is None else timeline.lent_by(self.now_s) - timeline.lent_by(since_s)
        )
        self.result.usable_s += usable_s
        self.result.idle_s += max(0.0, usable_s - worker.busy_s)
        if timeline is not None:
            self.result.borrowed_s += self.now_s - since_s

    def _sum_up(self) -> Result:
        for worker in self.workers.values():
            worker.advance(self.now_s)
            self._account(worker, worker.active_from_s)
        self.result.completion_s = self.now_s
        self.result.end_s = sorted(player.end_s for player in self._players)
        return self.result


def _tok_s(worker: FluidWorker, now_s: float) -> float:
    """All sequences together, with as many as it holds well."""
    return 8 * worker.rates(now_s)[1]
