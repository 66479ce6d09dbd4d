"""Decide whose step is next on a co-serving device: serving first, rollouts within serving's slack.

The arbiter adapts `core.lending_controller` to two step engines. Before each step it builds a fresh view of serving,
asks for a grant, and plans a rollout step that fits it, or else serving's next step. After the step the latency models,
the SLO accountant and the circuit breaker learn from it. A rollout step cannot be stopped once it runs, so grants are
short. Planning counts as lent time, and the loop asks `may_begin` when it is done. The arbiter holds no clock and no
socket: the live executor and the simulator run the same object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rose.core.accountant import Breach
from rose.core.admission import Admission, StepKinds
from rose.core.facts import Grant, RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.lending_controller import LendingController
from rose.core.memory import ResidenceInflation
from rose.core.stalls import StallDetector
from rose.core.step_samples import StepSamples
from rose.engines.base import Budget, PlannedRequest, Request, StepEngine, StepPlan, TokenEvent
from rose.engines.batch_scheduler import BatchScheduler
from rose.engines.live_request import LiveRequest

SideName = Literal["serving", "rollout"]
Decided = Callable[[float, ServingView, RolloutView, Grant], None]
PLAN_SHRINKS = (0.9, 0.5, 0.0, 0.0)  # a little too long; far too long; at last one token of one sequence
REFIT_S = 0.01  # at most: 4 ms as a rule, of as many steps as a model keeps
PAUSE_WAIT_S = 2.0  # new weights wait so long at most for a moment at which serving can spare the pause
WAITING_SHOWN = 64  # admission closes long before this many wait; the rest would only cost time to list


class ScheduledEngine(StepEngine, Protocol):
    """A step engine on our scheduler: embedded or simulated."""

    @property
    def scheduler(self) -> BatchScheduler: ...


@dataclass(frozen=True, slots=True)
class StepDecision:
    """One step that may run now. `upper_s` is the upper estimate of its duration.

    The time from `asked_s` to the step's start was spent on planning for rollouts, successfully or not.
    """

    side: SideName
    plan: StepPlan
    upper_s: float
    grant: Grant | None = None
    asked_s: float | None = None


@dataclass(slots=True)
class _Answer:
    first_token_s: float
    tokens: int = 0
    last_token_s: float = 0.0


class StepArbiter(LendingController):
    """The lending controller of one device with two step engines, which learns of every request's arrival and end."""

    def __init__(
        self, serving: ScheduledEngine, rollout: ScheduledEngine, admission: Admission, *, serving_budget: Budget
    ) -> None:
        super().__init__(admission)
        self.serving = serving
        self.rollout = rollout
        self.dropped_steps = 0  # planned too late for their grant
        self.blocked = ""  # why rollouts could use nothing just now
        self.stalls = StallDetector()
        self.on_decision: Decided | None = None  # receives every view and its grant, for the journal
        self.last_grant = Grant(0, 0, 0.0, "nothing was asked yet")
        self.inflation = ResidenceInflation()
        self.samples = {"serving": StepSamples(), "rollout": StepSamples()}  # with the loop's own time before each step
        self._busy_since_s: float | None = None  # the end of the last step, unless nothing could run since
        self._serving_budget = serving_budget
        self._answers: dict[str, _Answer] = {}  # of the serving requests that have their first token
        self._arrivals: dict[str, tuple[float, float]] = {}  # serving request: arrival, and seconds lent before it
        self._wanted = RolloutView(1)  # what rollouts wanted when they last wanted something
        self._views = 0
        self._last_step, self._last_step_s = StepFeatures(), 0.0

    # Requests

    def add_serving(self, request: Request) -> None:
        """Add a request. Raises what the engine raises; a request that it refuses leaves no trace."""
        self.serving.add(request)
        self.on_serving_added(request)

    def on_serving_added(self, request: Request) -> None:
        self.accountant.on_arrival(request.request_id, request.arrival_s, len(request.prompt_ids))
        self._arrivals[request.request_id] = (request.arrival_s, self.accountant.total_lent_s)

    def on_serving_gone(self, request_id: str, now_s: float) -> list[Breach]:
        """Account for a request that was cancelled, as by a stop string, or evicted."""
        arrival, answer = self._arrivals.pop(request_id, None), self._answers.pop(request_id, None)
        if arrival is None:
            return []
        if answer is not None:
            self._count_inflation(arrival, now_s)
        return self.count_lost([self.count_left(request_id, answer.tokens if answer is not None else 0, now_s)])

    # Steps

    def next_step(self, now_s: float) -> StepDecision | None:
        """Return what to run now, or None if neither side has anything that may run."""
        if self._busy_since_s is None:
            self._busy_since_s = now_s
        if not self.serving.scheduler.has_work() and self.admission.block_s >= REFIT_S:
            self._refit()  # with rollouts that always have something to run there is no better moment
        self.last_grant = grant = self.step_grant(
            now_s, self.serving_view, lambda view: self._admit(view, now_s), blocked=self.blocked
        )
        is_open, has_work = grant.is_open(now_s), self.rollout.scheduler.has_work()
        is_planned = is_open and has_work
        step = self._plan_rollout(grant, now_s) if is_planned else None
        if step is not None:
            return step
        would_admit = is_open and not is_planned  # rollouts that have left
        if self.stopped or self.blocked or self.dry_run is not None or self.why_resting(now_s):
            self.stalls.forget()
        elif has_work or would_admit:
            self.stalls.on_request(now_s, is_admitted=would_admit)
        else:
            self.stalls.on_idle(now_s)
        plan = self.serving.plan(self._serving_step_budget())
        if plan is None:
            self._busy_since_s = None
            self._refit()
            return None
        asked_s = now_s if is_planned else None
        return StepDecision("serving", plan, self.admission.serving.upper(plan.features), asked_s=asked_s)

    def may_begin(self, step: StepDecision, now_s: float) -> bool:
        """Return whether a planned step may still run; if not, the loop drops it and asks for the next step again."""
        if step.grant is None:
            return True
        is_open = step.grant.is_open(now_s)
        self.admission.on_step_planned(in_time=is_open)
        if is_open:
            return True
        self.dropped_steps += 1
        self.last_grant = Grant(0, 0, now_s, "the grant was over before its step was planned")
        self.stalls.on_request(now_s, is_admitted=False)
        if step.asked_s is not None and now_s > step.asked_s:
            self.charge_pause(step.asked_s, now_s)
        return False

    def finish(self, step: StepDecision, events: Sequence[TokenEvent], begin_s: float, end_s: float) -> list[Breach]:
        """Account for a step that ran. Return the breaches that it revealed."""
        seconds = end_s - begin_s
        since_s = begin_s if self._busy_since_s is None else self._busy_since_s
        self.samples[step.side].add(step.plan.features, end_s - since_s)
        self._busy_since_s = end_s
        if step.side == "rollout":
            asked_s = begin_s if step.asked_s is None else step.asked_s
            self.stalls.on_request(begin_s, is_admitted=True)
            self.admission.rollout.observe(step.plan.features, seconds)
            self.quota.spend(end_s - asked_s, end_s)
            breach = self.count_step(step.plan.features, asked_s, end_s, step.upper_s + (begin_s - asked_s))
            return [breach] if breach is not None else []
        if step.asked_s is not None and begin_s > step.asked_s:
            self.charge_pause(step.asked_s, begin_s)
        self.admission.demand.on_step(step.plan.features, seconds, end_s)
        self.admission.serving.observe(step.plan.features, seconds)
        self._last_step, self._last_step_s = step.plan.features, seconds
        return self.count_lost([self._on_token(event, end_s) for event in events])

    def may_pause(self, seconds: float, asked_s: float, now_s: float) -> bool:
        """Return whether serving can spare a pause for new rollout weights now, or has postponed it for too long."""
        if not self.serving.scheduler.has_work() or now_s - asked_s >= PAUSE_WAIT_S:
            return True
        slack_s = self.slack_s(now_s)
        return slack_s is not None and slack_s >= seconds

    def charge_pause(self, begin_s: float, end_s: float) -> None:
        """Charge as lent the time in which serving waited for pages, weights or commands of the rollout side."""
        self.quota.spend(end_s - begin_s, end_s)
        self.accountant.on_lent_step(begin_s, end_s, math.inf)

    def _refit(self) -> None:
        """Refit one latency model while serving has nothing to run: it takes milliseconds."""
        for model in (self.admission.serving, self.admission.rollout):
            if model.is_refit_due:
                model.refit()
                return

    def _plan_rollout(self, grant: Grant, now_s: float) -> StepDecision | None:
        tokens, sequences = grant.tokens, grant.sequences
        first: StepPlan | None = None
        for shrink in PLAN_SHRINKS:
            plan = self.rollout.plan(Budget(tokens, sequences))
            if plan is None or not plan.items:
                return None
            # While serving has work, a smaller step must be nearly as efficient as the one that did not fit.
            has_serving_work = self.serving.scheduler.has_work()
            if first is not None and has_serving_work and not self.admission.is_worth_it(_kinds(plan), _kinds(first)):
                return None
            upper_s = self.admission.rollout.upper(plan.features)
            if upper_s <= grant.step_s_max:
                return StepDecision("rollout", plan, upper_s, grant, now_s)
            # Not the step that admission had in mind: more prompts, or deeper ones. The most that could fit is less.
            first = first or plan
            tokens = max(1, int(plan.features.new_tokens * min(shrink, grant.step_s_max / upper_s)))
            sequences = max(1, int(plan.features.sequences * shrink))
        return None

    def _admit(self, view: ServingView, now_s: float) -> Grant:
        """Ask admission; if all rollouts have left while it was blocked, for what they wanted last."""
        rollouts = self.rollout_view()
        if rollouts.decoding or rollouts.prompt_tokens:
            self._wanted = rollouts
        elif self.stalls.blocked_s(now_s) is not None:
            rollouts = self._wanted
        grant = self.admission.decide(view, rollouts, now_s)
        if self.on_decision is not None:
            self.on_decision(now_s, view, rollouts, grant)
        return grant

    def _on_token(self, event: TokenEvent, now_s: float) -> Breach | None:
        name, breach = event.request_id, None
        answer = self._answers.get(name)
        if answer is None:
            answer = self._answers[name] = _Answer(now_s)
            breach = self.accountant.on_first_token(name, now_s)
        else:
            self.accountant.on_token(name, now_s)
        answer.tokens += len(event.token_ids)
        answer.last_token_s = now_s
        if event.finish_reason is None:
            return breach
        del self._answers[name]
        self._count_inflation(self._arrivals.pop(name), now_s)
        return self.count_finished(name, answer.tokens, now_s) or breach

    def _serving_step_budget(self) -> Budget:
        """Return the budget of serving's next step: requests that lending delays take no slot from others."""
        scheduler, budget = self.serving.scheduler, self._serving_budget
        if not scheduler.limits.spare_sequences or not scheduler.waiting_count:
            return budget
        lent_s, arrivals = self.accountant.total_lent_s, self._arrivals
        scheduler.uses_spare = any(arrivals[live.request.request_id][1] < lent_s for live in scheduler.running)
        return Budget(budget.tokens + max(0, len(scheduler.running) - scheduler.limits.max_sequences), budget.sequences)

    def _count_inflation(self, arrival: tuple[float, float], now_s: float) -> None:
        arrival_s, lent_before_s = arrival
        self.inflation.on_finished(now_s - arrival_s, self.accountant.total_lent_s - lent_before_s)

    def slack_s(self, now_s: float) -> float | None:
        """Return the longest step that admission would allow now; None before step times are known."""
        return self.admission.slack_s(self.serving_view(), now_s)

    def burst_blocks(self) -> int:
        """Return the blocks of KV memory that serving's next burst may need."""
        return -(-self.admission.history.bursts.learnt_kv_tokens // self.serving.scheduler.limits.block_tokens)

    # Views

    def serving_view(self) -> ServingView:
        """Return what serving has running and waiting now."""
        self._views += 1
        waiting, running = [], []
        scheduler = self.serving.scheduler
        for live in scheduler.running:
            answer = self._answers.get(live.request.request_id)
            if answer is None or len(live.token_ids) - live.computed > 1:
                waiting.append(_waiting(live))
            else:
                arrival_s, context = live.request.arrival_s, len(live.token_ids)
                running.append(
                    RunningRequest(answer.last_token_s, context, arrival_s, answer.first_token_s, answer.tokens)
                )
        waiting += [_waiting(live) for live in scheduler.waiting(WAITING_SHOWN)]
        pool, block_bytes = scheduler.pool, scheduler.limits.block_bytes
        return ServingView(
            self._views,
            tuple(waiting),
            tuple(running),
            pool.used * block_bytes,
            pool.limit * block_bytes,
            self._last_step,
            self._last_step_s,
        )

    def rollout_view(self) -> RolloutView:
        """Return what rollouts could run now."""
        scheduler, enough = self.rollout.scheduler, self.admission.limits.rollout_step_tokens
        decoding = context = prompt = 0
        oldest_s = math.inf
        for live in scheduler.running:
            oldest_s = min(oldest_s, live.request.arrival_s)
            left = len(live.token_ids) - live.computed
            if left == 1:
                decoding += 1
                context += live.computed
            else:
                prompt += left
        if prompt < enough and len(scheduler.running) < scheduler.limits.max_sequences:
            waiting = list(scheduler.waiting(WAITING_SHOWN))
            prompt += sum(len(live.token_ids) for live in waiting)
            oldest_s = min([oldest_s, *(live.request.arrival_s for live in waiting)])
        return RolloutView(decoding, prompt, context // decoding if decoding else 0, oldest_s)


def _waiting(live: LiveRequest) -> WaitingRequest:
    return WaitingRequest(live.request.arrival_s, len(live.token_ids) - live.computed)


def _kinds(plan: StepPlan) -> StepKinds:
    decodes: list[PlannedRequest] = []
    prompts: list[PlannedRequest] = []
    for item in plan.items:
        (decodes if item.new_tokens == 1 and item.samples else prompts).append(item)
    return StepKinds(plan.features, StepPlan(0, tuple(decodes)).features, StepPlan(0, tuple(prompts)).features)
