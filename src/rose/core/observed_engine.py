"""Lend beside a serving engine whose loop is not ours: learn from what it publishes, and run nothing on it.

The engine publishes its finished steps and the milestones of its requests. Steps teach what serving costs, except those
that a rollout step slowed. Milestones show arrivals, prompt lengths and kept deadlines. Nothing is lent until enough
steps were seen: of both kinds, or very many of one kind, as beside an engine that only prefills or only decodes.

The cost of rollout steps is learnt by running them while serving has no work, since there is no profile to start with.
Trial steps begin small and double while they stay below half of the allowed blocking time. Then `Admission` decides.
Trials on a busy machine may have taught that no step fits, and nothing would run to disprove it. So after a while one
token is tried all the same; if that is quick, what was learnt is forgotten.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from rose.core.accountant import Breach
from rose.core.admission import Admission
from rose.core.facts import Grant, RolloutView, ServingView, StepFeatures
from rose.core.latency import LatencyModel
from rose.core.lending_controller import LendingController

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
    """What happened to a request of the serving engine."""

    ARRIVED = 1
    FIRST_TOKEN = 2
    ENDED = 3
    CANCELLED = 4  # or failed


@dataclass(frozen=True, slots=True)
class Milestone:
    """One event of a request. `tokens` are the prompt's on arrival, the answer's at the end."""

    kind: MilestoneKind
    key: int
    at_s: float
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step of the serving engine; one that follows another begins when that one ends."""

    began_s: float = 0.0
    ended_s: float = 0.0
    features: StepFeatures = NOTHING

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


class StepLearner:
    """Fits a latency model when enough steps were seen, and again as more are."""

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
        """Return what is still to be learnt, for people; empty once the model is calibrated."""
        if self.model.is_calibrated:
            return ""
        kinds = f"{self.prompts} with prompts and {self.decodes} that only decode"
        return f"{self.seen} steps seen, {kinds}; {self._steps_min} with {KIND_MIN} of each are enough"

    def forget(self) -> None:
        """Forget everything that was learnt."""
        self.model.forget()
        self.prompts = self.decodes = 0
        self._samples.clear()
        self._refit_at = 2 * self._steps_min

    def refit_if_due(self) -> None:
        """Refit while no request waits: it takes milliseconds. At first it is due often, as early steps teach most."""
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


class StuckProbe:
    """A check of a model by which no step fits. A failed try costs a user one such step; the next comes later."""

    def __init__(self, block_s: float) -> None:
        self.is_trying = False
        self._block_s, self._patience_s = block_s, DOUBT_S
        self._since_s: float | None = None

    def settle(self) -> None:
        """Note that steps fit."""
        self.is_trying, self._since_s, self._patience_s = False, None, DOUBT_S

    def grant(self, now_s: float) -> Grant | None:
        """Note that no step fits. Return a grant of one token, or None while it is too early to try."""
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s < self._patience_s:
            return None
        self.is_trying = True
        return Grant(1, 1, now_s + TRIAL_START_S, "no step should fit, and one is tried to see", self._block_s)

    def judge(self, seconds: float) -> bool:
        """Take the duration of the try. Return True if the model is wrong."""
        self.is_trying, self._since_s = False, None
        is_quick = seconds <= self._block_s
        self._patience_s = DOUBT_S if is_quick else min(DOUBT_S_MAX, 2 * self._patience_s)
        return is_quick


class ObservedLending(LendingController):
    """The lending controller beside an engine that is only observed.

    After a rollout step report first the serving steps seen meanwhile (`steps_seen`), then the step itself (`lent`),
    then the milestones (`milestones_seen`). This order shows what ran beside the step and which requests came then.
    """

    def __init__(
        self, admission: Admission, serving: StepLearner | None = None, rollout: StepLearner | None = None
    ) -> None:
        """Start with what was learnt before, on other terms or beside another engine, if it is given."""
        super().__init__(admission)
        self.serving = serving or StepLearner(admission.serving)
        self.rollout = rollout or StepLearner(admission.rollout)
        assert (self.serving.model, self.rollout.model) == (admission.serving, admission.rollout)
        self.trials = Trials(admission.limits.rollout_step_tokens, admission.block_s)
        self.probe = StuckProbe(admission.block_s)
        self._open: dict[int, bool] = {}  # requests that are here: whether they have their first token
        self._lent: deque[tuple[float, float]] = deque(maxlen=LENT_KEPT)
        self._served: deque[tuple[float, float]] = deque(maxlen=LENT_KEPT)

    # What was seen

    def on_steps(self, steps: Iterable[FinishedStep], lending_since_s: float = math.inf) -> None:
        """Learn from serving's steps. `lending_since_s`: when the unreported rollout step began."""
        for step in steps:
            self._served.append((step.began_s, step.ended_s))
            self.admission.demand.on_step(step.features, step.seconds, step.ended_s)
            if step.ended_s <= lending_since_s and not _overlap_s(self._lent, step.began_s, step.ended_s):
                self.serving.observe(step.features, step.seconds)

    def on_milestones(self, milestones: Iterable[Milestone], lost: int = 0) -> list[Breach]:
        """Return the breaches that came to light. Lost records make every open account unreliable, so all close."""
        milestones = list(milestones)
        if lost:
            now_s = milestones[0].at_s if milestones else 0.0
            for key in self._open:
                self.accountant.discard(str(key), now_s)
            self._open.clear()
        return [breach for milestone in milestones for breach in self.count_lost([self._on_milestone(milestone)])]

    def _on_milestone(self, milestone: Milestone) -> Breach | None:
        key, name, at_s = milestone.key, str(milestone.key), milestone.at_s
        if milestone.kind is MilestoneKind.ARRIVED:
            self._open[key] = False
            self.accountant.on_arrival(name, at_s, milestone.tokens)
            return None
        has_first_token = self._open.get(key)
        if has_first_token is None:
            return None
        if milestone.kind is MilestoneKind.FIRST_TOKEN:
            self._open[key] = True
            return None if has_first_token else self.accountant.on_first_token(name, at_s)
        del self._open[key]
        if milestone.kind is MilestoneKind.CANCELLED:
            return self.count_left(name, milestone.tokens, at_s)
        if has_first_token:
            return self.count_finished(name, milestone.tokens, at_s)
        self.accountant.discard(name, at_s)
        return None

    # What was lent

    def on_lent_step(
        self, step: FinishedStep, upper_s: float, serving_since_s: float = math.inf, stalled_s: float = 0.0
    ) -> Breach | None:
        """Account for a rollout step that ran.

        Time in which serving's own steps ran beside it is charged, since it made them longer, but does not teach what
        the step costs. `serving_since_s`: when the serving step that has not ended yet began. `stalled_s`: for how long
        other processes, serving among them, kept the step from running. In that time it held nothing that a request
        could wait for, and nothing was lent.
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
        elif self.probe.is_trying and self.probe.judge(own_s):
            self.rollout.forget()
            self.trials = Trials(self.admission.limits.rollout_step_tokens, self.admission.block_s)
        self._lent.append((step.began_s, step.ended_s))
        return self.count_step(step.features, step.ended_s - held_s, step.ended_s, upper_s + held_s - own_s)

    # Deciding

    def decide(self, view: ServingView, rollouts: RolloutView, now_s: float) -> Grant:
        if missing := self.serving.missing:
            return Grant(0, 0, now_s, f"learning how long serving's steps take: {missing}")
        if not self.rollout.model.is_calibrated and rollouts.decoding + rollouts.prompt_tokens:
            resting = self.why_resting(now_s)
            return Grant(0, 0, now_s, resting) if resting else self.trials.grant(view, now_s)
        grant = self.admission.decide(view, rollouts, now_s)
        if self.admission.is_stuck:
            return self.probe.grant(now_s) or grant
        if grant.tokens:
            self.probe.settle()
        return grant

    def refit_if_due(self) -> None:
        self.serving.refit_if_due()
        self.rollout.refit_if_due()


def _overlap_s(spans: Iterable[tuple[float, float]], began_s: float, ended_s: float) -> float:
    return sum(max(0.0, min(ended_s, end_s) - max(began_s, begin_s)) for begin_s, end_s in spans)
