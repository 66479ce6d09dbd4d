"""May rollouts run a step now, and how large a one. One `Admission` per device, asked before every step.

`idle`    only while serving has no work. Who arrives waits for the rest of one step, which is kept short.
`decode`  also between decode steps: up to a share of every running request's budget for its next token, less what
          serving itself needs of it for 99 requests in 100, and to all of it should a typical prompt come and share
          serving's next step. Never while a prompt waits; never if a typical
          request that came now would then miss its share of the TTFT budget; not while more than half the seats are
          taken, or beside an answer that has taken long already; and for a second after serving had work for most of
          its time (`core/demand.py`), only as `idle`.
`paper`   while every known request and the next typical one keep any slack at all; whole steps or none.
`alternate`, `fcfs`  no admission, to compare with: a step each in turn; the side whose oldest request came first.

Time is turned into a step by the rollout model's upper estimate: all sequences that decode and as many prompt tokens as
fit, or, if not even those fit, fewer sequences. While serving has work, a smaller step must be nearly as efficient as
a full one: where fixed costs dominate, many small steps would take serving's time and give little. Whoever plans a step
and finds that it must be smaller still asks that again (`is_worth_it`).

A grant says until when its step may *start*, so that however late it starts and however many follow, the last one ends,
by its upper estimate, before the time that was allowed is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rose.core.breaker import Breaker
from rose.core.decisions import Grant
from rose.core.demand import Demand
from rose.core.facts import RolloutView, ServingView, StepFeatures
from rose.core.latency import LatencyModel
from rose.core.slo import (
    Budgets,
    Outlook,
    OwnAnswers,
    OwnGaps,
    PromptLengths,
    answer_slack_s,
    arrival_slack_s,
    decode_slack_s,
    look_ahead,
    prefill_slack_s,
)
from rose.errors import ConfigError

Mode = Literal["idle", "decode", "paper", "alternate", "fcfs"]
MODES: tuple[Mode, ...] = ("idle", "decode", "paper", "alternate", "fcfs")

SHRINK_TRIES = 4  # each a fifth smaller than the last
STUCK_S = 5.0  # of an idle device on which no step fits, before its upper estimates are doubted
START_GRACE_S = 0.0005  # from a decision to its step's start, in a loop that does both
GRACE_DECAY, GRACE_SHARE_MAX = 0.99, 0.25  # after a step that began in time; of the block limit


@dataclass(frozen=True, slots=True)
class LendingLimits:
    """Sizes and thresholds. The first four are the engines' own."""

    serving_step_tokens: int = 512
    rollout_step_tokens: int = 512
    rollout_sequences: int = 64
    serving_sequences: int = 64
    # Serving that uses 60 % of its TTFT budget alone has 25 left to the 85 that are wanted; a step that misses its
    # estimate may take double, so a tenth leaves room for one.
    block_share: float = 0.1
    efficiency_min: float = 0.8
    # Requests whose tokens come later live longer and pile up; half the seats stay free for those who come in a burst.
    running_share: float = 0.5
    # By simulation: from 80 to 110 % of capacity it costs what `idle` does, and at 20 and 50 it is seldom closed. With
    # 0.8, or over twice the time, lending costs up to 3 points more in such minutes.
    latch_share: float = 0.7
    latch_s: float = 1.0
    switch_s: float = 0.0003

    def __post_init__(self) -> None:
        steps, seats = (
            (self.serving_step_tokens, self.rollout_step_tokens),
            (self.serving_sequences, self.rollout_sequences),
        )
        if min(*steps, *seats) < 1:
            raise ConfigError("a step of no tokens or no sequences cannot run", hint="give sizes of 1 and more")
        for name in ("block_share", "efficiency_min", "running_share", "latch_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, but it is a share", hint="give more than 0, up to 1"
                )
        if min(self.latch_s, self.switch_s) < 0:
            raise ConfigError("latch_s and switch_s are durations and cannot be negative")


@dataclass(frozen=True, slots=True)
class StepKinds:
    """A rollout step, and what it would be of its decodes or its prompts alone."""

    whole: StepFeatures
    decodes: StepFeatures
    prompts: StepFeatures


@dataclass(frozen=True, slots=True)
class _Step:
    """A rollout step of so many decoding sequences and prompt tokens."""

    decodes: int
    prompt_tokens: int
    context_tokens: int

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens

    @property
    def features(self) -> StepFeatures:
        prompt, cached = self.prompt_tokens, self.decodes * (self.context_tokens + 1)
        prompts = 1 if prompt else 0
        depth = prompts * self.context_tokens  # a turn's new prompt comes after the turns before it
        by_context = cached + prompt * depth + prompt * (prompt + 1) // 2
        return StepFeatures(self.tokens, cached + depth + prompt, by_context, self.decodes + prompts)

    @property
    def kinds(self) -> StepKinds:
        context = self.context_tokens
        decodes, prompts = _Step(self.decodes, 0, context), _Step(0, self.prompt_tokens, context)
        return StepKinds(self.features, decodes.features, prompts.features)


class Admission:
    """Tell it of every prompt that comes (`prompts.observe`), of every step of serving's (`demand.served`) and of what
    serving took for a token and an answer itself (`own_gaps`, `own_answers`); ask `decide` before every step; obey."""

    def __init__(
        self,
        mode: Mode,
        budgets: Budgets,
        serving: LatencyModel,
        rollout: LatencyModel,
        limits: LendingLimits | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"there is no admission mode {mode!r}", hint=f"choose one of {', '.join(MODES)}")
        self.mode = mode
        self.budgets = budgets
        self.serving = serving
        self.rollout = rollout
        self.limits = limits or LendingLimits()
        self.breaker = breaker
        self.prompts, self.own_gaps, self.own_answers = PromptLengths(), OwnGaps(), OwnAnswers()
        self.demand = Demand(serving, self.limits.serving_sequences, budgets.ttft_s)
        self._latched_until_s = -math.inf
        self._is_rollouts_turn = False
        self._stuck_since_s: float | None = None  # serving has had no work since, and no step fitted
        self.is_stuck = False  # by the last decision: serving has no work, and no step fits
        self._grace_s = START_GRACE_S
        self._efficiency = 1.0  # of the step that was granted last, against a full one's

    def decide(self, view: ServingView, rollout: RolloutView, now_s: float) -> Grant:
        self.is_stuck = False
        if not (self.serving.is_calibrated and self.rollout.is_calibrated):
            return _closed(now_s, "step times are not profiled yet")
        stopped = self.breaker.why_stopped(now_s) if self.breaker is not None else None
        outlook = look_ahead(view, self.serving, self.limits.serving_step_tokens, self.prompts.typical_tokens)
        self._latch(outlook, now_s)
        if stopped is not None:
            return _closed(now_s, stopped)
        full = self._full_step(rollout)
        if full.tokens == 0:
            return _closed(now_s, "rollouts have nothing to run")
        if self.mode == "paper":
            return self._by_dual_slack(view, outlook, full, now_s)
        if self.mode in ("alternate", "fcfs"):
            return self._by_turns(view, rollout, full, now_s)
        if view.is_idle:
            return self._while_idle(full, now_s)
        if self.mode == "idle":
            return _closed(now_s, "serving has work")
        return self._by_decode_slack(view, outlook, full, now_s)

    @property
    def block_s(self) -> float:
        """The longest that a request may find the device taken by a rollout step, by its upper estimate."""
        return self.limits.block_share * self.budgets.ttft_s

    @property
    def token_s(self) -> float:
        """What lending may leave between two tokens of a request; below 0 if serving itself needs more."""
        return self.budgets.slack_share * self.budgets.tpot_s - self.own_gaps.typical

    @property
    def age_s(self) -> float:
        """How old a request may be that something is lent beside: serving needs the rest to end its answer in time.

        Infinite where serving itself takes longer than that for an answer.
        """
        answer_s, own_s = self.budgets.answer_s, self.own_answers.typical
        return min(self.budgets.slack_share * answer_s, answer_s - own_s) if own_s < answer_s else math.inf

    def is_latched(self, now_s: float) -> bool:
        return now_s < self._latched_until_s

    def began(self, *, in_time: bool) -> None:
        """A granted step was planned; if its grant was over by then, planning has twice the time from now on."""
        if in_time:
            self._grace_s = max(START_GRACE_S, GRACE_DECAY * self._grace_s)
        else:
            self._grace_s = max(START_GRACE_S, min(2 * self._grace_s, GRACE_SHARE_MAX * self.block_s))

    def is_worth_it(self, step: StepKinds, granted: StepKinds) -> bool:
        """Whether a step may run beside serving that had to be planned smaller than what the last grant came to."""
        if self.mode != "decode":
            return True
        return self._efficiency * self._efficiency_of(step, granted) >= self.limits.efficiency_min

    def expected_s(self, grant: Grant, rollout: RolloutView) -> float:
        """About how long the granted step takes; for dry runs and reports."""
        decodes = min(rollout.decoding, grant.sequences, grant.tokens)
        step = _Step(decodes, min(rollout.prompt_tokens, grant.tokens - decodes), rollout.context_tokens)
        return self.rollout.predict(step.features) + self.limits.switch_s

    # The rules

    def _latch(self, outlook: Outlook, now_s: float) -> None:
        """Overload is more work than time, not a long prompt or a busy device."""
        waiting_s = outlook.prefill_s(outlook.waiting_tokens)
        if self.demand.level_s(waiting_s, now_s) > self.limits.latch_share * self.demand.window_s:
            self._latched_until_s = now_s + self.limits.latch_s

    def _while_idle(self, full: _Step, now_s: float) -> Grant:
        grant = self._grant(full, self.block_s - self.limits.switch_s, now_s, "serving has no work", is_idle=True)
        self.is_stuck = not grant.tokens
        if grant.tokens:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = now_s
        elif now_s - self._stuck_since_s > STUCK_S:
            self.rollout.relax()
            self._stuck_since_s = now_s
        return grant

    def _by_decode_slack(self, view: ServingView, outlook: Outlook, full: _Step, now_s: float) -> Grant:
        if view.waiting:
            return _closed(now_s, "a prompt waits")
        if self.is_latched(now_s):
            return _closed(now_s, "overload: only while serving has no work")
        if len(view.running) > self.limits.running_share * self.limits.serving_sequences:
            return _closed(now_s, "many requests are decoding: they must not live longer")
        age_slack_s = answer_slack_s(view, self.age_s, self.budgets.answer_s, now_s)
        if age_slack_s <= 0:
            return _closed(now_s, "an answer has taken long already")
        typical_tokens = self.prompts.typical_tokens
        gap_s = min(
            age_slack_s,
            decode_slack_s(view, outlook, self.token_s, now_s),
            arrival_slack_s(view, outlook, self.budgets.tpot_s, typical_tokens, now_s),
        )
        guard_s = self.budgets.slack_share * self.budgets.ttft_s - outlook.next_ttft_s(typical_tokens)
        allowed_s = min(gap_s, guard_s, self.block_s) - self.limits.switch_s
        reason = "slack between decode steps" if gap_s <= guard_s else "slack before the next request"
        return self._grant(full, allowed_s, now_s, reason, is_idle=False)

    def _by_dual_slack(self, view: ServingView, outlook: Outlook, full: _Step, now_s: float) -> Grant:
        budgets = self.budgets
        allowed_s = min(
            prefill_slack_s(view, outlook, budgets.ttft_s, now_s),
            decode_slack_s(view, outlook, budgets.tpot_s, now_s),
            budgets.ttft_s - outlook.next_ttft_s(self.prompts.typical_tokens),
        )
        step_s = self.rollout.predict(full.features)
        if step_s >= allowed_s:
            return _closed(now_s, "no slack for a whole step")
        return Grant(full.tokens, self._sequences(full), now_s + allowed_s - step_s, "both slacks", allowed_s)

    def _by_turns(self, view: ServingView, rollout: RolloutView, full: _Step, now_s: float) -> Grant:
        if self.mode == "alternate":
            self._is_rollouts_turn = view.is_idle or not self._is_rollouts_turn
            is_open = self._is_rollouts_turn
        else:
            is_open = rollout.oldest_arrival_s < view.oldest_arrival_s
        if not is_open:
            return _closed(now_s, "it is serving's turn")
        return Grant(full.tokens, self._sequences(full), math.inf, "it is the rollouts' turn")

    # From time to a step

    def _full_step(self, rollout: RolloutView) -> _Step:
        tokens = self.limits.rollout_step_tokens
        decodes = min(rollout.decoding, self.limits.rollout_sequences, tokens)
        room = tokens - decodes if decodes < self.limits.rollout_sequences else 0
        return _Step(decodes, min(rollout.prompt_tokens, room), rollout.context_tokens)

    def _grant(self, full: _Step, allowed_s: float, now_s: float, reason: str, *, is_idle: bool) -> Grant:
        step_s_max = allowed_s - self._grace_s
        step = self._largest(full, step_s_max)
        if step is None:
            return _closed(now_s, f"no step fits: {reason}")
        self._efficiency = 1.0 if is_idle or step is full else self._efficiency_of(step.kinds, full.kinds)
        if self._efficiency < self.limits.efficiency_min:
            return _closed(now_s, f"only an inefficient step fits: {reason}")
        until_s = now_s + allowed_s - self.rollout.upper(step.features)
        return Grant(step.tokens, self._sequences(step), until_s, reason, step_s_max)

    def _largest(self, full: _Step, step_s_max: float) -> _Step | None:
        """`full` itself if it fits; else fewer prompt tokens; else fewer sequences."""
        full_s = self.rollout.upper(full.features)
        if full_s <= step_s_max:
            return full
        decodes = _Step(full.decodes, 0, full.context_tokens)
        decodes_s = self.rollout.upper(decodes.features)
        if decodes_s <= step_s_max:
            fewer = self._most(decodes, full, decodes_s, full_s, step_s_max)
        else:
            one = _Step(1, 0, full.context_tokens)
            fewer = self._most(one, decodes, self.rollout.upper(one.features), decodes_s, step_s_max)
        return fewer if fewer is not None and fewer.tokens else None

    def _most(self, small: _Step, large: _Step, small_s: float, large_s: float, step_s_max: float) -> _Step | None:
        """Between a step that should fit and one that does not: first as if time were linear in size, then less."""
        if small_s > step_s_max:
            return None
        share = (step_s_max - small_s) / (large_s - small_s)
        for _ in range(SHRINK_TRIES):
            between = _Step(
                small.decodes + int(share * (large.decodes - small.decodes)),
                small.prompt_tokens + int(share * (large.prompt_tokens - small.prompt_tokens)),
                small.context_tokens,
            )
            if self.rollout.upper(between.features) <= step_s_max:
                return between
            share *= 0.8
        return small

    def _efficiency_of(self, step: StepKinds, full: StepKinds) -> float:
        """Work per second against a full step's; a token is worth what it costs in a batch of its kind."""
        decode_s, prompt_s = (
            self.rollout.predict(kind) / max(1, kind.new_tokens) for kind in (full.decodes, full.prompts)
        )
        one, other = (
            (decode_s * taken.decodes.new_tokens + prompt_s * taken.prompts.new_tokens)
            / (self.rollout.predict(taken.whole) + self.limits.switch_s)
            for taken in (step, full)
        )
        return one / other

    def _sequences(self, step: _Step) -> int:
        return self.limits.rollout_sequences if step.prompt_tokens else step.decodes


def _closed(now_s: float, reason: str) -> Grant:
    return Grant(0, 0, now_s, reason, 0.0)
