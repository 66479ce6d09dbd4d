"""Decide whether the next step of a rollout engine may run, and how large it may be, without knowing vLLM.

Two decisions must agree before every step: the agent's grant in the control segment, which expires, so a dead agent
stops lending; and beside a serving engine `core.observed_engine`, on what that engine publishes. A dead engine, a stale
or silent status segment and unknown step times block every step. Meanwhile nothing polls: waiting threads wake on a
futex when the agent or the serving engine has written. If all rollouts leave while admission is blocked, it is still
decided for them: reporting it as open would only attract them back.

A new boot of the serving engine is another status segment, whose step times are learnt again; what is known of its
traffic and of rollout steps stays. History from before its terms is ignored once a rollout step has run: rollout steps
may have slowed those steps. Without terms nothing is learnt, because what runs beside is unknown.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rose.core.admission import Admission, LendingLimits
from rose.core.breaker import Breaker
from rose.core.facts import Grant, RolloutView, ServingView, StepFeatures
from rose.core.history import HistorySnapshot, ServingHistory
from rose.core.latency import LatencyModel
from rose.core.lending_controller import ComputeQuota
from rose.core.lending_state import DesiredLending
from rose.core.observed_engine import FinishedStep, ObservedLending, StepLearner
from rose.errors import RoseError
from rose.vllm.control_segment import EngineControl, LendingAccount, Segment, Terms
from rose.vllm.seqlock_file import Torn
from rose.vllm.status_segment import SegmentReader, StatusChange

SAFE_MODES = ("idle", "decode")  # the others, for comparison, keep no objective that a breaker could protect
REASONS_MAX = 32  # that are counted apart
WANT_S = 2.0  # that a wish for pages holds, unless it is renewed


@dataclass(frozen=True, slots=True)
class ServingPages:
    """Serving's pages of a shared pool: held, used by requests, asked for, and what the next burst may need."""

    held: int
    used: int
    asked: int
    burst: int


class RunQueueDelay:
    """How long the kernel kept a ready thread from running because other threads had its core.

    On a shared core a step lasts as long as it computes plus what other processes compute in between. Only its own time
    is its cost and can delay serving. On several cores other threads of the same step may hold their cores while one
    waits, so all of the time counts there. The thread is the one that asks first.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._has_one_core = len(os.sched_getaffinity(0)) == 1

    def seconds(self) -> float:
        """Return the total delay; always 0 on several cores, and without the kernel's statistics."""
        if not self._has_one_core:
            return 0.0
        with suppress(OSError, IndexError, ValueError):
            if self._file is None:
                self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
            return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        return 0.0


class VllmArbiter:
    """The step arbiter of a rollout engine's own thread; other threads may only call `wait_*`."""

    def __init__(
        self,
        control: Segment[EngineControl],
        *,
        step_tokens: int,
        sequences: int,
        now_s: Callable[[], float] = time.monotonic,
        delayed_s: Callable[[], float] | None = None,
    ) -> None:
        self.control = EngineControl()
        self.control_number = 0
        self.last_grant = Grant(0, 0, 0.0, "no agent has asked for anything yet")
        self._segment, self._now_s = control, now_s
        self._step_tokens, self._sequences = step_tokens, sequences
        self._rollout = StepLearner(LatencyModel())
        self._serving: _ServingSide | None = None
        self._no_serving = ""  # why there is none
        self._history: HistorySnapshot | None = None  # what was learnt beside the serving engine before
        self._quota = ComputeQuota()
        self._began: tuple[float, StepFeatures, float, float] | None = None
        self._has_run = False
        self._delayed_s = delayed_s or RunQueueDelay().seconds
        self._delayed_before_s = 0.0  # at the newest decision
        self._left = RolloutView()  # what rollouts wanted that may have left while admission was blocked
        self._blocked: tuple[str, float] | None = None
        self._blocked_s: dict[str, float] = {}

    # Decisions

    def ask(self, rollouts: RolloutView) -> Grant:
        """Return the grant of the next step; a closed one has the reason."""
        now_s, self._delayed_before_s = self._now_s(), self._delayed_s()
        self.adopt_control()
        if self._serving is not None:
            self._serving.note_events()
        has_rollouts = _wants(rollouts)
        self.last_grant = grant = self._decide(rollouts if has_rollouts else self._left, now_s)
        if self._blocked is not None:  # count how long rollouts waited, by the reason
            why, since_s = self._blocked
            known = why if why in self._blocked_s or len(self._blocked_s) < REASONS_MAX else "other"
            self._blocked_s[known] = self._blocked_s.get(known, 0.0) + now_s - since_s
        is_blocked = has_rollouts and not grant.is_open(now_s)
        if has_rollouts:
            self._left = rollouts if is_blocked else RolloutView()
        self._blocked = (grant.reason.partition(":")[0], now_s) if is_blocked else None
        return grant

    def _decide(self, rollouts: RolloutView, now_s: float) -> Grant:
        control = self.control
        own = Grant(control.tokens, control.sequences, control.until_s, "granted by the agent")
        blocked = control.stopped
        if not blocked and not own.is_open(now_s):
            blocked = "the agent's grant is over" if control.until_s else "the agent granted nothing"
        if self._serving is not None:
            grant = self._serving.decide(rollouts, blocked, now_s)
            if not grant.tokens:
                return grant
            tokens, sequences = min(own.tokens, grant.tokens), min(own.sequences, grant.sequences)
            return Grant(tokens, sequences, min(own.until_s, grant.until_s), grant.reason, grant.step_s_max)
        if not blocked and control.terms is not None:
            blocked = self._no_serving
        return Grant(0, 0, now_s, blocked) if blocked else own

    def observe(self) -> None:
        """Learn from serving's steps and adopt the agent's control while there is nothing to run."""
        self.adopt_control()
        if self._serving is not None:
            self._serving.read()
        self.refit_if_due()

    def refit_if_due(self) -> None:
        """Refit the latency models while nothing runs: it takes milliseconds."""
        if self._serving is not None:
            self._serving.lending.serving.refit_if_due()
        self._rollout.refit_if_due()

    # Waiting

    @property
    def has_new_control(self) -> bool:
        """Return whether the agent has written a control that is not adopted yet."""
        return self._segment.number != self.control_number

    def is_eager(self, *, has_work: bool) -> bool:
        """Return whether every opportunity counts: rollouts wait for one, or a dry run counts them."""
        return has_work or self.control.dry_run

    def wait_for_control(self, timeout_s: float) -> bool:
        """Wait for a new control, at most this long. Return whether there is one."""
        self._segment.wait(self.control_number, timeout_s)
        return self.has_new_control

    def wait_for_serving(self, timeout_s: float, *, is_eager: bool) -> bool:
        """Wait for serving's first event since the last decision, or from now on if not eager; return if it came."""
        serving = self._serving
        if serving is None:
            time.sleep(timeout_s)
            return False
        return serving.wait(timeout_s, is_eager=is_eager)

    def wait_for_short(self, timeout_s: float) -> bool:
        """Wait until serving asks for pages of the pool, at most this long; return whether it does."""
        serving = self._serving
        if serving is None:
            time.sleep(timeout_s)
            return False
        return serving.wait_short(timeout_s)

    # Pages of a shared pool

    def serving_pages(self) -> ServingPages | None:
        """Return serving's part of the pool; None if what it publishes of that cannot be relied on."""
        return self._serving.pages() if self._serving is not None else None

    def want_pages(self, pages: int) -> None:
        """Let serving know how many pages rollouts would use if it gave them back."""
        if self._serving is not None:
            now_s = self._now_s()
            self._serving.segment.want(pages, now_s + WANT_S, now_s)

    # Control

    def adopt_control(self) -> None:
        """Adopt the agent's newest control."""
        if not self.has_new_control:
            return
        try:
            number, control = self._segment.read()
        except Torn:
            return
        assert control is not None
        before, self.control, self.control_number = self.control, control, number
        if control.terms != before.terms:
            self._adopt_terms(control.terms, before.resumes)
        if self._serving is not None:
            # Without the agent's stop: to this engine that is only a text to show.
            desired = DesiredLending(
                is_dry_run=control.dry_run, compute_share=control.compute_share, resumes=control.resumes
            )
            self._serving.lending.adopt(desired, self._now_s())

    def _adopt_terms(self, terms: Terms | None, resumes: int) -> None:
        before, self._serving = self._serving, None
        learner = None
        if before is not None:
            self._history = before.lending.admission.history.snapshot(self._now_s())
            if terms is not None and str(before.segment.path) == terms.segment:
                learner = before.lending.serving
            self._quota = before.lending.quota
            before.segment.close()
        if terms is None:
            return
        try:
            self._serving = self._serving_side(terms, learner)
            self._serving.lending.quota = self._quota
            self._serving.lending.desired = DesiredLending(resumes=resumes)
        except RoseError as error:
            self._no_serving = error.what

    def _serving_side(self, terms: Terms, learner: StepLearner | None) -> _ServingSide:
        segment = SegmentReader(Path(terms.segment))
        if self._has_run or learner is not None:
            segment.skip()
        header = segment.header
        limits = LendingLimits(
            serving_step_tokens=header.step_tokens,
            rollout_step_tokens=self._step_tokens,
            rollout_sequences=self._sequences,
            serving_sequences=header.sequences,
            kv_bytes_per_token=header.block_bytes / header.block_tokens,
        )
        breaker = Breaker() if terms.mode in SAFE_MODES else None
        learner = learner or StepLearner(LatencyModel())
        history = ServingHistory(terms.budgets.ttft_s, limits.serving_sequences)
        if self._history is not None:
            history.restore(self._history, self._now_s())
        admission = Admission(terms.mode, terms.budgets, learner.model, self._rollout.model, limits, breaker, history)
        return _ServingSide(segment, ObservedLending(admission, learner, self._rollout), self._now_s)

    # Steps

    def on_step_began(self, features: StepFeatures, began_s: float) -> None:
        """Note a step that begins, with its predicted time."""
        self._has_run = True
        upper_s = self._rollout.model.upper(features)  # infinite while it is not calibrated
        self._began = (began_s, features, upper_s, self._delayed_before_s)

    def on_step_ended(self) -> None:
        """Account for the step that began last and ends now."""
        if self._began is None:
            return
        (began_s, features, upper_s, before_s), self._began = self._began, None
        if self._serving is None:
            return
        step = FinishedStep(began_s, self._now_s(), features)
        delayed_s = min(step.seconds, self._delayed_s() - before_s)
        self._serving.lending.quota.spend(step.seconds - delayed_s, step.ended_s)
        self._serving.on_lent_step(step, upper_s, delayed_s)

    def account(self) -> LendingAccount:
        """Return the account of lending beside the serving engine so far."""
        return self._serving.account(dict(self._blocked_s)) if self._serving is not None else LendingAccount()


class _ServingSide:
    """A serving engine on the same device, and the account of lending from it."""

    def __init__(self, segment: SegmentReader, lending: ObservedLending, now_s: Callable[[], float]) -> None:
        self.segment, self.lending = segment, lending
        self._now_s = now_s
        self._seen: StatusChange | None = None
        self._events = (0, 0)  # the numbers of both events at the newest decision
        self._short = 0  # and that of the event of asking for pages

    def decide(self, rollouts: RolloutView, blocked: str, now_s: float) -> Grant:
        """Return what serving's slack allows, with the reason."""

        def view() -> ServingView | str:
            if not self.read():
                return "the status segment is being written too fast to be read"
            unreliable = self.segment.why_unreliable(self._seen, now_s)
            return unreliable if unreliable or self._seen is None else self._seen.view

        return self.lending.step_grant(
            now_s, view, lambda seen: self.lending.decide(seen, rollouts, now_s), blocked=blocked
        )

    def read(self) -> bool:
        """Read the status segment. Return False if it could not be read."""
        try:
            self._seen = seen = self.segment.read()
        except Torn:
            return False
        if seen is not None:
            self.lending.on_steps(seen.steps)
            self.lending.on_milestones(seen.milestones, seen.lost)
        return True

    def note_events(self) -> None:
        """Remember the event counters: later events may change the decision that follows."""
        self._events = (self.segment.idle.number, self.segment.news.number)

    def wait(self, timeout_s: float, *, is_eager: bool) -> bool:
        """Wait for an event, in another thread, which may find the segment closed."""
        is_any = is_eager and self.lending.admission.mode != "idle"
        event = self.segment.news if is_any else self.segment.idle
        with suppress(ValueError):
            number = self._events[is_any] if is_eager else event.number
            event.wait(number, timeout_s)
            return event.number != number
        return False

    def wait_short(self, timeout_s: float) -> bool:
        """Wait until serving asks for more pages than at the newest decision, in another thread."""
        event = self.segment.short
        with suppress(ValueError):
            event.wait(self._short, timeout_s)
            return event.number != self._short
        return False

    def pages(self) -> ServingPages | None:
        """Return serving's pages; None from an engine that is gone or publishes nothing any more."""
        segment, header = self.segment, self.segment.header
        if not segment.is_alive or segment.stop_reason or not header.group_blocks:
            return None
        self._short = segment.short.number
        burst_tokens = self.lending.admission.history.bursts.learnt_kv_tokens
        groups = -(-burst_tokens // (header.block_tokens * header.group_blocks))
        return ServingPages(*segment.pages, burst=groups * header.group_pages)

    def on_lent_step(self, step: FinishedStep, upper_s: float, delayed_s: float) -> None:
        """Account for a rollout step, and for what serving did meanwhile."""
        busy_since_s, seen = self.segment.busy_since_s, None
        with suppress(Torn):  # the next read has what this one missed
            self._seen = seen = self.segment.read()
        if seen is not None:
            self.lending.on_steps(seen.steps, lending_since_s=step.began_s)
        self.lending.on_lent_step(step, upper_s, busy_since_s, delayed_s)
        if seen is not None:
            self.lending.on_milestones(seen.milestones, seen.lost)

    def account(self, closed_s: dict[str, float]) -> LendingAccount:
        """Return the account so far."""
        now_s, lending, dry_run = self._now_s(), self.lending, self.lending.dry_run
        breaker = lending.admission.breaker
        return LendingAccount(
            steps=lending.lent_steps,
            tokens=lending.lent_tokens,
            seconds=lending.accountant.total_lent_s,
            breaches={str(kind): count for kind, count in lending.accountant.breaches.items()},
            serving=dataclasses.astuple(lending.admission.history.times),
            breaker_trips=breaker.trips if breaker is not None else 0,
            requests=lending.requests,
            attained=lending.attained,
            missing=lending.serving.missing,
            closed_s=closed_s,
            resting=lending.why_resting(now_s),
            dry_run_tokens=dry_run.tokens if dry_run is not None else 0,
            dry_run_lent_s=dry_run.lent_s if dry_run is not None else 0.0,
            dry_run_s=now_s - dry_run.since_s if dry_run is not None else 0.0,
        )


def _wants(rollouts: RolloutView) -> bool:
    return rollouts.decoding + rollouts.prompt_tokens > 0
