"""Lending beside an engine whose loop is not ours: everything is learnt from what it shows, nothing is run on it.

An engine shows its finished steps and the milestones of its requests. Steps teach what its steps cost; steps that a
lent one ran beside were slowed by it and teach nothing. Milestones say who came, with how long a prompt, and whether
they kept their deadlines. Nothing is lent until enough steps were seen: of both kinds, or very many of one kind, as
beside an engine that only prefills or only decodes.

What the rollout engine's own steps cost is learnt by running them, since there is no profile to begin with: while
serving has no work, in steps that begin small and double as long as the last one took less than half of what serving
may find the device taken for. Then `Admission` decides, as everywhere else. Steps that were tried while the machine was
busy with something else may have taught that none fits; then nothing runs that could prove it wrong, so after a while
one token is tried all the same, and what was learnt is forgotten if that was quick.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from rose.core.admission import Admission
from rose.core.breaches import Breach, Ledger
from rose.core.decisions import Grant
from rose.core.facts import RolloutView, ServingView, StepFeatures
from rose.core.latency import LatencyModel

STEPS_MIN = 64
KIND_MIN = 8  # steps with prompts, and steps that only decode
ONE_KIND_STEPS = 512  # so many steps of one kind: there is no other here
SAMPLES_KEPT = 512
REFITS_MAX = 2048  # after so many steps the model says itself when it is due
LENT_KEPT = 64  # lent steps, to know which serving steps they ran beside
TRIAL_TOKENS = 8  # of the first step that is tried
TRIAL_START_S = 0.05  # a trial that has not begun by then is asked for again
DOUBT_S, DOUBT_S_MAX = 60.0, 3840.0  # for which no step must have fitted before one is tried, and after failures


NOTHING = StepFeatures()


class MilestoneKind(IntEnum):
    CAME = 1
    FIRST_TOKEN = 2
    ENDED = 3
    GONE = 4  # cancelled, or failed: nobody waits for it any more


@dataclass(frozen=True, slots=True)
class Milestone:
    """`tokens`: of the prompt when it came, of the answer when it ended or was gone."""

    kind: MilestoneKind
    key: int
    at_s: float
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step behind another one begins when that one ends."""

    began_s: float = 0.0
    ended_s: float = 0.0
    features: StepFeatures = NOTHING

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


class StepLearner:
    """Gives a latency model its first fit when enough steps came by, and later ones as more do."""

    def __init__(self, model: LatencyModel, steps_min: int = STEPS_MIN) -> None:
        self.model = model
        self.prompts = self.decodes = 0
        self._steps_min = steps_min
        self._samples: deque[tuple[StepFeatures, float]] = deque(maxlen=SAMPLES_KEPT)
        self._refit_at = 2 * steps_min

    @property
    def seen(self) -> int:
        return self.prompts + self.decodes

    def observe(self, features: StepFeatures, seconds: float) -> None:
        if features.sequences == 0 or seconds <= 0:
            return
        if features.new_tokens > features.sequences:
            self.prompts += 1
        else:
            self.decodes += 1
        if self.model.is_calibrated:
            self.model.observe(features, seconds)
            return
        self._samples.append((features, seconds))
        both = min(self.prompts, self.decodes) >= KIND_MIN and self.seen >= self._steps_min
        if both or self.seen >= ONE_KIND_STEPS:
            self.model.fit(self._samples)
            self._samples.clear()

    @property
    def missing(self) -> str:
        """What is still to be seen, for people; empty once the model is calibrated."""
        if self.model.is_calibrated:
            return ""
        kinds = f"{self.prompts} with prompts and {self.decodes} that only decode"
        return f"{self.seen} steps seen, {kinds}; {self._steps_min} with {KIND_MIN} of each are enough"

    def forget(self) -> None:
        """Everything: what was seen is not what is now."""
        self.model.forget()
        self.prompts = self.decodes = 0
        self._samples.clear()
        self._refit_at = 2 * self._steps_min

    def refit_if_due(self) -> None:
        """When nobody waits: it takes milliseconds. Often at first, when the few steps seen so far had much to say."""
        if self.seen >= self._refit_at and self._refit_at <= REFITS_MAX and self.model.is_calibrated:
            self._refit_at *= 2
            self.model.refit()
        elif self.model.is_refit_due:
            self.model.refit()


class Trials:
    """The size of rollout steps while their model is not calibrated."""

    def __init__(self, tokens_max: int, block_s: float) -> None:
        self.tokens = min(TRIAL_TOKENS, tokens_max)
        self._tokens_max, self._block_s = tokens_max, block_s

    def observe(self, seconds: float) -> None:
        if 2 * seconds <= self._block_s:
            self.tokens = min(self._tokens_max, 2 * self.tokens)
        elif seconds > self._block_s:
            self.tokens = max(1, self.tokens // 2)

    def grant(self, view: ServingView, now_s: float) -> Grant:
        if not view.is_idle:
            return Grant(0, 0, now_s, "rollout steps are tried only while serving has no work")
        until_s = now_s + TRIAL_START_S
        return Grant(self.tokens, self.tokens, until_s, "learning how long rollout steps take", self._block_s)


class Doubt:
    """Of a model by which no step fits. A failed try costs a user one such step at most, and the next comes later."""

    def __init__(self, block_s: float) -> None:
        self.is_trying = False
        self._block_s, self._patience_s = block_s, DOUBT_S
        self._since_s: float | None = None

    def settle(self) -> None:
        """Steps fit."""
        self.is_trying, self._since_s, self._patience_s = False, None, DOUBT_S

    def grant(self, now_s: float) -> Grant | None:
        """No step fits, again: one token, or None while it is too early to try."""
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s < self._patience_s:
            return None
        self.is_trying = True
        return Grant(1, 1, now_s + TRIAL_START_S, "no step should fit, and one is tried to see", self._block_s)

    def judge(self, seconds: float) -> bool:
        """How long the try took; True if the model is wrong."""
        self.is_trying, self._since_s = False, None
        is_quick = seconds <= self._block_s
        self._patience_s = DOUBT_S if is_quick else min(DOUBT_S_MAX, 2 * self._patience_s)
        return is_quick


class PassiveLending:
    """`Admission` beside an engine that is only looked at. Tell it what was seen and what was lent; ask `decide`.

    After a lent step: first the steps that were seen meanwhile (`steps_seen`), then the step itself (`lent`), then the
    milestones (`milestones_seen`), so that it is known what ran beside it and who came during it.
    """

    def __init__(
        self, admission: Admission, serving: StepLearner | None = None, rollout: StepLearner | None = None
    ) -> None:
        """With what was learnt before, on other terms or beside another engine."""
        self.admission = admission
        self.serving = serving or StepLearner(admission.serving)
        self.rollout = rollout or StepLearner(admission.rollout)
        assert (self.serving.model, self.rollout.model) == (admission.serving, admission.rollout)
        self.trials, self.doubt = self._new_trials(), Doubt(admission.block_s)
        self.ledger = Ledger(admission.budgets, admission.own_gaps, admission.own_answers)
        self.lent_steps = self.lent_tokens = 0
        self.requests = self.attained = 0
        self._open: dict[int, bool] = {}  # requests that are here: whether they have their first token
        self._lent: deque[tuple[float, float]] = deque(maxlen=LENT_KEPT)
        self._served: deque[tuple[float, float]] = deque(maxlen=LENT_KEPT)

    def _new_trials(self) -> Trials:
        return Trials(self.admission.limits.rollout_step_tokens, self.admission.block_s)

    # What was seen

    def steps_seen(self, steps: Iterable[FinishedStep], lending_since_s: float = math.inf) -> None:
        """`lending_since_s`: when the lent step that is not told of yet began."""
        for step in steps:
            self._served.append((step.began_s, step.ended_s))
            self.admission.demand.served(step.features, step.seconds, step.ended_s)
            if step.ended_s <= lending_since_s and not _overlap_s(self._lent, step.began_s, step.ended_s):
                self.serving.observe(step.features, step.seconds)

    def milestones_seen(self, milestones: Iterable[Milestone], lost: int = 0) -> list[Breach]:
        """Breaches that came to light. After lost records nobody's account can be trusted, so all are closed."""
        if lost:
            for key in self._open:
                self.ledger.gone(str(key))
            self._open.clear()
        found = [self._milestone(milestone) for milestone in milestones]
        return [breach for breach in found if breach is not None]

    def _milestone(self, milestone: Milestone) -> Breach | None:
        key, at_s = milestone.key, milestone.at_s
        if milestone.kind is MilestoneKind.CAME:
            self.admission.prompts.observe(milestone.tokens)
            self._open[key] = False
            self.ledger.arrived(str(key), at_s)
            return None
        has_first_token = self._open.get(key)
        if has_first_token is None:
            return None
        if milestone.kind is MilestoneKind.FIRST_TOKEN:
            if has_first_token:
                return None
            self._open[key] = True
            return self._lost(self.ledger.first_token(str(key), at_s))
        del self._open[key]
        if milestone.kind is MilestoneKind.GONE:
            self._judge(self.ledger.kept_by_leaving(str(key), milestone.tokens, at_s), at_s)
            return self._lost(self.ledger.left(str(key), milestone.tokens, at_s))
        if not has_first_token:
            self.ledger.gone(str(key))
            return None
        self._judge(self.ledger.kept(str(key), milestone.tokens, at_s), at_s)
        return self._lost(self.ledger.finished(str(key), milestone.tokens, at_s))

    def _judge(self, is_attained: bool | None, at_s: float) -> None:
        if is_attained is None:
            return
        self.requests += 1
        self.attained += is_attained
        if self.admission.breaker is not None:
            self.admission.breaker.finished(at_s, is_attained=is_attained)

    def _lost(self, breach: Breach | None) -> Breach | None:
        if breach is not None and self.admission.breaker is not None:
            self.admission.breaker.deadline_lost(breach.at_s)
        return breach

    # What was lent

    def lent(
        self, step: FinishedStep, upper_s: float, serving_since_s: float = math.inf, stalled_s: float = 0.0
    ) -> Breach | None:
        """A rollout step that ran. Time that serving's own steps took beside it says nothing of what it costs, but is
        charged: it made them longer.

        `serving_since_s`: when the serving step that has not ended yet began. `stalled_s`: for how long the step was
        kept from running by others, serving among them; in that time it held nothing that anybody could wait for, and
        nothing was lent.
        """
        beside_s = _overlap_s(self._served, step.began_s, step.ended_s)
        beside_s += max(0.0, step.ended_s - max(step.began_s, serving_since_s))
        held_s = step.seconds - min(step.seconds, stalled_s)
        own_s = min(held_s, max(0.0, step.seconds - beside_s))
        is_trial = not self.rollout.model.is_calibrated
        if not beside_s:
            self.rollout.observe(step.features, own_s)
        if is_trial:
            self.trials.observe(own_s)
        elif self.doubt.is_trying and self.doubt.judge(own_s):
            self.rollout.forget()
            self.trials = self._new_trials()
        self._lent.append((step.began_s, step.ended_s))
        self.lent_steps += 1
        self.lent_tokens += step.features.new_tokens
        breach = self.ledger.lent(step.ended_s - held_s, step.ended_s, upper_s + held_s - own_s)
        if self.admission.breaker is not None:
            self.admission.breaker.lent(step.ended_s, is_late=breach is not None)
        return breach

    # Deciding

    def decide(self, view: ServingView, rollouts: RolloutView, now_s: float) -> Grant:
        if missing := self.serving.missing:
            return Grant(0, 0, now_s, f"learning how long serving's steps take: {missing}")
        if not self.rollout.model.is_calibrated and rollouts.decoding + rollouts.prompt_tokens:
            breaker = self.admission.breaker
            stopped = breaker.why_stopped(now_s) if breaker is not None else None
            return Grant(0, 0, now_s, stopped) if stopped else self.trials.grant(view, now_s)
        grant = self.admission.decide(view, rollouts, now_s)
        if self.admission.is_stuck:
            return self.doubt.grant(now_s) or grant
        if grant.tokens:
            self.doubt.settle()
        return grant

    def refit_if_due(self) -> None:
        self.serving.refit_if_due()
        self.rollout.refit_if_due()


def _overlap_s(spans: Iterable[tuple[float, float]], began_s: float, ended_s: float) -> float:
    return sum(max(0.0, min(ended_s, end_s) - max(began_s, begin_s)) for begin_s, end_s in spans)
