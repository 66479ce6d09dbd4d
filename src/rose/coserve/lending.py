"""Whose step is next on a device that is lent: serving first, rollouts in what serving can spare.

The lender stands between a loop and two engines. Before every step the loop asks `next_step`; the lender shows it
what serving looks like now, and if that grants rollouts a step, plans one, or a smaller one while its upper estimate is
over what was allowed, and names it; else it names serving's next step. After the step the loop tells `finish` when it
began and ended, and the lender learns from it: step times for both latency models, the account of what each serving
request lost, breaches. It holds no clock and no socket, so the live executor and the simulator run the same object.

A rollout step that serving asked to start in the meantime cannot be stopped; that is why grants are short and why the
view is made anew before every step. Planning one takes time too: it is lent time, and when it is done the loop asks
whether the step may still begin (`may_begin`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rose.core.admission import Admission, StepKinds
from rose.core.breaches import Breach, Ledger
from rose.core.decisions import Grant
from rose.core.dry_run import DryRun
from rose.core.facts import RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.gates import GateWatch
from rose.core.memory import LendingStretch
from rose.core.ration import Ration
from rose.core.slo import decode_slack_s, look_ahead, prefill_slack_s
from rose.engines.base import Budget, PlannedRequest, Request, StepEngine, StepPlan, TokenEvent
from rose.engines.scheduler import BatchScheduler, LiveRequest

SideName = Literal["serving", "rollout"]
Decided = Callable[[float, ServingView, RolloutView, Grant], None]
PLAN_SHRINKS = (0.9, 0.5, 0.0, 0.0)  # a little too long; far too long; at last one token of one sequence
REFIT_S = 0.01  # at most: 4 ms as a rule, of as many steps as a model keeps
WAITING_SHOWN = 64  # admission closes long before this many wait; the rest would only cost time to list


class ScheduledEngine(StepEngine, Protocol):
    """A step engine on our scheduler: embedded or simulated."""

    @property
    def scheduler(self) -> BatchScheduler: ...


@dataclass(frozen=True, slots=True)
class NextStep:
    """One step that may run now. `upper_s` is how long it takes at most, by estimate.

    From `asked_s` to its start rollouts were planned for, to this step or in vain.
    """

    side: SideName
    plan: StepPlan
    upper_s: float
    grant: Grant | None = None
    asked_s: float | None = None


@dataclass(slots=True)
class _Answer:
    tokens: int = 0
    last_token_s: float = 0.0


class Lender:
    """One per device. Requests of both sides go through it, so that it knows of their arrivals and ends."""

    def __init__(
        self, serving: ScheduledEngine, rollout: ScheduledEngine, admission: Admission, *, serving_budget: Budget
    ) -> None:
        self.serving = serving
        self.rollout = rollout
        self.admission = admission
        self.ledger = Ledger(admission.budgets, admission.own_gaps, admission.own_answers)
        self.lent_steps = self.lent_tokens = 0
        self.dropped_steps = 0  # planned too late for their grant
        self.breaches: Counter[str] = Counter()  # by kind
        self.stopped = ""  # why nothing is lent, by the owner or because there is nobody to lend to
        self.held_up = ""  # why rollouts could use nothing just now
        self.dry_run: DryRun | None = None  # instead of lending
        self.ration = Ration()
        self.gate = GateWatch()
        self.on_decision: Decided | None = None  # told of every view and what was granted, if somebody keeps a journal
        self.last_grant = Grant(0, 0, 0.0, "nothing was asked yet")
        self._serving_budget = serving_budget
        self._answers: dict[str, _Answer] = {}  # of the serving requests that have their first token
        self.stretch = LendingStretch()
        self._came: dict[str, tuple[float, float]] = {}  # serving request: arrival, and all that was lent until then
        self._wanted = RolloutView(1)  # by rollouts, when they last wanted something
        self._views = 0
        self._last_step, self._last_step_s = StepFeatures(), 0.0

    # Requests

    def add_serving(self, request: Request) -> None:
        """Raises what the engine raises; a request it refuses leaves no trace."""
        self.serving.add(request)
        self.serving_added(request)

    def serving_added(self, request: Request) -> None:
        self.admission.prompts.observe(len(request.prompt_ids))
        self.ledger.arrived(request.request_id, request.arrival_s)
        self._came[request.request_id] = (request.arrival_s, self.ledger.total_lent_s)

    def serving_gone(self, request_id: str, now_s: float) -> list[Breach]:
        """Taken out from outside: cancelled, as by a stop string, or evicted. Judged as if its next token came now."""
        came, answer = self._came.pop(request_id, None), self._answers.pop(request_id, None)
        if came is None:
            return []
        if answer is not None:
            self._stretched(came, now_s)
        tokens = answer.tokens if answer is not None else 0
        self._judge(self.ledger.kept_by_leaving(request_id, tokens, now_s), now_s)
        breach = self.ledger.left(request_id, tokens, now_s)
        return self._lost([breach] if breach is not None else [])

    def stop(self, reason: str) -> None:
        """Lend nothing until `resume`. Serving goes on."""
        self.stopped = reason

    def resume(self) -> None:
        self.stopped = ""

    # Steps

    def next_step(self, now_s: float) -> NextStep | None:
        """What to run now, or None if neither side has anything it may run."""
        if not self.serving.scheduler.has_work() and self.admission.block_s >= REFIT_S:
            self._refit()  # with rollouts that always have something to run there is no better moment
        grant = self._granted(now_s)
        step = self._planned(grant, now_s) if grant is not None else None
        if step is not None:
            return step
        plan = self.serving.plan(self._serving_budget)
        if plan is None:
            self._refit()
            return None
        asked_s = now_s if grant is not None else None
        return NextStep("serving", plan, self.admission.serving.upper(plan.features), asked_s=asked_s)

    def may_begin(self, step: NextStep, now_s: float) -> bool:
        """Whether a step that was planned may still run; if not, drop its plan and ask for the next step again."""
        if step.grant is None:
            return True
        is_open = step.grant.is_open(now_s)
        self.admission.began(in_time=is_open)
        if is_open:
            return True
        self.dropped_steps += 1
        self.last_grant = Grant(0, 0, now_s, "the grant was over before its step was planned")
        self.gate.asked(now_s, is_let=False)
        self._planned_in_vain(step.asked_s, now_s)
        return False

    def finish(self, step: NextStep, events: Sequence[TokenEvent], begin_s: float, end_s: float) -> list[Breach]:
        """Account for a step that was run; returns the breaches it brought to light."""
        seconds = end_s - begin_s
        if step.side == "rollout":
            asked_s = begin_s if step.asked_s is None else step.asked_s
            self.gate.asked(begin_s, is_let=True)
            self.admission.rollout.observe(step.plan.features, seconds)
            self.lent_steps += 1
            self.lent_tokens += step.plan.features.new_tokens
            self.ration.spend(end_s - asked_s, end_s)
            breach = self.ledger.lent(asked_s, end_s, step.upper_s + (begin_s - asked_s))
            if self.admission.breaker is not None:
                self.admission.breaker.lent(end_s, is_late=breach is not None)
            return self._counted([breach] if breach is not None else [])
        self._planned_in_vain(step.asked_s, begin_s)
        self.admission.demand.served(step.plan.features, seconds, end_s)
        self.admission.serving.observe(step.plan.features, seconds)
        self._last_step, self._last_step_s = step.plan.features, seconds
        found = [self._token_made(event, end_s) for event in events]
        return self._lost([breach for breach in found if breach is not None])

    def _judge(self, is_attained: bool | None, now_s: float) -> None:
        if self.admission.breaker is not None and is_attained is not None:
            self.admission.breaker.finished(now_s, is_attained=is_attained)

    def _lost(self, deadlines: list[Breach]) -> list[Breach]:
        if self.admission.breaker is not None:
            for breach in deadlines:
                self.admission.breaker.deadline_lost(breach.at_s)
        return self._counted(deadlines)

    def _counted(self, breaches: list[Breach]) -> list[Breach]:
        self.breaches.update(breach.objective for breach in breaches)
        return breaches

    def _planned_in_vain(self, asked_s: float | None, now_s: float) -> None:
        if asked_s is not None and now_s > asked_s:
            self.ration.spend(now_s - asked_s, now_s)
            self.ledger.lent(asked_s, now_s, math.inf)

    def _refit(self) -> None:
        """Serving has nothing to run: the moment for what takes milliseconds. One model at a time."""
        due = [model for model in (self.admission.serving, self.admission.rollout) if model.is_refit_due]
        if due:
            due[0].refit()

    def _granted(self, now_s: float) -> Grant | None:
        """Leave for a step, if there is one to plan."""
        self.last_grant = grant = self._decide(now_s)
        is_open, has_work = grant.is_open(now_s), self.rollout.scheduler.has_work()
        if is_open and has_work:
            return grant
        self._watch(has_work, is_open, now_s)
        return None

    def _planned(self, grant: Grant, now_s: float) -> NextStep | None:
        tokens, sequences = grant.tokens, grant.sequences
        first: StepPlan | None = None
        for shrink in PLAN_SHRINKS:
            plan = self.rollout.plan(Budget(tokens, sequences))
            if plan is None or not plan.items:
                break
            if first is not None and not self._is_worth_it(plan, first):
                break
            upper_s = self.admission.rollout.upper(plan.features)
            if upper_s <= grant.step_s_max:
                return NextStep("rollout", plan, upper_s, grant, now_s)
            # Not the step that admission had in mind: more prompts, or deeper ones. The most that could fit is less.
            first = first or plan
            tokens = max(1, int(plan.features.new_tokens * min(shrink, grant.step_s_max / upper_s)))
            sequences = max(1, int(plan.features.sequences * shrink))
        self._watch(True, False, now_s)
        return None

    def _is_worth_it(self, plan: StepPlan, first: StepPlan) -> bool:
        return not self.serving.scheduler.has_work() or self.admission.is_worth_it(_kinds(plan), _kinds(first))

    def _watch(self, has_work: bool, is_let: bool, now_s: float) -> None:
        """Whether rollouts stand still behind the gate, or would those that have left."""
        if self.stopped or self.held_up or self.dry_run is not None or self.is_resting(now_s):
            self.gate.forget()
        elif has_work or is_let:
            self.gate.asked(now_s, is_let=is_let)
        else:
            self.gate.left(now_s)

    def _decide(self, now_s: float) -> Grant:
        if self.dry_run is not None:  # also of a device on which nothing is lent
            return self.dry_run.decide(self.serving_view(), self.ration, now_s)
        if self.stopped or self.held_up:
            return Grant(0, 0, now_s, self.stopped or self.held_up)
        if self.ration.is_spent(now_s):
            return Grant(0, 0, now_s, f"rollouts have had their {self.ration.share:.0%} of the time, the owner's limit")
        view, rollouts = self.serving_view(), self._wanting(now_s)
        grant = self.admission.decide(view, rollouts, now_s)
        if self.on_decision is not None:
            self.on_decision(now_s, view, rollouts, grant)
        return grant

    def _wanting(self, now_s: float) -> RolloutView:
        """What rollouts could run; of those that have left a shut gate, what they could."""
        rollouts = self.rollout_view()
        if rollouts.decoding or rollouts.prompt_tokens:
            self._wanted = rollouts
        elif self.gate.shut_s(now_s) is not None:
            return self._wanted
        return rollouts

    def _token_made(self, event: TokenEvent, now_s: float) -> Breach | None:
        name, breach = event.request_id, None
        answer = self._answers.get(name)
        if answer is None:
            answer = self._answers[name] = _Answer()
            breach = self.ledger.first_token(name, now_s)
        answer.tokens += len(event.token_ids)
        answer.last_token_s = now_s
        if event.finish_reason is None:
            return breach
        del self._answers[name]
        self._stretched(self._came.pop(name), now_s)
        self._judge(self.ledger.kept(name, answer.tokens, now_s), now_s)
        return self.ledger.finished(name, answer.tokens, now_s) or breach

    def _stretched(self, came: tuple[float, float], now_s: float) -> None:
        arrival_s, lent_before_s = came
        self.stretch.finished(now_s - arrival_s, self.ledger.total_lent_s - lent_before_s)

    # How it stands

    def slack_s(self, now_s: float) -> float | None:
        """What serving can spare of its share of the budgets, a typical request that comes now included."""
        admission, budgets = self.admission, self.admission.budgets
        if not admission.serving.is_calibrated:
            return None
        view, typical_tokens = self.serving_view(), admission.prompts.typical_tokens
        outlook = look_ahead(view, admission.serving, admission.limits.serving_step_tokens, typical_tokens)
        ttft_s = budgets.slack_share * budgets.ttft_s
        spare_s = min(
            prefill_slack_s(view, outlook, ttft_s, now_s),
            decode_slack_s(view, outlook, admission.token_s, now_s),
            ttft_s - outlook.next_ttft_s(typical_tokens),
        )
        return max(0.0, spare_s)

    def is_resting(self, now_s: float) -> bool:
        """The circuit breaker has stopped lending for a while."""
        breaker = self.admission.breaker
        return breaker is not None and breaker.why_stopped(now_s) is not None

    # Views

    def serving_view(self) -> ServingView:
        self._views += 1
        waiting, running = [], []
        scheduler = self.serving.scheduler
        for live in scheduler.running:
            answer = self._answers.get(live.request.request_id)
            if answer is None or len(live.token_ids) - live.computed > 1:
                waiting.append(_waiting(live))
            else:
                running.append(RunningRequest(answer.last_token_s, len(live.token_ids), live.request.arrival_s))
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
    decodes = tuple(item for item in plan.items if _is_decode(item))
    prompts = tuple(item for item in plan.items if not _is_decode(item))
    return StepKinds(plan.features, StepPlan(0, decodes).features, StepPlan(0, prompts).features)


def _is_decode(item: PlannedRequest) -> bool:
    return item.new_tokens == 1 and item.samples
