"""A borrowed device in virtual time: it serves users, and the real lender decides what is left for rollouts.

Lender, admission, memory policy, page pool, the guest and the owner's controls are the executor's own objects; only
time and traffic are made up. What they promise serving is checked at every lent step and for every request that was
served.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from rose.core.admission import Admission, LendingLimits, Mode
from rose.core.memory import MemoryPolicy
from rose.core.slo import Budgets
from rose.coserve import messages
from rose.coserve.guest import Guest
from rose.coserve.lending import Lender, NextStep
from rose.coserve.owner import Owner
from rose.coserve.pages import PagePool
from rose.coserve.port import CLOSED_RETRY_S, Port
from rose.coserve.tenancy import SharedMemory
from rose.engines.base import Budget, Request, Sampling, TokenEvent
from rose.engines.simulated import SimulatedEngine
from rose.errors import QueueFull, Unavailable
from rose.sim.gate import Gate
from rose.sim.handle import ASK_AGAIN_S, SimulatedHandle
from rose.sim.law import LawfulEngine
from rose.sim.profiles import ROLLOUT_SLOWER, SERVING_SLOWER, model_of, slowed
from rose.sim.promises import Served, check_lent_step
from rose.sim.traffic import Traffic

STEP_TOKENS, SEQUENCES = 64, 16
WIDE = Budget(STEP_TOKENS, SEQUENCES)
PAGE_BYTES, SERVING_BLOCK_BYTES, ROLLOUT_BLOCK_BYTES = 16 << 10, 8 << 10, 4 << 10
BUDGETS = Budgets(4.0, 0.6)
NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Lending:
    """What is lent, and to whom serving owes answers meanwhile."""

    mode: Mode
    traffic: Traffic
    pages: int
    seed: int
    until_s: float


class Seat:
    """What a guest needs of whoever speaks for it."""

    def __init__(self, evicted: Callable[[Sequence[TokenEvent]], None], tell: Callable[[], None]) -> None:
        self.closed, self.source = "", None
        self.send_evicted, self.tell_lending = evicted, tell


class LentDevice(SimulatedHandle):
    """Its serving side goes on whatever becomes of the agent's process; what kills the engine kills both."""

    def __init__(self, agents_gate: Gate, lending: Lending) -> None:
        self.lending = lending
        self.served = self.rejected = self.lent_steps = self.evictions = 0
        self._chance = random.Random(f"lent {lending.seed}")
        self._coming = lending.traffic.arrivals(lending.seed, lending.until_s)[::-1]
        self._here: dict[str, Served] = {}
        self._step: NextStep | None = None
        self._begin_s = self._now_s = 0.0
        self._memory: SharedMemory | None = None
        self._models = model_of("cpu", SERVING_SLOWER, NOISE), model_of("cpu-frozenlake-1m", ROLLOUT_SLOWER, NOISE)
        super().__init__(agents_gate)
        self.lending_status = self._owner.status()

    def _fresh(self) -> LawfulEngine:
        self.close_memory()
        memory = self._memory = SharedMemory(
            PagePool(self.lending.pages, PAGE_BYTES),
            MemoryPolicy(self.lending.pages),
            serving_block_bytes=SERVING_BLOCK_BYTES,
            rollout_block_bytes=ROLLOUT_BLOCK_BYTES,
            now_s=lambda: self._now_s,
        )
        limits = LendingLimits(STEP_TOKENS, STEP_TOKENS, SEQUENCES, SEQUENCES)
        self._admission = Admission(self.lending.mode, BUDGETS, *self._models, limits)
        serving = SimulatedEngine(slowed("cpu", SERVING_SLOWER), pool=memory.serving.memory.pool)
        rollout = LawfulEngine(slowed("cpu-frozenlake-1m", ROLLOUT_SLOWER), pool=memory.rollout.memory.pool)
        self.lender = Lender(serving, rollout, self._admission, serving_budget=WIDE)
        self._guest = Guest(
            self.lender, rollout, memory, folder="", budget=WIDE, now_s=lambda: self._now_s, wake=self._awake.set
        )
        self._guest.port = cast(Port, Seat(self._evicted, self._tell_lending))
        self._owner = Owner(self.lender, self._guest, memory, lambda: self._now_s)
        self._here.clear()
        return rollout

    def close_memory(self) -> None:
        """Every page must come back."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        for engine in (self.lender.serving, self.lender.rollout):
            engine.limit_kv(0)
        for tenant in (memory.serving, memory.rollout):
            tenant.memory.pool.forget_digests()
            tenant.memory.pool.shrink(self.lending.pages)
            assert tenant.share.held == 0, "a page was lost"
            tenant.share.memory.free()
        memory.pages.close()

    # The owner

    def control(self, action: Literal["pause", "drain", "resume"]) -> None:
        """The owner's word. One that comes while there is no engine is lost, as on a real device."""
        if self.trouble is None:
            self._between_steps(lambda: self._owner.obey(messages.Control(action)))

    def attach(self) -> None:
        if self.trouble is None:
            self._between_steps(lambda: self._want(True))

    def restart(self) -> None:
        super().restart()
        self.lending_status = self._owner.status()

    def spike(self, requests: int, now_s: float) -> None:
        """Many long prompts at once."""
        for number in range(requests):
            name = f"spike {now_s:.3f} {number}"
            sampling = Sampling(max_tokens=4, ignore_eos=True, seed=number)
            request = Request(name, tuple(range(96)), sampling, tenant=name, arrival_s=now_s)
            self._coming.append((now_s, request))
        self._awake.set()

    # Steps

    def _next_step(self, now_s: float) -> float | None:
        self._now_s = now_s
        self._take_arrivals(now_s)
        assert self._memory is not None
        if self._guest.is_here:
            self._memory.observe()
        self._guest.notice_gate()
        before = self.lender.serving.facts().preemptions
        step = self._step = self.lender.next_step(now_s)
        if self.lender.serving.facts().preemptions > before:
            assert self._memory.rollout.share.held == 0, "serving went short of a page that a rollout holds"
        if step is None:
            return None
        if step.side == "rollout":
            assert not self.lender.stopped, "a lent step on a device that its owner has taken back"
            assert self._guest.is_here, "a lent step of a model that is parked"
            check_lent_step(step, self._admission, self._here.values(), now_s)
        engine = self.lender.serving if step.side == "serving" else self.lender.rollout
        self._begin_s = now_s
        cost_s: float = engine.cost_s(step.plan)  # type: ignore[attr-defined]
        return cost_s * self._chance.lognormvariate(0, NOISE)

    def _end_step(self, now_s: float) -> None:
        self._now_s = now_s
        step = self._step
        assert step is not None
        engine = self.lender.serving if step.side == "serving" else self.lender.rollout
        events = engine.step(step.plan)
        self.lender.finish(step, events, self._begin_s, now_s)
        if step.side == "serving":
            self._hear_serving(events, now_s)
            return
        self.lent_steps += 1
        self._take_arrivals(now_s)
        for served in self._here.values():
            served.step_lent(self._begin_s, now_s)
            assert served.lent_steps <= 1, "a user's prompt waited for more than one step of a rollout"
        self.tell(events, step.plan.features.new_tokens, now_s - self._begin_s)

    def _wait_s(self, now_s: float) -> float | None:
        waits = [max(0.0, self._coming[-1][0] - now_s)] if self._coming else []
        if self.requests and not self.lender.stopped:
            waits.append(ASK_AGAIN_S)
        return min(waits, default=None)

    def _take_arrivals(self, now_s: float) -> None:
        while self._coming and self._coming[-1][0] <= now_s:
            _, request = self._coming.pop()
            try:
                self.lender.add_serving(request)
            except QueueFull:
                self.rejected += 1
                continue
            self._here[request.request_id] = Served(request)

    def _hear_serving(self, events: Sequence[TokenEvent], now_s: float) -> None:
        for event in events:
            served = self._here[event.request_id]
            served.token_made(len(event.token_ids), now_s)
            if event.finish_reason is not None:
                del self._here[event.request_id]
                self.served += 1

    # Rollouts

    def _add(self, request: Request) -> None:
        mailbox = self._mailboxes.get(request.request_id)
        if self._guest.closed and mailbox is not None:
            del self._mailboxes[request.request_id]
            mailbox.fail(Unavailable(self._guest.closed, retry_after_s=CLOSED_RETRY_S))
            return
        super()._add(request)

    def _want(self, is_wanted: bool) -> None:
        self._guest.want(is_wanted)

    def _evicted(self, events: Sequence[TokenEvent]) -> None:
        self.evictions += len(events)
        self.tell(events)

    def _tell_lending(self) -> None:
        status = self._owner.status()
        self._agents_gate.enter(lambda: self._hear_lending(status))

    def _hear_lending(self, status: messages.LendingStatus) -> None:
        self.lending_status = status
        self.on_lending()

    def _swapped(self) -> None:
        assert self._memory is not None
        self._memory.weights_swapped = True
