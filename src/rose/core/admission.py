"""Decides whether rollouts may run a step now, and how large a one. One `Admission` per device, asked at every step.

`idle`    only while serving has no work. A request that arrives waits for the rest of one step, which is kept short.
`decode`  also between decode steps, under three conditions. Time: every running request keeps its schedule of tokens
          (`slo.credit_s`), up to a share of the TPOT budget and never into what serving itself needs. Room: slots and
          KV memory stay free for the next burst (`core.bursts`), because answers that are delayed live longer. First
          tokens: nothing is lent while a prompt waits, and a step is shorter than what serving can spare of its TTFT.
`paper`   while every known request and the next typical one keep any slack at all; whole steps or none.
`alternate`, `fcfs`  no admission, to compare with: a step each in turn; the side whose oldest request came first.

Time is turned into a step by the rollout model's upper estimate: all sequences that decode and as many prompt tokens as
fit, or, if not even those fit, fewer sequences. While serving has work, a smaller step must be nearly as efficient as
a full one: where fixed costs dominate, many small steps would take serving's time and give little. A step that must be
planned smaller than it was granted is checked for that again (`is_worth_it`).

A grant says until when its step may *start*, so that however late it starts and however many follow, the last one ends,
by its upper estimate, before the time that was allowed is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rose.core.breaker import Breaker
from rose.core.facts import Grant, RolloutView, RunningRequest, ServingView, StepFeatures
from rose.core.history import PrefillDemand, ServingHistory
from rose.core.latency import LatencyModel
from rose.core.slo import (
    LENGTH_CLASSES,
    PROMPT_TOKENS_UNKNOWN,
    Budgets,
    ServingOutlook,
    answer_slack_s,
    credit_s,
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
    spare_sequences: int = 0  # beyond those, while lending has delayed requests that run
    # Serving that uses 60 % of its TTFT budget alone has 25 left to the 85 that are wanted; a step that misses its
    # estimate may take double, so a tenth leaves room for one.
    block_share: float = 0.1
    efficiency_min: float = 0.8
    # Where serving alone just copes on a CPU, simulation loses 2.3 points without this limit and half a point with 0.7.
    prefill_share_max: float = 0.5
    latch_s: float = 1.0  # for which it holds: a queue that is gone may be back in a moment
    switch_s: float = 0.0003
    kv_bytes_per_token: float = 0.0  # of serving's model; 0 if it is not known, and then KV memory is not reserved

    def __post_init__(self) -> None:
        sizes = self.serving_step_tokens, self.rollout_step_tokens, self.serving_sequences, self.rollout_sequences
        if min(sizes) < 1:
            raise ConfigError("a step of no tokens or no sequences cannot run", hint="give sizes of 1 and more")
        for name in ("block_share", "efficiency_min", "prefill_share_max"):
            if not 0 < getattr(self, name) <= 1:
                what = f"{name} must be above 0 and at most 1, got {getattr(self, name)}"
                raise ConfigError(what, hint="give a share")
        if min(self.latch_s, self.switch_s, self.kv_bytes_per_token) < 0:
            raise ConfigError("latch_s, switch_s and kv_bytes_per_token cannot be negative")


@dataclass(frozen=True, slots=True)
class StepKinds:
    """A rollout step, and what it would be of its decodes or its prompts alone."""

    whole: StepFeatures
    decodes: StepFeatures
    prompts: StepFeatures


@dataclass(frozen=True, slots=True)
class _RolloutStep:
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
        decodes, prompts = _RolloutStep(self.decodes, 0, context), _RolloutStep(0, self.prompt_tokens, context)
        return StepKinds(self.features, decodes.features, prompts.features)


class Admission:
    """Ask `decide` before every step and obey. The SLO accountant reports serving's requests to `history`."""

    def __init__(
        self,
        mode: Mode,
        budgets: Budgets,
        serving: LatencyModel,
        rollout: LatencyModel,
        limits: LendingLimits | None = None,
        breaker: Breaker | None = None,
        history: ServingHistory | None = None,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"there is no admission mode {mode!r}", hint=f"choose one of {', '.join(MODES)}")
        self.mode = mode
        self.budgets = budgets
        self.serving = serving
        self.rollout = rollout
        self.limits = limits or LendingLimits()
        self.breaker = breaker
        self.history = history or ServingHistory(
            budgets.ttft_s, self.limits.serving_sequences, self.limits.spare_sequences
        )
        self.demand = PrefillDemand(serving, budgets.ttft_s)
        self._latched_until_s = -math.inf
        self._is_rollouts_turn = self._is_seeded = False
        self._idle_since_s: float | None = None  # serving has had no work since
        self._stuck_since_s: float | None = None  # serving has had no work since, and no step fitted
        self.is_stuck = False  # by the last decision: serving has no work, and no step fits
        self._grace_s = START_GRACE_S
        self._efficiency = 1.0  # of the step that was granted last, against a full one's

    def decide(self, view: ServingView, rollout: RolloutView, now_s: float) -> Grant:
        self.is_stuck = False
        if not (self.serving.is_calibrated and self.rollout.is_calibrated):
            return _closed(now_s, "step times are not profiled yet")
        stopped = self.breaker.why_stopped(now_s) if self.breaker is not None else None
        if stopped is not None:
            return _closed(now_s, stopped)
        full = self._full_step(rollout)
        if full.tokens == 0:
            return _closed(now_s, "rollouts have nothing to run")
        self._seed()
        if self.mode == "paper":
            return self._by_dual_slack(view, full, now_s)
        if self.mode in ("alternate", "fcfs"):
            return self._by_turns(view, rollout, full, now_s)
        if view.is_idle:
            return self._while_idle(full, now_s)
        self._idle_since_s = None
        if self.mode == "idle":
            return _closed(now_s, "serving has work")
        return self._beside_decoding(view, full, now_s)

    @property
    def block_s(self) -> float:
        """Return the longest that a rollout step, by its upper estimate, may hold the device."""
        return self.limits.block_share * self.budgets.ttft_s

    def paces_s(self, step_s: float) -> list[float]:
        """Return for each length class the mean time per token up to which lending goes on beside it.

        It is a share of the budget, but delays serving no more than the margin: serving needs some of the budget
        itself, above all for other requests' prompts. A decode step takes `step_s`.
        """
        tpot_s, share = self.budgets.tpot_s, self.budgets.slack_share
        return [min(share * tpot_s, step_s + margin_s) for margin_s in self.history.gaps.margins_s(tpot_s)]

    @property
    def age_s(self) -> float:
        """Return up to which age of a request lending goes on beside it: serving needs the rest to end its answer.

        It is infinite where serving itself takes longer than `answer_s` for an answer.
        """
        answer_s, own_s = self.budgets.answer_s, self.history.answers.typical
        return min(self.budgets.slack_share * answer_s, answer_s - own_s) if own_s < answer_s else math.inf

    def slack_s(self, view: ServingView, now_s: float) -> float | None:
        """Return what serving can spare now, of its share of the budgets; None before step times are known."""
        if not self.serving.is_calibrated:
            return None
        outlook, budgets = self._look_ahead(view), self.budgets
        waiting_s = prefill_slack_s(view, outlook, budgets.slack_share * budgets.ttft_s, now_s)
        token_s = self._token_slack_s(view, outlook, self.paces_s(outlook.decode_step_s), now_s)
        return max(0.0, min(waiting_s, token_s, self._delay_s_max))

    def on_step_planned(self, *, in_time: bool) -> None:
        """Record that a granted step was planned; if its grant had expired, planning gets twice the time."""
        if in_time:
            self._grace_s = max(START_GRACE_S, GRACE_DECAY * self._grace_s)
        else:
            self._grace_s = max(START_GRACE_S, min(2 * self._grace_s, GRACE_SHARE_MAX * self.block_s))

    def is_worth_it(self, step: StepKinds, granted: StepKinds) -> bool:
        """Return whether a step that had to be planned smaller than it was granted may run beside serving."""
        if self.mode != "decode":
            return True
        return self._efficiency * self._efficiency_of(step, granted) >= self.limits.efficiency_min

    def slowdown(self) -> float:
        """Return the largest factor by which requests that decode beside a prompt prolong it."""
        most = self.limits.serving_sequences + self.limits.spare_sequences
        context = self._prompt_tokens
        crowded, alone = (
            self._look_ahead(ServingView(0, (), count * (RunningRequest(0.0, context),))) for count in (most, 0)
        )
        return max(1.0, crowded.full_step_s / crowded.step_tokens * alone.step_tokens / alone.full_step_s)

    def expected_s(self, grant: Grant, rollout: RolloutView) -> float:
        """Return the expected duration of the granted step."""
        decodes = min(rollout.decoding, grant.sequences, grant.tokens)
        step = _RolloutStep(decodes, min(rollout.prompt_tokens, grant.tokens - decodes), rollout.context_tokens)
        return self.rollout.predict(step.features) + self.limits.switch_s

    # The rules

    def _seed(self) -> None:
        """Seed the history: a prompt of usual length, and a chunk of prompts beside every token."""
        if self._is_seeded:
            return
        self._is_seeded = True
        self.history.decode_step_s = self._decode_step_s
        alone = self._look_ahead(ServingView(0))
        self.history.seed(alone.prefill_s(PROMPT_TOKENS_UNKNOWN), alone.full_step_s)

    def _decode_step_s(self, count: int) -> float:
        """Return about how long a decode step of so many requests takes."""
        read = count * int(self.history.prompts.quantile(0.5))
        return self.serving.predict(StepFeatures(count, read, read, max(1, count)))

    @property
    def _prompt_tokens(self) -> int:
        return int(self.history.prompts.typical)

    def _look_ahead(self, view: ServingView) -> ServingOutlook:
        return look_ahead(view, self.serving, self.limits.serving_step_tokens, self._prompt_tokens)

    @property
    def _delay_s_max(self) -> float:
        """Return the longest delay of a request's first token that a lent step may cause."""
        return min(self.block_s, self.history.first_tokens.margin_s(self.budgets.ttft_s)) - self.limits.switch_s

    def _while_idle(self, full: _RolloutStep, now_s: float) -> Grant:
        self._idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
        allowed_s, longest_s = self._delay_s_max, self.block_s - self.limits.switch_s
        if now_s - self._idle_since_s > STUCK_S:  # requests that needed the budget then shared steps that are gone
            allowed_s = longest_s
        grant = self._grant(full, allowed_s, now_s, "serving has no work", is_idle=True)
        if not grant.tokens and allowed_s < longest_s:
            self._stuck_since_s = None
            return _closed(now_s, "serving needs its TTFT budget itself")
        self.is_stuck = not grant.tokens
        if not self.is_stuck:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = now_s
        elif now_s - self._stuck_since_s > STUCK_S:
            self.rollout.relax()
            self._stuck_since_s = now_s
        return grant

    def _beside_decoding(self, view: ServingView, full: _RolloutStep, now_s: float) -> Grant:
        if view.waiting:
            return _closed(now_s, "a prompt waits")
        if self.demand.share(now_s) > self.limits.prefill_share_max:
            self._latched_until_s = now_s + self.limits.latch_s
        if now_s < self._latched_until_s:
            return _closed(now_s, "prompts take most of serving's time")
        outlook = self._look_ahead(view)
        paces_s = self.paces_s(outlook.decode_step_s)
        self.history.bursts.thresholds.pace_s = max(paces_s)
        if scarce := self._short_of(view, now_s):
            return _closed(now_s, f"{scarce} are kept free for the next burst")
        age_slack_s = answer_slack_s(view, self.age_s, self.budgets.answer_s, now_s)
        if age_slack_s <= 0:
            return _closed(now_s, "an answer has taken long already")
        tokens_s, first_s = self._token_slack_s(view, outlook, paces_s, now_s) - self.limits.switch_s, self._delay_s_max
        reason = "slack between decode steps" if tokens_s <= first_s else "slack before the next request"
        return self._grant(full, min(age_slack_s, tokens_s, first_s), now_s, reason, is_idle=False)

    def _short_of(self, view: ServingView, now_s: float) -> str:
        """Return what the next burst would not find enough of, or an empty text."""
        bursts = self.history.bursts
        if len(view.running) > bursts.running_max(now_s):
            return "slots"
        per_token = self.limits.kv_bytes_per_token
        if per_token and view.kv_total_bytes:
            total = int(view.kv_total_bytes / per_token)
            if view.kv_used_bytes / per_token + bursts.kv_tokens(total, now_s) > total:
                return "pages of KV memory"
        return ""

    def _token_slack_s(
        self, view: ServingView, outlook: ServingOutlook, paces_s: Sequence[float], now_s: float
    ) -> float:
        """Return what the running requests can spare: of the pace, and of the whole budget if a prompt comes meanwhile.

        The prompt does not count if a step with it alone takes longer than the budget: serving would miss it anyway.
        """
        step_s, tpot_s = outlook.decode_step_s, self.budgets.tpot_s
        typical_s = outlook.prefill_s(min(self._prompt_tokens, outlook.step_tokens))
        if self.budgets.tpot == "every_gap":
            spare_s = decode_slack_s(view, self.budgets.slack_share * tpot_s, step_s, now_s)
            with_prompt_s = decode_slack_s(view, tpot_s, typical_s, now_s)
        else:
            spare_s = credit_s(view, paces_s, step_s, now_s)
            with_prompt_s = credit_s(view, LENGTH_CLASSES * (tpot_s,), typical_s, now_s)
        return min(spare_s, with_prompt_s) if typical_s < tpot_s else spare_s

    def _by_dual_slack(self, view: ServingView, full: _RolloutStep, now_s: float) -> Grant:
        budgets, outlook = self.budgets, self._look_ahead(view)
        ttft_s, tpot_s = budgets.slack_share * budgets.ttft_s, budgets.slack_share * budgets.tpot_s
        allowed_s = min(
            prefill_slack_s(view, outlook, ttft_s, now_s),
            decode_slack_s(view, tpot_s, outlook.next_step_s, now_s),
            ttft_s - outlook.next_ttft_s(self._prompt_tokens),
        )
        step_s = self.rollout.predict(full.features)
        if step_s >= allowed_s:
            return _closed(now_s, "no slack for a whole step")
        return Grant(full.tokens, self._sequences(full), now_s + allowed_s - step_s, "both slacks", allowed_s)

    def _by_turns(self, view: ServingView, rollout: RolloutView, full: _RolloutStep, now_s: float) -> Grant:
        if self.mode == "alternate":
            self._is_rollouts_turn = view.is_idle or not self._is_rollouts_turn
            is_open = self._is_rollouts_turn
        else:
            is_open = rollout.oldest_arrival_s < view.oldest_arrival_s
        if not is_open:
            return _closed(now_s, "it is serving's turn")
        return Grant(full.tokens, self._sequences(full), math.inf, "it is the rollouts' turn")

    # From time to a step

    def _full_step(self, rollout: RolloutView) -> _RolloutStep:
        tokens = self.limits.rollout_step_tokens
        decodes = min(rollout.decoding, self.limits.rollout_sequences, tokens)
        room = tokens - decodes if decodes < self.limits.rollout_sequences else 0
        return _RolloutStep(decodes, min(rollout.prompt_tokens, room), rollout.context_tokens)

    def _grant(self, full: _RolloutStep, allowed_s: float, now_s: float, reason: str, *, is_idle: bool) -> Grant:
        step_s_max = allowed_s - self._grace_s
        step = self._largest(full, step_s_max)
        if step is None:
            return _closed(now_s, f"no step fits: {reason}")
        self._efficiency = 1.0 if is_idle or step is full else self._efficiency_of(step.kinds, full.kinds)
        if self._efficiency < self.limits.efficiency_min:
            return _closed(now_s, f"only an inefficient step fits: {reason}")
        until_s = now_s + allowed_s - self.rollout.upper(step.features)
        return Grant(step.tokens, self._sequences(step), until_s, reason, step_s_max)

    def _largest(self, full: _RolloutStep, step_s_max: float) -> _RolloutStep | None:
        """Return `full` if it fits, else one with fewer prompt tokens, else one with fewer sequences."""
        full_s = self.rollout.upper(full.features)
        if full_s <= step_s_max:
            return full
        decodes = _RolloutStep(full.decodes, 0, full.context_tokens)
        decodes_s = self.rollout.upper(decodes.features)
        if decodes_s <= step_s_max:
            fewer = self._most(decodes, full, decodes_s, full_s, step_s_max)
        else:
            one = _RolloutStep(1, 0, full.context_tokens)
            fewer = self._most(one, decodes, self.rollout.upper(one.features), decodes_s, step_s_max)
        return fewer if fewer is not None and fewer.tokens else None

    def _most(
        self, small: _RolloutStep, large: _RolloutStep, small_s: float, large_s: float, step_s_max: float
    ) -> _RolloutStep | None:
        """Return a step between one that should fit and one that does not: first as if time were linear, then less."""
        if small_s > step_s_max:
            return None
        share = (step_s_max - small_s) / (large_s - small_s)
        for _ in range(SHRINK_TRIES):
            between = _RolloutStep(
                small.decodes + int(share * (large.decodes - small.decodes)),
                small.prompt_tokens + int(share * (large.prompt_tokens - small.prompt_tokens)),
                small.context_tokens,
            )
            if self.rollout.upper(between.features) <= step_s_max:
                return between
            share *= 0.8
        return small

    def _efficiency_of(self, step: StepKinds, full: StepKinds) -> float:
        """Return the work per second relative to a full step; a token is worth what it costs in a batch of its kind."""
        decode_s, prompt_s = (
            self.rollout.predict(kind) / max(1, kind.new_tokens) for kind in (full.decodes, full.prompts)
        )
        step_rate, full_rate = (
            (decode_s * kinds.decodes.new_tokens + prompt_s * kinds.prompts.new_tokens)
            / (self.rollout.predict(kinds.whole) + self.limits.switch_s)
            for kinds in (step, full)
        )
        return step_rate / full_rate

    def _sequences(self, step: _RolloutStep) -> int:
        return self.limits.rollout_sequences if step.prompt_tokens else step.decodes


def _closed(now_s: float, reason: str) -> Grant:
    return Grant(0, 0, now_s, reason, 0.0)
