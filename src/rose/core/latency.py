"""How long a step will take, and at most, from its shape alone; one model per (model, device).

    prediction = corrections x (constant + new tokens + KV read + new x context + sequences), none negative
    upper      = prediction x exp(margin)

The five constants are fitted to the steps of a start-up profile, on relative errors, and again now and then to a few
recent steps of every region of shapes. What five constants cannot express (tiles of rows, cache sizes) is a factor per
region. What affects every shape alike (another process, a warm core) is the drift, followed within tens of steps; what
affects the next step only is the echo of the last one. Short and long steps, and steps behind one several times as long
(cold caches), are classes with a bias of their own. All of it learns from clipped errors: a process stopped for 50 ms
teaches less than a step that was a fifth too long.

The upper estimate is online conformal prediction. A class counts the errors of its last thousand steps or so, and its
margin is the error that 1 in 100 of them exceeded, times a stretch that rises after a miss and falls slightly after a
hit, so that in the long run 99 steps in 100 are covered. A few stalls early on can make it so wide that nothing may
run, and what does not run teaches nothing: `relax`, to be called then, halves the weight of the worst of the past.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rose.core.facts import StepFeatures

MISSES_WANTED = 0.0085  # a little under the 1 % that is promised
BEYOND_REACH = 0.012  # of errors; the stretch does the rest, and is better known than where a tail ends
FIT_SAMPLES_MIN = 16  # five constants and something to judge them by
FIT_ROUNDS = 20
HUBER = 0.05  # relative errors beyond this weigh less in a fit: most are another process on the machine
CLIP_LOG = 0.2  # of log(actual / predicted) that a single step can teach
STALL_LOG = 0.5  # beyond this, the longer a step was the less it teaches
DRIFT_MEMORY_S = 0.03  # disturbances of a shared machine last some tens of milliseconds
DRIFT_RATE_MIN, DRIFT_RATE_MAX = 1 / 32, 1 / 2  # a short step is mostly noise; a long one is news, but not all of it
DRIFT_LOG_MAX = math.log(16.0)  # a device slower than this is not drifting; it misses and widens
ECHO = 0.3  # of one step's error that the next one of about its length still shows
COLD_RATIO = 4.0  # behind a step so many times as long, caches hold little that is of use
BIAS_RATE, BIAS_LEAK, BIAS_LOG_MAX = 1 / 32, 0.1, 0.7  # it leaks, or drift and biases could drift apart without end
REGION_RATE_MIN = 1 / 16
REGION_DOUBT = 4.0  # the first steps of a region count as if so many had been seen before
MARGIN_LOG_MIN = 0.03  # clocks and interrupts alone make this much
MARGIN_LOG_START = 0.15
MARGIN_LOG_MAX = 7.0  # a thousand times the prediction: a short step on a device that is often stopped
FORGET_STEPS = 1000  # a step this long ago counts a third of one now
PRIOR_STEPS = 50  # what a class that was not seen yet takes over from the most similar one
LOOK_EVERY = 16  # steps; and after every miss
NOTCH_LOG = 0.02  # what a miss raises the stretch by: more is quicker and overshoots
STRETCH_MIN, STRETCH_MAX = 0.25, 16.0
BINS_PER_OCTAVE, FIRST_OCTAVE_LOG = 16, 0.1  # errors are counted in bins that grow with them
KEPT_PER_REGION = 4
REGIONS_MAX = 256  # 1,024 steps at most, which keeps a refit at a few milliseconds
REFIT_EVERY = 2048
PROFILE_TOKENS_MAX = 2048  # of prompts in one batch of a profile
PROFILE_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

RAISE, LOWER = math.exp(NOTCH_LOG * (1 - MISSES_WANTED)), math.exp(-NOTCH_LOG * MISSES_WANTED)
BINS = 2 + int(BINS_PER_OCTAVE * math.log2(1 + MARGIN_LOG_MAX / FIRST_OCTAVE_LOG))
EDGES_LOG = [FIRST_OCTAVE_LOG * (2 ** (number / BINS_PER_OCTAVE) - 1) for number in range(BINS)]  # upper ones
Sample = tuple[StepFeatures, float]


@dataclass(frozen=True, slots=True)
class ProfileShape:
    """One batch of a start-up profile: prompts of this length, prefilled in chunks, then some decode steps."""

    requests: int
    context_tokens: int
    new_tokens: int  # the most one of its steps computes
    decode_steps: int


def profile_plan(max_step_tokens: int, max_sequences: int, max_context_tokens: int) -> list[ProfileShape]:
    """Return the batches to run at start-up: decodes and chunks of prompts small to large; 16,000 prompt tokens."""
    plan: list[ProfileShape] = []
    for context in (16, 128, 512, PROFILE_TOKENS_MAX):
        for requests in sorted({min(max_sequences, count) for count in (*PROFILE_BATCHES, max_sequences)}):
            if requests * context <= PROFILE_TOKENS_MAX and context + 16 < max_context_tokens:
                chunk = max(requests, max_step_tokens >> (len(plan) % 4))
                plan.append(ProfileShape(requests, context, chunk, decode_steps=6))
    return plan


@dataclass(slots=True)
class _Region:
    """Similar shapes: how far off the constants are there, and the newest steps, corrected for drift."""

    log_factor: float = 0.0
    factor: float = 1.0
    seen: int = 0
    kept: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT_PER_REGION))

    def learn(self, error_log: float) -> None:
        self.seen += 1
        self.set(self.log_factor + error_log * max(REGION_RATE_MIN, 1 / (self.seen + REGION_DOUBT)))

    def set(self, log_factor: float) -> None:
        self.log_factor, self.factor = log_factor, math.exp(log_factor)


def _bin_of(error_log: float) -> int:
    if error_log <= 0:  # all that was no longer than predicted
        return 0
    return min(BINS - 1, 1 + int(BINS_PER_OCTAVE * math.log2(1 + error_log / FIRST_OCTAVE_LOG)))


def _first_counts() -> list[float]:
    counts = [0.0] * BINS
    counts[0], counts[_bin_of(MARGIN_LOG_START)] = PRIOR_STEPS - 1.0, 1.0
    return counts


@dataclass(slots=True)
class _Class:
    """Steps of about one length, behind a much longer one or not: their bias, and the distribution of errors."""

    counts: list[float] = field(default_factory=_first_counts)
    total: float = float(PRIOR_STEPS)
    weight: float = 1.0  # of the next step among the counts; older ones weigh less because it grows
    seen: int = 0
    bias_log: float = 0.0
    bias: float = 1.0
    reach_log: float = MARGIN_LOG_START
    stretch: float = 1.0
    margin_log: float = MARGIN_LOG_START
    factor: float = math.exp(MARGIN_LOG_START)

    def successor(self) -> _Class:
        """Return a class for steps that were not seen yet and are most similar to these."""
        share = PRIOR_STEPS / self.total
        return _Class(
            [count * share for count in self.counts],
            reach_log=self.reach_log,
            stretch=self.stretch,
            margin_log=self.margin_log,
            factor=self.factor,
        )

    def learn(self, error_log: float, lesson_log: float) -> bool:
        """Learn from one step, and return whether it exceeded the margin."""
        is_miss = error_log > self.margin_log
        self.bias_log += BIAS_RATE * (lesson_log - BIAS_LEAK * self.bias_log)
        self.bias_log = max(-BIAS_LOG_MAX, min(BIAS_LOG_MAX, self.bias_log))
        self.bias = math.exp(self.bias_log)
        self.counts[_bin_of(error_log)] += self.weight
        self.total += self.weight
        self.weight *= 1 + 1 / FORGET_STEPS
        self.seen += 1
        self.stretch = max(STRETCH_MIN, min(STRETCH_MAX, self.stretch * (RAISE if is_miss else LOWER)))
        if is_miss or self.seen % LOOK_EVERY == 0:
            self._update_margin()
        return is_miss

    def relax(self) -> None:
        """Halve the weight of errors that were larger than usual."""
        first = _bin_of(MARGIN_LOG_START) + 1
        self.counts[first:] = [count / 2 for count in self.counts[first:]]
        self.total = sum(self.counts)
        self.stretch = min(self.stretch, max(1.0, math.sqrt(self.stretch)))
        self._update_margin()

    def _update_margin(self) -> None:
        if self.weight > 1e9:
            self.counts = [count / self.weight for count in self.counts]
            self.total, self.weight = self.total / self.weight, 1.0
        left, number = self.total * BEYOND_REACH, BINS - 1
        while number > 0 and self.counts[number] <= left:
            left -= self.counts[number]
            number -= 1
        self.reach_log = max(MARGIN_LOG_MIN, EDGES_LOG[number])
        self.margin_log = min(MARGIN_LOG_MAX, self.reach_log * self.stretch)
        self.factor = math.exp(self.margin_log)


class LatencyModel:
    """Give `fit` the profile's steps and `observe` every later one; ask `predict` and `upper`, infinite until then."""

    def __init__(self, constants: Sequence[float] | None = None) -> None:
        self.constants: tuple[float, ...] = tuple(constants) if constants is not None else ()
        assert not self.constants or (len(self.constants) == 5 and min(self.constants) >= 0), constants
        self.drift_log = 0.0
        self.observed = self.missed = 0
        self._drift = 1.0
        self._last_s = self._echo_log = 0.0
        self._regions: dict[tuple[int, int, int], _Region] = {}
        self._classes: dict[tuple[int, bool], _Class] = {}
        self._refit_at = REFIT_EVERY

    @property
    def is_calibrated(self) -> bool:
        return bool(self.constants)

    @property
    def is_refit_due(self) -> bool:
        return self.observed >= self._refit_at

    # Predicting

    def predict(self, features: StepFeatures) -> float:
        if features.sequences == 0:
            return 0.0
        steady_s = self._steady_s(features)
        return self._corrected_s(steady_s, self._similar_class(steady_s))

    def upper(self, features: StepFeatures) -> float:
        """Return the time that 99 in 100 steps like this one stay under, if it is the next."""
        if features.sequences == 0:
            return 0.0
        steady_s = self._steady_s(features)
        similar = self._similar_class(steady_s)
        return self._corrected_s(steady_s, similar) * similar.factor

    def _steady_s(self, features: StepFeatures) -> float:
        """Return the prediction that does not depend on the last step."""
        region = self._regions.get(region_of(features))
        base_s = self._base_s(features) * self._drift
        return base_s * region.factor if region is not None else base_s

    def _corrected_s(self, steady_s: float, similar: _Class) -> float:
        return steady_s * similar.bias * (1 + self._echo_in(steady_s))

    def _echo_in(self, steady_s: float) -> float:
        # What slowed a short step says little about a long one.
        return self._echo_log if steady_s <= self._last_s else self._echo_log * self._last_s / steady_s

    def _base_s(self, features: StepFeatures) -> float:
        if not self.constants:
            return math.inf
        constant, new, kv_read, new_by_context, sequences = self.constants
        return (
            constant
            + new * features.new_tokens
            + kv_read * features.kv_read_tokens
            + new_by_context * features.new_by_context
            + sequences * features.sequences
        )

    def _similar_class(self, steady_s: float) -> _Class:
        """Return the class of a length, or of the next shorter one that was seen, whose errors are usually wider."""
        size, is_cold = self._class_key(steady_s)
        similar = self._classes.get((size, is_cold))
        while similar is None and size >= 0:
            similar = self._classes.get((size, False))
            size -= 1
        return similar or next(iter(self._classes.values()), NOTHING_SEEN)

    def _class_key(self, steady_s: float) -> tuple[int, bool]:
        # Each size is four times as long as the one before; 0 is up to a quarter of a millisecond.
        return int(min(steady_s, 1e6) * 4096).bit_length() >> 1, self._last_s > COLD_RATIO * steady_s

    # Learning

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """Learn from one step that ran; it costs microseconds. Before the first fit it only counts towards it."""
        if features.sequences == 0 or not 0 < seconds < math.inf:
            return
        region = self._region(features)
        region.kept.append((features, seconds / self._drift))
        steady_s = self._steady_s(features)
        if not 0 < steady_s < math.inf:
            return
        key = self._class_key(steady_s)
        if key not in self._classes:
            self._classes[key] = self._similar_class(steady_s).successor()
        own = self._classes[key]
        error_log = math.log(seconds / self._corrected_s(steady_s, own))
        lesson_log = _lesson(error_log)
        self._echo_log, self._last_s = ECHO * _lesson(error_log + self._echo_in(steady_s)), seconds
        self.observed += 1
        self.missed += own.learn(error_log, lesson_log)
        region.learn(lesson_log)
        rate = min(DRIFT_RATE_MAX, max(DRIFT_RATE_MIN, steady_s / DRIFT_MEMORY_S))
        self.drift_log = min(DRIFT_LOG_MAX, max(-DRIFT_LOG_MAX, self.drift_log + rate * lesson_log))
        self._drift = math.exp(self.drift_log)

    def relax(self) -> None:
        """Lower the estimates if `upper` has let nothing run for long: it may be wrong, and only steps would tell."""
        for each in self._classes.values():
            each.relax()
        self.drift_log, self._echo_log = self.drift_log / 2, 0.0
        self._drift = math.exp(self.drift_log)

    def forget(self) -> None:
        """Forget everything; the model is no longer calibrated."""
        vars(self).update(vars(LatencyModel()))

    def _region(self, features: StepFeatures) -> _Region:
        key = region_of(features)
        region = self._regions.get(key)
        if region is None:
            if len(self._regions) >= REGIONS_MAX:
                del self._regions[min(self._regions, key=lambda other: self._regions[other].seen)]
            region = self._regions[key] = _Region()
        return region

    # Fitting

    def fit(self, samples: Iterable[Sample]) -> bool:
        """Fit to the steps of a profile, in order. Return False, and stay not calibrated, if there are too few."""
        steps = [(features, seconds) for features, seconds in samples if features.sequences and 0 < seconds < math.inf]
        for features, seconds in steps:
            self._region(features).kept.append((features, seconds / self._drift))
        if not self._fit_to(steps):
            return False
        for features, seconds in steps:
            self.observe(features, seconds)
        return True

    def refit(self) -> bool:
        """Fit the constants again to steps kept from all regions. It takes milliseconds: call it while idle."""
        self._refit_at = self.observed + REFIT_EVERY
        return self._fit_to([sample for region in self._regions.values() for sample in region.kept])

    def _fit_to(self, samples: Sequence[Sample]) -> bool:
        if len(samples) < FIT_SAMPLES_MIN:
            return False
        self.constants = fit_constants(samples)
        for region in self._regions.values():
            logs = sorted(math.log(seconds / self._base_s(features)) for features, seconds in region.kept)
            middle = logs[len(logs) // 2] if logs else 0.0
            region.set(middle * len(logs) / (len(logs) + 1))  # a single step counts by half
        return True


NOTHING_SEEN = _Class()


def _lesson(error_log: float) -> float:
    clipped = min(CLIP_LOG, max(-CLIP_LOG, error_log))
    return clipped if -STALL_LOG < error_log < STALL_LOG else clipped * STALL_LOG / abs(error_log)


def region_of(features: StepFeatures) -> tuple[int, int, int]:
    """Return a shape's region: few new tokens exactly, many by octaves; sequences by octaves; context by fours."""
    new = features.new_tokens
    context = features.new_by_context // new if new else 0
    return min(new, 8 + new.bit_length()), features.sequences.bit_length(), context.bit_length() >> 1


def fit_constants(samples: Sequence[Sample]) -> tuple[float, ...]:
    """Return constants that keep relative errors small; prompts as a whole weigh as much as decoding."""
    seconds = np.array([taken_s for _, taken_s in samples])
    shapes = [(1, f.new_tokens, f.kv_read_tokens, f.new_by_context, f.sequences) for f, _ in samples]
    relative = np.array(shapes, float) / seconds[:, None]
    scale = np.maximum(np.sqrt((relative**2).sum(axis=0)), 1e-300)
    relative /= scale
    decodes = np.array([f.new_tokens == f.sequences for f, _ in samples])
    shares = np.where(decodes, 1 / max(1, decodes.sum()), 1 / max(1, (~decodes).sum()))
    weights = shares
    for _ in range(FIT_ROUNDS):
        weighted = relative * weights[:, None]
        constants = _solve_without_negatives(weighted.T @ relative, weighted.sum(axis=0))
        errors = np.abs(relative @ constants - 1)
        weights = shares * np.minimum(1.0, HUBER / np.maximum(errors, 1e-9))
    return tuple(float(constant) for constant in constants / scale)


def _solve_without_negatives(gram: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve least squares; the most negative constant is taken as zero and the rest is solved again."""
    used = np.diag(gram) > 0
    # Features that only ever vary together share their cost, rather than cancel each other.
    gram = gram + 1e-9 * np.trace(gram) * np.eye(len(gram))
    while True:
        solved = np.zeros(len(target))
        solved[used] = np.linalg.solve(gram[np.ix_(used, used)], target[used])
        if (solved >= 0).all():
            return solved
        used[np.argmin(solved)] = False
