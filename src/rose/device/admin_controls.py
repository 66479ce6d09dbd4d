"""Carry out the operator's commands on a co-serving device, between two steps, and report its lending status.

`core.lending_state` says what each command changes; this module applies the result to the rollout model's residency,
the shared memory and the step arbiter. `pause` keeps requests and memory. `drain` ends requests and gives serving every
page; `remove` also releases the weights. `resume` lends again, whatever stopped it. `dry_run` lends nothing, and adds
up what lending would have given. `limits` bounds memory and time. Each command is answered with the whole status.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rose.core.accountant import KINDS
from rose.core.lending_state import TRANSITIONS, ActualLending, Stop, StopCause, after_command, reconcile, with_stop
from rose.device import engine_messages
from rose.device.residency import RolloutResidency
from rose.device.step_arbiter import StepArbiter
from rose.device.tenancy import SharedMemory
from rose.engines.base import DryRunStatus, LendingStatus
from rose.engines.recorded_steps import RecordedSide, RecordedSteps, rows_of


class AdminControls:
    """The operator's end of one device."""

    def __init__(
        self, arbiter: StepArbiter, residency: RolloutResidency, memory: SharedMemory, now_s: Callable[[], float]
    ) -> None:
        self._arbiter, self._residency, self._memory, self._now_s = arbiter, residency, memory, now_s
        residency.status = self.status

    def obey(self, command: engine_messages.AdminCommand) -> None:
        """Carry out one command. Raises RequestRefused for one that cannot be."""
        arbiter, residency, memory = self._arbiter, self._residency, self._memory
        arbiter.adopt(
            after_command(arbiter.desired, command.action, command.memory_share, command.compute_share), self._now_s()
        )
        target = TRANSITIONS[command.action].residency
        if target == "resident":
            residency.activate()
        elif target is not None:
            self._leave()
        if command.action == "limits" and command.memory_share is not None:
            share = arbiter.desired.memory_share
            memory.owner_limit_pages = int(share * memory.pages.pages) if share < 1 else None
            if residency.is_resident:
                memory.observe()
        if command.action != "status":
            residency.report()

    def take_over(self, lend: engine_messages.Lend) -> None:
        """Restore what held in the engine before, and hold rollouts back if they may have ended it."""
        if lend.held_back:
            stop = Stop(StopCause.HELD_BACK, lend.held_back)
            self._arbiter.adopt(with_stop(self._arbiter.desired, stop, "parked"), self._now_s())
            self._leave()
        for command in lend.commands:
            self.obey(command)
        if lend.history is not None:
            self._arbiter.admission.history.restore(lend.history, self._now_s())

    def _leave(self) -> None:
        result = reconcile(self._arbiter.desired, self._actual())
        if result.residency != "resident" and result.stop is not None:
            self._residency.leave(result.residency, result.stop.text)

    def _actual(self) -> ActualLending:
        residency = self._residency
        return ActualLending(residency.state, residency.is_loading, failure=residency.failure)

    def status(self) -> LendingStatus:
        """Return how the device is lent. Raises what the rollout model's code raises, unless that has failed before."""
        arbiter, residency, memory = self._arbiter, self._residency, self._memory
        desired, now_s = replace(arbiter.desired, is_wanted=residency.is_wanted), self._now_s()
        stop = arbiter.stopped.text if arbiter.stopped is not None else ""
        memory_status, facts = memory.policy.status(), None if residency.failure else residency.engine.facts()
        return LendingStatus(
            state=reconcile(desired, self._actual()).state,
            why=stop or residency.closed or arbiter.last_grant.reason,
            mode=arbiter.admission.mode,
            model=residency.state,
            model_bytes=residency.engine.weights_bytes if facts is not None else 0,
            activation_s=residency.activation_s,
            parking_s=residency.parking_s,
            running=facts.running if facts is not None else 0,
            waiting=facts.waiting if facts is not None else 0,
            lent_steps=arbiter.lent_steps,
            lent_tokens=arbiter.lent_tokens,
            lent_s=arbiter.accountant.total_lent_s,
            evictions=residency.evictions,
            evicted_tokens=residency.evicted_tokens + memory.evicted_tokens,
            breaches={kind: arbiter.accountant.breaches[kind] for kind in KINDS},
            breaker_trips=arbiter.admission.breaker.trips if arbiter.admission.breaker is not None else 0,
            page_bytes=memory.pages.page_bytes,
            pages=memory.pages.pages,
            rollout_pages=memory.rollout.share.held,
            rollout_pages_max=memory.rollout.share.budget_pages,
            serving_pages=memory.serving.share.held,
            headroom_pages=memory_status.headroom_pages,
            memory_state=memory_status.state.value,
            lending_stretch=memory_status.lending_stretch,
            memory_share=desired.memory_share,
            compute_share=desired.compute_share,
            dry_run=self._dry_run(now_s),
            slack_s=arbiter.slack_s(now_s),
            serving=arbiter.admission.history.times,
            is_resting=bool(arbiter.why_resting(now_s)),
            shut_s=arbiter.stalls.blocked_s(now_s),
            ttft_budget_s=arbiter.accountant.budgets.ttft_s,
            tpot_budget_s=arbiter.accountant.budgets.tpot_s,
        )

    def recorded_steps(self) -> RecordedSteps:
        """Return the steps of both engines since the engine process began."""
        arbiter, pages = self._arbiter, self._memory.pages
        sides: list[RecordedSide] = []
        for name, engine in (("serving", arbiter.serving), ("rollout", arbiter.rollout)):
            limits, samples = engine.scheduler.limits, arbiter.samples[name]
            sides.append(
                RecordedSide(
                    name, samples.seen, rows_of(samples.shapes), rows_of(samples.drawn),
                    limits.block_bytes // limits.block_tokens, pages.pages * pages.page_bytes, limits.block_tokens,
                    limits.max_context_tokens,
                )
            )  # fmt: skip
        return RecordedSteps(*sides)

    def _dry_run(self, now_s: float) -> DryRunStatus | None:
        dry_run = self._arbiter.dry_run
        if dry_run is None:
            return None
        dry_run.settle(now_s)
        return DryRunStatus(now_s - dry_run.since_s, dry_run.tokens, dry_run.lent_s)
