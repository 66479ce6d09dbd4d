"""One lent device in virtual time: two simulated engines step by step under the real step arbiter.

Only time is simulated: the cost of a step by its profile, noise, a cost of changing sides, rare stalls, and a drift
that the latency models do not know of. Rollouts are a closed loop of trajectories, whose prompts are the conversation
so far and a little more. Every step checks what the modes guarantee, from records kept apart from the accountant's.

With `pages` both sides share one real pool of small pages under the real memory policy: an evicted turn continues from
its partial output, and serving never waits for a page that a rollout holds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Protocol

from rose.core.accountant import Breach
from rose.core.admission import Admission, LendingLimits, Mode
from rose.core.breaker import Breaker
from rose.core.bursts import BurstReserve
from rose.core.facts import StepFeatures
from rose.core.history import ServingHistory
from rose.core.memory import MemoryPolicy
from rose.core.slo import Budgets
from rose.device.pages import PagePool
from rose.device.step_arbiter import StepArbiter, StepDecision
from rose.device.tenancy import SharedMemory
from rose.engines.base import Budget, Request, Sampling, TokenEvent
from rose.engines.profiles import load_profile, noise_of
from rose.engines.simulated import SimulatedEngine
from rose.errors import RequestRefused, Unavailable
from rose.sim.models import model_of
from rose.sim.slo_invariants import ServedRequest, ServingClients, check_lent_step

STEP_TOKENS = 512
SEQUENCES = 64
WIDE = Budget(STEP_TOKENS, 2 * SEQUENCES)
DEFAULT_BUDGETS = Budgets(0.5, 0.15, answer_s=60.0)
TURNS = 10
PAGE_BYTES, SERVING_BLOCK_BYTES, ROLLOUT_BLOCK_BYTES = 16 << 10, 8 << 10, 4 << 10
ASK_AGAIN_STEPS = 50  # turns that found no room are asked for again after so many
NEW_PROMPT = tuple(range(24))
JUST_AFTER_S = 0.0001  # a lent step has begun


class TrafficSource(Protocol):
    """A source of requests: a scenario's, one of `rose.sim.shapes`, or a recorded trace."""

    def arrivals(self, seed: int, until_s: float) -> list[tuple[float, Request]]: ...


@dataclass(frozen=True, slots=True)
class Stalker:
    """A client that sends a request just after a lent step has begun, when it hurts most; at most so often."""

    every_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class DeviceWorld:
    """The device and what happens to it. `mode` None is serving alone."""

    mode: Mode | None
    traffic: TrafficSource
    seed: int = 0
    noise_seed: int = 0  # steps take other times, with everything else the same
    until_s: float = 20.0
    budgets: Budgets = DEFAULT_BUDGETS
    serving: str = "cpu"
    rollout: str = "cpu-frozenlake-1m"
    noise: float = 0.03
    switch_s: float = 0.0001
    stall_share: float = 0.0
    stall_s: float = 0.05
    drift: float = 1.0  # every step from the middle on takes this much longer
    breaks: bool = False  # with a circuit breaker
    pages: int = 0  # of KV memory that both sides share; 0 for plenty each
    page_s: float = 0.0  # that serving waits for each page which rollouts give back
    trajectories: int = 32
    warm_s: float = 0.0  # after which figures of a window begin
    observed_s: float = 0.0  # for how long serving was observed before: what its bursts are like is known
    spare: int = SEQUENCES  # requests that may run beyond `SEQUENCES` while some of them have been delayed by lending
    kv_tokens: int = 0  # of serving's KV memory; 0 for what the profile says
    swap_every_s: float = 0.0  # new weights for the rollout model; 0 for never
    swap_s: float = 0.03
    restart_s: float = 0.0  # when the engine process ends and another one takes over; 0 for never
    patience_s: dict[str, float] = field(default_factory=dict)  # request: how long its client waits for all of it
    threshold: int | None = None  # requests beside which lending goes on, instead of what is learnt of bursts
    stalker: Stalker | None = None
    extra: tuple[tuple[float, Request], ...] = ()  # requests besides the traffic's: what a stalker sent in another run


@dataclass(slots=True)
class DeviceReport:
    """The counts and times of a run."""

    served: list[ServedRequest] = field(default_factory=list)
    breaches: list[Breach] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    rollout_tokens: int = 0
    lent_steps: int = 0
    late_steps: int = 0
    lent_s: float = 0.0
    longest_lent_s: float = 0.0
    serving_s: float = 0.0
    end_s: float = 0.0
    # From `warm_s` to the last arrival: without the tail of the last answers.
    window_s: float = 0.0
    window_lent_s: float = 0.0
    window_rollout_tokens: int = 0
    window_work: StepFeatures = field(default_factory=StepFeatures)  # all that serving computed
    cancelled: int = 0
    sent: list[tuple[float, Request]] = field(default_factory=list)  # by the stalker
    evictions: int = 0
    rejected: int = 0

    def attainment(self, budgets: Budgets = DEFAULT_BUDGETS) -> float:
        return sum(served.keeps(budgets) for served in self.served) / max(1, len(self.served))

    @property
    def rollout_tokens_per_s(self) -> float:
        return self.rollout_tokens / self.end_s


class _FixedThreshold(BurstReserve):
    """A rule that lends beside up to so many requests whatever the traffic is: the baseline of the rule that learns."""

    def __init__(self, window_s: float, threshold: int) -> None:
        super().__init__(window_s, SEQUENCES)
        self._threshold = threshold

    def running_max(self, now_s: float) -> int:
        return self._threshold


class Device:
    """A lent device; `run` simulates it to the end and checks every step."""

    def __init__(self, world: DeviceWorld) -> None:
        self.world = world
        self.now_s = 0.0
        self.report = DeviceReport()
        self._models = model_of(world.serving, noise=world.noise), model_of(world.rollout, noise=world.noise)
        self.memory = shared_memory(world.pages, lambda: self.now_s) if world.pages else None
        serving, rollout = load_profile(world.serving), load_profile(world.rollout)
        self._profiles = {"serving": serving, "rollout": rollout}
        tenants = (self.memory.serving, self.memory.rollout) if self.memory is not None else (None, None)
        pools = [tenant.memory.pool if tenant is not None else None for tenant in tenants]
        kv_blocks = world.kv_tokens // serving.block_tokens or None
        self._serving = SimulatedEngine(serving, pool=pools[0], kv_blocks=kv_blocks, spare_sequences=world.spare)
        self._rollout = SimulatedEngine(rollout, pool=pools[1])
        self.arbiter = self._new_arbiter(self._new_history())
        self.admission.history.bursts.restore(world.observed_s, (), (), 0.0)
        self._chances = {
            side: random.Random(f"{side} {world.seed + (world.noise_seed << 20)}") for side in ("serving", "rollout")
        }
        self._clients = ServingClients(world.traffic.arrivals(world.seed, world.until_s) + list(world.extra))
        coming = self._clients.coming
        self._window_end_s = min(world.until_s, coming[0][0]) if coming else world.until_s
        self._leaving: list[tuple[float, str]] = []  # clients that give up, the soonest first
        self._sequences: dict[str, tuple[int, ...]] = {}  # prompt and output of every running rollout
        self._last_side = "serving"
        self._turns_begun = self._steps = 0
        self._no_room: list[tuple[int, int, tuple[int, ...]]] = []  # turns to ask for again
        self._next_swap_s = world.swap_every_s or math.inf
        self._restart_s = world.restart_s or math.inf
        self._stalked_s = self._lent_before_s = 0.0
        self._breaches_before = 0
        self._aborted: set[str] = set()  # by a restart
        if world.mode is not None:
            for trajectory in range(world.trajectories):
                self._begin_turn(trajectory, 0, NEW_PROMPT)

    def _new_history(self) -> ServingHistory:
        history, threshold = (
            ServingHistory(self.world.budgets.ttft_s, SEQUENCES, self.world.spare),
            self.world.threshold,
        )
        if threshold is not None:
            history.bursts = _FixedThreshold(self.world.budgets.ttft_s, threshold)
        return history

    def _new_arbiter(self, history: ServingHistory) -> StepArbiter:
        """Return an arbiter as an engine process creates it at its start."""
        world = self.world
        self.breaker = Breaker() if world.breaks else None
        kv_bytes = load_profile(world.serving).kv_bytes_per_token
        limits = LendingLimits(
            STEP_TOKENS,
            STEP_TOKENS,
            SEQUENCES,
            spare_sequences=world.spare,
            switch_s=world.switch_s,
            kv_bytes_per_token=kv_bytes,
        )
        self.admission = Admission(
            world.mode or "idle", world.budgets, *self._models, limits, self.breaker, history
        )  # fmt: skip
        arbiter = StepArbiter(self._serving, self._rollout, self.admission, serving_budget=WIDE)
        if self.memory is not None:
            self.memory.inflation, self.memory.burst_blocks = arbiter.inflation, arbiter.burst_blocks
            self.memory.lend_to(self._rollout.scheduler, self._on_evicted)
        return arbiter

    def run(self) -> DeviceReport:
        report = self.report
        while self._clients.coming or self._clients.here:
            if self.now_s >= self._restart_s:
                self._restart()
            self._add_arrivals()
            self._remove_impatient_clients()
            if self.now_s >= self._next_swap_s:
                self._swap_weights()
            step = self._next_step()
            reason = self.arbiter.last_grant.reason
            report.reasons[reason] = report.reasons.get(reason, 0) + 1
            if step is not None:
                self._run_step(step)
            elif self._clients.coming:
                self.now_s = max(self.now_s, self._clients.coming[-1][0])
        report.rejected = self._clients.rejected
        report.end_s, report.window_s = self.now_s, self._window_end_s - self.world.warm_s
        self._check_accounts()
        if self.memory is not None:
            release_memory(self.memory, self.arbiter)
        return report

    # Events of the world

    def _add_arrivals(self) -> None:
        for request in self._clients.add_due(self.arbiter, self.now_s):
            if (patience_s := self.world.patience_s.get(request.request_id)) is not None:
                heapq.heappush(self._leaving, (request.arrival_s + patience_s, request.request_id))

    def _remove_impatient_clients(self) -> None:
        while self._leaving and self._leaving[0][0] <= self.now_s:
            _, name = heapq.heappop(self._leaving)
            if name in self._clients.here:
                served = self._cancel(name)
                served.is_cancelled = True
                self.report.served.append(served)
                self.report.cancelled += 1

    def _cancel(self, name: str) -> ServedRequest:
        self.arbiter.serving.cancel(name)
        self.report.breaches += self.arbiter.on_serving_gone(name, self.now_s)
        return self._clients.here.pop(name)

    def _restart(self) -> None:
        """End the engine process with all its requests; the next one continues with what was learnt of serving."""
        self._restart_s = math.inf
        for name in list(self._clients.here):
            self._cancel(name)
            self._aborted.add(name)
        self._lent_before_s += self.arbiter.accountant.total_lent_s
        self._breaches_before += self.arbiter.accountant.breaches.total()
        snapshot, history = self.admission.history.snapshot(self.now_s), self._new_history()
        history.restore(snapshot, self.now_s)
        self.arbiter = self._new_arbiter(history)

    def _swap_weights(self) -> None:
        """Load new weights into the rollout model, once serving can spare the pause."""
        world = self.world
        if world.mode is not None and self.arbiter.may_pause(world.swap_s, self._next_swap_s, self.now_s):
            self._next_swap_s += world.swap_every_s
            self._pause(world.swap_s)

    def _pause(self, seconds: float) -> None:
        """Work for the rollouts while serving waits."""
        begin_s, self.now_s = self.now_s, self.now_s + seconds
        self.arbiter.charge_pause(begin_s, self.now_s)
        self.report.lent_s += seconds
        self._add_arrivals()
        self._clients.record_lent(begin_s, self.now_s, is_step=False)

    # Steps

    def _next_step(self) -> StepDecision | None:
        """Choose the next step as the executor does: first the memory policy, then the arbiter."""
        if self.memory is None:
            return self.arbiter.next_step(self.now_s)
        self._steps += 1
        if self._no_room and self._steps % ASK_AGAIN_STEPS == 0:
            turns, self._no_room = self._no_room, []
            for turn in turns:
                self._begin_turn(*turn)
        share = self.memory.rollout.share
        held = share.held
        self.memory.observe()
        if self.world.page_s and (freed := held - share.held) > 0:
            self._pause(freed * self.world.page_s)
        before = self.arbiter.serving.facts().preemptions
        step = self.arbiter.next_step(self.now_s)
        if self.arbiter.serving.facts().preemptions > before:
            assert share.held == 0, "serving lacked a page that a rollout holds"
        self._check_memory(self.memory)
        return step

    def _run_step(self, step: StepDecision) -> None:
        if step.side == "rollout":
            check_lent_step(step, self.admission, self._clients.here.values(), self.now_s)
            self._send_stalker()
        engine = self.arbiter.serving if step.side == "serving" else self.arbiter.rollout
        cost_s = engine.cost_s(step.plan)  # type: ignore[attr-defined]
        events = engine.step(step.plan)
        begin_s, self.now_s = self.now_s, self.now_s + self._step_s(step.side, cost_s)
        breaches = self.arbiter.finish(step, events, begin_s, self.now_s)
        if step.side == "serving":
            self._record_serving_step(step, begin_s, events)
        else:
            self._record_lent_step(step, begin_s, is_late=bool(breaches))
            self._continue_rollouts(events)
        self.report.breaches += breaches

    def _step_s(self, side: str, cost_s: float) -> float:
        chance, world = self._chances[side], self.world
        step_s = cost_s * noise_of(self._profiles[side], cost_s, chance, world.noise)
        if self.now_s > world.until_s / 2:
            step_s *= world.drift
        if side != self._last_side:
            step_s += world.switch_s
        self._last_side = side
        return step_s + (world.stall_s if chance.random() < world.stall_share else 0.0)

    def _send_stalker(self) -> None:
        stalker, sent = self.world.stalker, self.report.sent
        if stalker is None or self.now_s < self._stalked_s or not 0 < self.now_s < self.world.until_s:
            return
        self._stalked_s, at_s = self.now_s + stalker.every_s, self.now_s + JUST_AFTER_S
        name = f"stalker {len(sent)}"
        sampling = Sampling(max_tokens=stalker.output_tokens, ignore_eos=True, seed=len(sent))
        request = Request(name, tuple(range(stalker.prompt_tokens)), sampling, tenant=name, arrival_s=at_s)
        sent.append((at_s, request))
        self._clients.coming.append((at_s, request))
        self._clients.coming.sort(key=lambda pair: -pair[0])

    @property
    def _is_in_window(self) -> bool:
        return self.world.warm_s <= self.now_s <= self._window_end_s

    def _record_serving_step(self, step: StepDecision, begin_s: float, events: Sequence[TokenEvent]) -> None:
        self.report.serving_s += self.now_s - begin_s
        if self._is_in_window:
            pairs = zip(astuple(self.report.window_work), astuple(step.plan.features))
            self.report.window_work = StepFeatures(*(one + other for one, other in pairs))
        self.report.served += self._clients.receive(events, self.now_s)

    def _record_lent_step(self, step: StepDecision, begin_s: float, *, is_late: bool) -> None:
        report, lent_s, tokens = self.report, self.now_s - begin_s, step.plan.features.new_tokens
        report.lent_steps += 1
        report.late_steps += is_late
        report.lent_s += lent_s
        report.longest_lent_s = max(report.longest_lent_s, lent_s)
        report.rollout_tokens += tokens
        if self._is_in_window:
            report.window_lent_s += lent_s
            report.window_rollout_tokens += tokens
        self._add_arrivals()
        self._clients.record_lent(begin_s, self.now_s)

    # Rollouts

    def _begin_turn(self, trajectory: int, turn: int, prompt_ids: tuple[int, ...]) -> None:
        name = f"{trajectory} {turn} {self._turns_begun}"
        self._turns_begun += 1
        length = self._chances["rollout"].randint(8, 32)
        sampling = Sampling(max_tokens=length, ignore_eos=True, seed=self._turns_begun)
        try:
            self.arbiter.rollout.add(Request(name, prompt_ids, sampling, tenant="rollouts", arrival_s=self.now_s))
        except (RequestRefused, Unavailable):
            self._no_room.append((trajectory, turn, prompt_ids))
            return
        self._sequences[name] = prompt_ids

    def _on_evicted(self, events: Sequence[TokenEvent]) -> None:
        """Queue evicted turns; each continues from its partial output as soon as there is room."""
        for event in events:
            assert event.finish_reason == "abort"
            self.report.evictions += 1
            trajectory, turn, _ = map(int, event.request_id.split())
            self._no_room.append((trajectory, turn, self._sequences.pop(event.request_id)))

    def _continue_rollouts(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self._sequences[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                sequence = self._sequences.pop(event.request_id)
                trajectory, turn, _ = map(int, event.request_id.split())
                if turn + 1 == TURNS:
                    self._begin_turn(trajectory, 0, NEW_PROMPT)
                else:
                    self._begin_turn(trajectory, turn + 1, sequence + NEW_PROMPT)

    # Checks

    def _check_accounts(self) -> None:
        ledger, report = self.arbiter.accountant, self.report
        assert ledger.open_accounts == 0
        assert abs(self._lent_before_s + ledger.total_lent_s - report.lent_s) < 1e-6
        assert self._breaches_before + ledger.breaches.total() == len(report.breaches)
        lost = {breach.request_id for breach in report.breaches if breach.objective == "ttft"}
        limit_s = self.world.budgets.ttft_s
        direct = {s.request.request_id for s in report.served if s.ttft_s - s.lent_s <= limit_s < s.ttft_s}
        late = {s.request.request_id for s in report.served if s.ttft_s > limit_s} | self._aborted
        assert direct <= lost <= late, "the accountant and the clients disagree"

    def _check_memory(self, memory: SharedMemory) -> None:
        rollout, serving = memory.rollout.share, memory.serving.share
        assert rollout.held <= rollout.budget_pages
        assert rollout.held + serving.held <= memory.pages.pages
        if self._steps % 20 == 0:
            memory.pages.check()
            for engine in (self.arbiter.serving, self.arbiter.rollout):
                engine.scheduler.check()


def shared_memory(pages: int, now_s: Callable[[], float]) -> SharedMemory:
    """Return memory that both sides of a simulated device share, under the real memory policy."""
    return SharedMemory(
        PagePool(pages, PAGE_BYTES),
        MemoryPolicy(pages),
        serving_block_bytes=SERVING_BLOCK_BYTES,
        rollout_block_bytes=ROLLOUT_BLOCK_BYTES,
        now_s=now_s,
    )


def release_memory(memory: SharedMemory, arbiter: StepArbiter) -> None:
    """Free the memory, and check that every page came back."""
    for engine in (arbiter.serving, arbiter.rollout):
        engine.limit_kv(0)
    for tenant in (memory.serving, memory.rollout):
        tenant.memory.pool.forget_digests()
        tenant.memory.pool.shrink(memory.pages.pages)
        assert tenant.share.held == 0, "a page was lost"
        tenant.share.memory.free()
    memory.pages.close()
