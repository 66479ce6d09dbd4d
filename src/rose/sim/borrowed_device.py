"""A borrowed device in virtual time: it serves users, and the real step arbiter lends the rest to rollouts.

Arbiter, admission, memory policy, page pool, residency and admin controls are the executor's own classes; only time and
traffic are simulated. What lending guarantees to serving is checked at every lent step and for every serving request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from rose.core.admission import Admission, LendingLimits, Mode
from rose.core.slo import Budgets
from rose.device import engine_messages
from rose.device.admin_controls import AdminControls
from rose.device.engine_server import CLOSED_RETRY_S, EngineServer
from rose.device.residency import RolloutResidency
from rose.device.step_arbiter import StepArbiter, StepDecision
from rose.device.tenancy import SharedMemory
from rose.engines.base import Budget, Request, Sampling, TokenEvent
from rose.engines.simulated import SimulatedEngine
from rose.errors import Unavailable
from rose.sim.models import ROLLOUT_SLOWER, SERVING_SLOWER, model_of, slowed
from rose.sim.network import NetworkGate
from rose.sim.scenario import Traffic
from rose.sim.simulated_device import release_memory, shared_memory
from rose.sim.simulated_handle import ASK_AGAIN_S, SimulatedHandle
from rose.sim.slo_invariants import ServingClients, check_lent_step
from rose.sim.token_oracle import LawfulEngine

STEP_TOKENS, SEQUENCES = 64, 16
WIDE = Budget(STEP_TOKENS, SEQUENCES)
BUDGETS = Budgets(4.0, 0.6)
NOISE = 0.03


@dataclass(frozen=True, slots=True)
class SimulatedLending:
    """How the device lends, and its serving traffic."""

    mode: Mode
    traffic: Traffic
    pages: int
    seed: int
    until_s: float


class ResidencyEvents:
    """The connection that `RolloutResidency` expects of a rollout front."""

    def __init__(self, evicted: Callable[[Sequence[TokenEvent]], None], tell: Callable[[], None]) -> None:
        self.closed, self.source = "", None
        self.send_evicted, self.send_lending_status = evicted, tell


class LentDevice(SimulatedHandle):
    """A handle with a serving side that survives the agent's process, but not the engine's."""

    def __init__(self, agents_gate: NetworkGate, lending: SimulatedLending) -> None:
        self.lending = lending
        self.served = self.lent_steps = 0
        self._chance = random.Random(f"lent {lending.seed}")
        self._clients = ServingClients(lending.traffic.arrivals(lending.seed, lending.until_s))
        self._step: StepDecision | None = None
        self._begin_s = self._now_s = 0.0
        self._memory: SharedMemory | None = None
        self._models = model_of("cpu", SERVING_SLOWER, NOISE), model_of("cpu-frozenlake-1m", ROLLOUT_SLOWER, NOISE)
        super().__init__(agents_gate)
        self.lending_status = self._admin.status()

    def _fresh(self) -> LawfulEngine:
        self.close_memory()
        memory = self._memory = shared_memory(self.lending.pages, lambda: self._now_s)
        limits = LendingLimits(STEP_TOKENS, STEP_TOKENS, SEQUENCES, SEQUENCES)
        self._admission = Admission(self.lending.mode, BUDGETS, *self._models, limits)
        serving = SimulatedEngine(slowed("cpu", SERVING_SLOWER), pool=memory.serving.memory.pool)
        rollout = LawfulEngine(slowed("cpu-frozenlake-1m", ROLLOUT_SLOWER), pool=memory.rollout.memory.pool)
        self.arbiter = StepArbiter(serving, rollout, self._admission, serving_budget=WIDE)
        self._residency = RolloutResidency(
            self.arbiter, rollout, memory, folder="", now_s=lambda: self._now_s, wake=self._awake.set
        )
        self._residency.server = cast(EngineServer, ResidencyEvents(self.tell, self._tell_lending))
        self._admin = AdminControls(self.arbiter, self._residency, memory, lambda: self._now_s)
        self._clients.here.clear()
        return rollout

    def close_memory(self) -> None:
        """Free the memory, and check that every page came back."""
        memory, self._memory = self._memory, None
        if memory is not None:
            release_memory(memory, self.arbiter)

    # Admin commands

    def control(self, action: Literal["pause", "drain", "resume"]) -> None:
        """Apply an admin command; without an engine it is lost, as on a real device."""
        if self.trouble is None:
            self._between_steps(lambda: self._admin.obey(engine_messages.AdminCommand(action)))

    def attach(self) -> None:
        if self.trouble is None:
            self._between_steps(lambda: self._want(True))

    def restart(self) -> None:
        super().restart()
        self.lending_status = self._admin.status()

    def spike(self, requests: int, now_s: float) -> None:
        """Add many long prompts at once."""
        for number in range(requests):
            name = f"spike {now_s:.3f} {number}"
            sampling = Sampling(max_tokens=4, ignore_eos=True, seed=number)
            request = Request(name, tuple(range(96)), sampling, tenant=name, arrival_s=now_s)
            self._clients.coming.append((now_s, request))
        self._awake.set()

    # Steps

    def _next_step(self, now_s: float) -> float | None:
        self._now_s = now_s
        self._clients.add_due(self.arbiter, now_s)
        assert self._memory is not None
        if self._residency.is_resident:
            self._memory.observe()
        self._residency.report_if_blocked()
        before = self.arbiter.serving.facts().preemptions
        step = self._step = self.arbiter.next_step(now_s)
        if self.arbiter.serving.facts().preemptions > before:
            assert self._memory.rollout.share.held == 0, "a rollout holds a page that serving needs"
        if step is None:
            return None
        if step.side == "rollout":
            assert not self.arbiter.stopped, "a lent step on a device that its owner has reclaimed"
            assert self._residency.is_resident, "a lent step of a parked model"
            check_lent_step(step, self._admission, self._clients.here.values(), now_s)
        engine = self.arbiter.serving if step.side == "serving" else self.arbiter.rollout
        self._begin_s = now_s
        cost_s: float = engine.cost_s(step.plan)  # type: ignore[attr-defined]
        return cost_s * self._chance.lognormvariate(0, NOISE)

    def _end_step(self, now_s: float) -> None:
        self._now_s = now_s
        step = self._step
        assert step is not None
        engine = self.arbiter.serving if step.side == "serving" else self.arbiter.rollout
        events = engine.step(step.plan)
        self.arbiter.finish(step, events, self._begin_s, now_s)
        if step.side == "serving":
            self.served += len(self._clients.receive(events, now_s))
            return
        self.lent_steps += 1
        self._clients.add_due(self.arbiter, now_s)
        self._clients.record_lent(self._begin_s, now_s)
        most = max((served.lent_steps for served in self._clients.here.values()), default=0)
        assert most <= 1, "a serving prompt waited for more than one rollout step"
        self.tell(events, step.plan.features.new_tokens, now_s - self._begin_s)

    def _wait_s(self, now_s: float) -> float | None:
        coming = self._clients.coming
        waits = [max(0.0, coming[-1][0] - now_s)] if coming else []
        if self.requests and not self.arbiter.stopped:
            waits.append(ASK_AGAIN_S)
        return min(waits, default=None)

    # Rollouts

    def _add(self, request: Request) -> None:
        if self._residency.closed and request.request_id in self._sinks:
            self._sinks.fail(request.request_id, Unavailable(self._residency.closed, retry_after_s=CLOSED_RETRY_S))
            return
        super()._add(request)

    def _want(self, is_wanted: bool) -> None:
        self._residency.set_wanted(is_wanted)

    def _tell_lending(self) -> None:
        status = self._admin.status()

        def publish() -> None:
            self.lending_status = status
            self.events.lending.publish(status)

        self._agents_gate.enter(publish)

    def _swapped(self) -> None:
        assert self._memory is not None
        self._memory.weights_swapped = True
