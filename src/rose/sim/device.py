"""One device in virtual time: exclusive steps of two models that nobody can interrupt, and the real core deciding.

Both sides are simulated engines and the loop's decisions are the executor's own object, `Lender`; only time is made up:
the profile's cost, some noise, a cost of changing sides, now and then a stall, and a drift that the models were not
told of. Rollouts are a closed loop of trajectories: a turn's prompt is all that was said before and a little more. What
the modes promise is checked at every step, from figures kept here apart from the ledger's.

With `pages` both sides share one real pool of (small) pages under the real memory policy: an evicted turn goes on from
what it has said, and serving never waits for a page that a rollout holds.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from rose.core.admission import Admission, LendingLimits, Mode
from rose.core.breaches import Breach
from rose.core.breaker import Breaker
from rose.core.latency import LatencyModel
from rose.core.memory import MemoryPolicy
from rose.core.slo import Budgets
from rose.coserve.lending import Lender, NextStep
from rose.coserve.pages import PagePool
from rose.coserve.tenancy import SharedMemory
from rose.engines.base import Budget, Request, Sampling, TokenEvent
from rose.engines.profiles import load_profile
from rose.engines.simulated import SimulatedEngine
from rose.errors import QueueFull, RequestRefused, Unavailable
from rose.sim.models import learnt
from rose.sim.promises import Served, check_lent_step

STEP_TOKENS = 512
SEQUENCES = 64
WIDE = Budget(STEP_TOKENS, SEQUENCES)
GIVEN = Budgets(0.5, 0.15, answer_s=60.0)
TURNS = 10
PAGE_BYTES, SERVING_BLOCK_BYTES, ROLLOUT_BLOCK_BYTES = 16 << 10, 8 << 10, 4 << 10
ASK_AGAIN_STEPS = 50  # turns that found no room are asked for again after so many
NEW_PROMPT = tuple(range(24))


class Arrivals(Protocol):
    """Whoever sends requests: `rose.sim.traffic`, or a recorded trace."""

    def arrivals(self, seed: int, until_s: float) -> list[tuple[float, Request]]: ...


@dataclass(frozen=True, slots=True)
class World:
    """What a device is and what happens to it. `mode` None is serving alone."""

    mode: Mode | None
    traffic: Arrivals
    seed: int = 0
    until_s: float = 20.0
    budgets: Budgets = GIVEN
    serving: str = "cpu"
    rollout: str = "cpu-frozenlake-1m"
    noise: float = 0.03
    switch_s: float = 0.0001
    stall_share: float = 0.0
    stall_s: float = 0.05
    drift: float = 1.0  # every step from the middle on takes this much longer
    breaks: bool = False  # with a circuit breaker
    pages: int = 0  # of KV memory that both sides share; 0 for plenty each
    trajectories: int = 32


@dataclass(slots=True)
class Report:
    """What came of it."""

    served: list[Served] = field(default_factory=list)
    breaches: list[Breach] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    rollout_tokens: int = 0
    lent_steps: int = 0
    late_steps: int = 0
    lent_s: float = 0.0
    longest_lent_s: float = 0.0
    serving_s: float = 0.0
    end_s: float = 0.0
    doubtful: int = 0
    evictions: int = 0
    rejected: int = 0

    def attainment(self, budgets: Budgets = GIVEN) -> float:
        return sum(served.keeps(budgets) for served in self.served) / max(1, len(self.served))

    @property
    def rollout_tokens_per_s(self) -> float:
        return self.rollout_tokens / self.end_s


@cache
def _profiled(name: str, noise: float) -> LatencyModel:
    return learnt(load_profile(name).step_s, noise)


class Device:
    """`run` to the end; every step checks what must hold."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now_s = 0.0
        self.report = Report()
        self.breaker = Breaker() if world.breaks else None
        serving_model, rollout_model = (
            copy.deepcopy(_profiled(name, world.noise)) for name in (world.serving, world.rollout)
        )
        limits = LendingLimits(STEP_TOKENS, STEP_TOKENS, SEQUENCES, switch_s=world.switch_s)
        self.admission = Admission(
            world.mode or "idle", world.budgets, serving_model, rollout_model, limits, self.breaker
        )
        self.memory = self._shared_memory() if world.pages else None
        tenants = (self.memory.serving, self.memory.rollout) if self.memory is not None else (None, None)
        serving, rollout = (
            SimulatedEngine(load_profile(name), pool=tenant.memory.pool if tenant is not None else None)
            for name, tenant in zip((world.serving, world.rollout), tenants, strict=True)
        )
        self.lender = Lender(serving, rollout, self.admission, serving_budget=WIDE)
        if self.memory is not None:
            self.memory.stretch = self.lender.stretch
            self.memory.lend_to(rollout.scheduler, self._evicted)
        self._chances = {side: random.Random(f"{side} {world.seed}") for side in ("serving", "rollout")}
        self._coming = world.traffic.arrivals(world.seed, world.until_s)[::-1]
        self._here: dict[str, Served] = {}
        self._said: dict[str, tuple[int, ...]] = {}
        self._last_side = "serving"
        self._turns_begun = self._steps = 0
        self._no_room: list[tuple[int, int, tuple[int, ...]]] = []
        if world.mode is not None:
            for trajectory in range(world.trajectories):
                self._begin_turn(trajectory, 0, NEW_PROMPT)

    def run(self) -> Report:
        while self._coming or self._here:
            self._take_arrivals()
            step = self._next_step()
            reason = self.lender.last_grant.reason
            self.report.reasons[reason] = self.report.reasons.get(reason, 0) + 1
            if step is not None:
                self._run(step)
            else:
                self.now_s = self._coming[-1][0]
        self.report.end_s = self.now_s
        self.report.doubtful = self.lender.ledger.doubtful
        self._check_accounts()
        if self.memory is not None:
            self._free_memory(self.memory)
        return self.report

    def _next_step(self) -> NextStep | None:
        """As the executor does it: memory first, then whose step it is."""
        if self.memory is None:
            return self.lender.next_step(self.now_s)
        self._steps += 1
        if self._no_room and self._steps % ASK_AGAIN_STEPS == 0:
            turns, self._no_room = self._no_room, []
            for turn in turns:
                self._begin_turn(*turn)
        self.memory.observe()
        before = self.lender.serving.facts().preemptions
        step = self.lender.next_step(self.now_s)
        if self.lender.serving.facts().preemptions > before:
            assert self.memory.rollout.share.held == 0, "serving went short of a page that a rollout holds"
        self._check_memory(self.memory)
        return step

    def _take_arrivals(self) -> None:
        while self._coming and self._coming[-1][0] <= self.now_s:
            _, request = self._coming.pop()
            try:
                self.lender.add_serving(request)
            except QueueFull:
                self.report.rejected += 1
                continue
            self._here[request.request_id] = Served(request)

    def _run(self, step: NextStep) -> None:
        if step.side == "rollout":
            check_lent_step(step, self.admission, self._here.values(), self.now_s)
        engine = self.lender.serving if step.side == "serving" else self.lender.rollout
        cost_s = engine.cost_s(step.plan)  # type: ignore[attr-defined]
        events = engine.step(step.plan)
        begin_s, self.now_s = self.now_s, self.now_s + self._taken(step.side, cost_s)
        breaches = self.lender.finish(step, events, begin_s, self.now_s)
        if step.side == "serving":
            self.report.serving_s += self.now_s - begin_s
            self._hear(events)
        else:
            self._count(step, begin_s, is_late=bool(breaches))
            self._hear_rollouts(events)
        self._note(breaches)

    # What must hold

    def _check_accounts(self) -> None:
        ledger = self.lender.ledger
        assert ledger.open_accounts == 0
        assert abs(ledger.total_lent_s - self.report.lent_s) < 1e-6
        assert ledger.breaches == len(self.report.breaches)
        lost = {breach.request_id for breach in self.report.breaches if breach.objective == "ttft"}
        limit_s = self.world.budgets.ttft_s
        direct = {s.request.request_id for s in self.report.served if s.ttft_s - s.lent_s <= limit_s < s.ttft_s}
        late = {s.request.request_id for s in self.report.served if s.ttft_s > limit_s}
        assert direct <= lost <= late, "the ledger and the clients disagree"

    def _check_memory(self, memory: SharedMemory) -> None:
        rollout, serving = memory.rollout.share, memory.serving.share
        assert rollout.held <= rollout.budget_pages
        assert rollout.held + serving.held <= memory.pages.pages
        if self._steps % 20 == 0:
            memory.pages.check()
            for engine in (self.lender.serving, self.lender.rollout):
                engine.scheduler.check()

    def _shared_memory(self) -> SharedMemory:
        return SharedMemory(
            PagePool(self.world.pages, PAGE_BYTES),
            MemoryPolicy(self.world.pages),
            serving_block_bytes=SERVING_BLOCK_BYTES,
            rollout_block_bytes=ROLLOUT_BLOCK_BYTES,
            now_s=lambda: self.now_s,
        )

    def _free_memory(self, memory: SharedMemory) -> None:
        """Every page must come back when nobody needs one."""
        for engine in (self.lender.serving, self.lender.rollout):
            engine.limit_kv(0)
        for tenant in (memory.serving, memory.rollout):
            tenant.memory.pool.forget_digests()
            tenant.memory.pool.shrink(self.world.pages)
            assert tenant.share.held == 0
            tenant.share.memory.free()
        memory.pages.close()

    # What happened

    def _count(self, step: NextStep, begin_s: float, *, is_late: bool) -> None:
        report, taken_s = self.report, self.now_s - begin_s
        report.lent_steps += 1
        report.late_steps += is_late
        report.lent_s += taken_s
        report.longest_lent_s = max(report.longest_lent_s, taken_s)
        report.rollout_tokens += step.plan.features.new_tokens
        self._take_arrivals()
        for served in self._here.values():
            served.step_lent(begin_s, self.now_s)

    def _note(self, breaches: list[Breach]) -> None:
        self.report.breaches += breaches

    def _hear(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self._here[event.request_id].token_made(len(event.token_ids), self.now_s)
            if event.finish_reason is not None:
                self.report.served.append(self._here.pop(event.request_id))

    # Rollouts

    def _begin_turn(self, trajectory: int, turn: int, prompt_ids: tuple[int, ...]) -> None:
        name = f"{trajectory} {turn} {self._turns_begun}"
        self._turns_begun += 1
        length = self._chances["rollout"].randint(8, 32)
        sampling = Sampling(max_tokens=length, ignore_eos=True, seed=self._turns_begun)
        try:
            self.lender.rollout.add(Request(name, prompt_ids, sampling, tenant="rollouts", arrival_s=self.now_s))
        except (RequestRefused, Unavailable):
            self._no_room.append((trajectory, turn, prompt_ids))
            return
        self._said[name] = prompt_ids

    def _evicted(self, events: Sequence[TokenEvent]) -> None:
        """Each goes on from what it has said, as soon as there is room."""
        for event in events:
            assert event.finish_reason == "abort"
            self.report.evictions += 1
            trajectory, turn, _ = (int(word) for word in event.request_id.split())
            self._no_room.append((trajectory, turn, self._said.pop(event.request_id)))

    def _hear_rollouts(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self._said[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                said = self._said.pop(event.request_id)
                trajectory, turn, _ = (int(word) for word in event.request_id.split())
                is_last = turn + 1 == TURNS
                self._begin_turn(trajectory, 0 if is_last else turn + 1, NEW_PROMPT if is_last else said + NEW_PROMPT)

    # Time

    def _taken(self, side: str, cost_s: float) -> float:
        chance, world = self._chances[side], self.world
        taken_s = cost_s * chance.lognormvariate(0, world.noise)
        if self.now_s > world.until_s / 2:
            taken_s *= world.drift
        if side != self._last_side:
            taken_s += world.switch_s
        self._last_side = side
        return taken_s + (world.stall_s if chance.random() < world.stall_share else 0.0)
