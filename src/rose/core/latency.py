"""How long a step will take, and how long at most, from its shape alone; one model per (model, device).

    prediction = drift x region's factor x (constant + new tokens + KV read + new x context + sequences), none negative
    upper      = prediction x exp(multiple x spread)

The five constants are fitted to the steps of a start-up profile, on relative errors, with outliers weighing less, and
again now and then to a few recent steps of every kind, so that a thousand decodes do not drown ten prompts. What five
constants cannot say (tiles of rows, cache sizes) is said by a factor per region of shapes, learnt slowly. What hits
every shape alike (another process, a warm core) is the drift, followed within tens of steps. All of it learns from
clipped errors: a process stopped for 50 ms teaches no more than a step that was a fifth too long.

The upper estimate is online conformal prediction. The spread is the mean recent error of steps of about this length, so
it widens at once when the device becomes restless. The multiple rises by a notch after a miss and falls by a hundredth
of one after a hit, so that in the long run 99 steps in 100 are covered, whatever the errors look like.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rose.core.facts import StepFeatures

MISSES_WANTED = 0.007  # a little under the 1 % that is promised
FIT_SAMPLES_MIN = 16  # five constants and something to judge them by
FIT_ROUNDS = 20
HUBER = 0.05  # relative errors beyond this weigh less in a fit: most are another process on the machine
CLIP_LOG = 0.2  # of log(actual / predicted) that a single step can teach
DRIFT_MEMORY_S = 0.03  # disturbances of a shared machine last some tens of milliseconds
DRIFT_RATE_MIN, DRIFT_RATE_MAX = 1 / 16, 1 / 2  # a short step is mostly noise; a long one is news, but not all of it
DRIFT_LOG_MAX = math.log(16.0)  # a device slower than this is not drifting; it misses and widens
REGION_RATE_MIN = 1 / 32  # regions are properties of the code: they move slowly
REGION_DOUBT = 4.0  # the first steps of a region count as if so many had been seen before
SPREAD_RATE = 1 / 16
SPREAD_MIN = 0.01  # clocks and interrupts alone make this much
SPREAD_START = 0.05
MULTIPLE_START = 3.0
NOTCH_LOG = 0.07  # what a miss raises the multiple by: more is quicker and overshoots
MARGIN_LOG_MAX = 7.0  # a thousand times the prediction: a short step on a device that is often stopped
KEPT_PER_REGION = 4
REGIONS_MAX = 256  # 1,024 steps at most, which keeps a refit at a few milliseconds
REFIT_EVERY = 2048
PROFILE_TOKENS_MAX = 2048  # of prompts in one batch of a profile

RAISE, LOWER = math.exp(NOTCH_LOG * (1 - MISSES_WANTED)), math.exp(-NOTCH_LOG * MISSES_WANTED)
Sample = tuple[StepFeatures, float]


@dataclass(frozen=True, slots=True)
class ProfileShape:
    """One batch of a start-up profile: prompts of this length, prefilled in chunks, then some decode steps."""

    requests: int
    context_tokens: int
    new_tokens: int  # the most one of its steps computes
    decode_steps: int


def profile_plan(max_step_tokens: int, max_sequences: int, max_context_tokens: int) -> list[ProfileShape]:
    """What to run at start-up: small to large in each feature, decodes and chunks of prompts; 16,000 prompt tokens."""
    plan: list[ProfileShape] = []
    for context in (16, 128, 512, PROFILE_TOKENS_MAX):
        for requests in _spread(max_sequences):
            if requests * context <= PROFILE_TOKENS_MAX and context + 16 < max_context_tokens:
                chunk = max(requests, max_step_tokens >> (len(plan) % 4))
                plan.append(ProfileShape(requests, context, chunk, decode_steps=6))
    return plan


def _spread(most: int) -> list[int]:
    return sorted({min(most, count) for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, most)})


@dataclass(slots=True)
class _Region:
    """Shapes that are alike: how far off the constants are there, and its newest steps, as without drift."""

    log_factor: float = 0.0
    factor: float = 1.0
    seen: int = 0
    kept: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT_PER_REGION))

    def learn(self, error_log: float) -> None:
        self.seen += 1
        self.set(self.log_factor + error_log * max(REGION_RATE_MIN, 1 / (self.seen + REGION_DOUBT)))

    def set(self, log_factor: float) -> None:
        self.log_factor, self.factor = log_factor, math.exp(log_factor)


@dataclass(slots=True)
class _Margin:
    """Steps of about one length: how wide their errors are, and how many spreads the upper estimate takes."""

    spread: float = SPREAD_START
    multiple: float = MULTIPLE_START
    factor: float = math.exp(SPREAD_START * MULTIPLE_START)

    def judge(self, error_log: float) -> bool:
        """Learn from one step; True if it missed."""
        is_miss = error_log > min(MARGIN_LOG_MAX, self.spread * self.multiple)
        self.multiple = max(1.0, self.multiple * (RAISE if is_miss else LOWER))
        self.spread = max(SPREAD_MIN, self.spread + SPREAD_RATE * (min(CLIP_LOG, abs(error_log)) - self.spread))
        self.multiple = min(self.multiple, MARGIN_LOG_MAX / self.spread)
        self.factor = math.exp(self.spread * self.multiple)
        return is_miss


class LatencyModel:
    """Give `fit` the profile's steps and `observe` every later one; ask `predict` and `upper`, infinite until then."""

    def __init__(self, constants: Sequence[float] | None = None) -> None:
        self.constants: tuple[float, ...] = tuple(constants) if constants is not None else ()
        assert not self.constants or (len(self.constants) == 5 and min(self.constants) >= 0), constants
        self.drift_log = 0.0
        self.observed = self.missed = 0
        self._drift = 1.0
        self._regions: dict[tuple[int, int, int], _Region] = {}
        self._margins: dict[int, _Margin] = {}
        self._refit_at = REFIT_EVERY

    @property
    def is_calibrated(self) -> bool:
        return bool(self.constants)

    # Asking

    def predict(self, features: StepFeatures) -> float:
        if features.sequences == 0:
            return 0.0
        region = self._regions.get(_region_of(features))
        base_s = self._base_s(features) * self._drift
        return base_s * region.factor if region is not None else base_s

    def upper(self, features: StepFeatures) -> float:
        """What 99 in 100 steps like this one stay under."""
        predicted_s = self.predict(features)
        return predicted_s * self._margin(predicted_s).factor

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

    # Learning

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """One step that ran; it costs microseconds. Before the first fit it only counts towards it."""
        if features.sequences == 0 or not 0 < seconds < math.inf:
            return
        region = self._region(features)
        region.kept.append((features, seconds / self._drift))
        predicted_s = self.predict(features)
        if 0 < predicted_s < math.inf:
            self._learn(region, predicted_s, math.log(seconds / predicted_s))

    def _learn(self, region: _Region, predicted_s: float, error_log: float) -> None:
        self.observed += 1
        self.missed += self._own_margin(predicted_s).judge(error_log)
        clipped = min(CLIP_LOG, max(-CLIP_LOG, error_log))
        region.learn(clipped)
        rate = min(DRIFT_RATE_MAX, max(DRIFT_RATE_MIN, predicted_s / DRIFT_MEMORY_S))
        self.drift_log = min(DRIFT_LOG_MAX, max(-DRIFT_LOG_MAX, self.drift_log + rate * clipped))
        self._drift = math.exp(self.drift_log)

    def _region(self, features: StepFeatures) -> _Region:
        key = _region_of(features)
        region = self._regions.get(key)
        if region is None:
            if len(self._regions) >= REGIONS_MAX:
                del self._regions[min(self._regions, key=lambda other: self._regions[other].seen)]
            region = self._regions[key] = _Region()
        return region

    def _margin(self, predicted_s: float) -> _Margin:
        """A length that was not seen yet has the margin of the next shorter one, which is the wider as a rule."""
        size = _size_of(predicted_s)
        while size > 0 and size not in self._margins:
            size -= 1
        return self._margins.get(size) or (next(iter(self._margins.values())) if self._margins else _Margin())

    def _own_margin(self, predicted_s: float) -> _Margin:
        size = _size_of(predicted_s)
        if size not in self._margins:
            like = self._margin(predicted_s)
            self._margins[size] = _Margin(like.spread, like.multiple, like.factor)
        return self._margins[size]

    # Fitting

    @property
    def is_refit_due(self) -> bool:
        return self.observed >= self._refit_at

    def fit(self, samples: Iterable[Sample]) -> bool:
        """Take a profile's steps, in order. False, and not calibrated, if there are too few of them."""
        steps = [(features, seconds) for features, seconds in samples if features.sequences and 0 < seconds < math.inf]
        for features, seconds in steps:
            self._region(features).kept.append((features, seconds / self._drift))
        if not self._fit_to(steps):
            return False
        for features, seconds in steps:
            self.observe(features, seconds)
        return True

    def refit(self) -> bool:
        """Fit the constants again to steps kept from all regions. Milliseconds: call it when nobody waits."""
        self._refit_at = self.observed + REFIT_EVERY
        return self._fit_to([sample for region in self._regions.values() for sample in region.kept])

    def _fit_to(self, samples: Sequence[Sample]) -> bool:
        if len(samples) < FIT_SAMPLES_MIN:
            return False
        self.constants = _fit(samples)
        for region in self._regions.values():
            logs = sorted(math.log(seconds / self._base_s(features)) for features, seconds in region.kept)
            middle = logs[len(logs) // 2] if logs else 0.0
            region.set(middle * len(logs) / (len(logs) + 1))  # a lonely step is believed by half
        return True


def _size_of(predicted_s: float) -> int:
    """Each size is four times as long as the one before; 0 is up to a quarter of a millisecond."""
    return int(min(predicted_s, 1e6) * 4096).bit_length() >> 1


def _region_of(features: StepFeatures) -> tuple[int, int, int]:
    """Few new tokens exactly, many by octaves; sequences by octaves; context by factors of four."""
    new = features.new_tokens
    context = features.new_by_context // new if new else 0
    return min(new, 8 + new.bit_length()), features.sequences.bit_length(), context.bit_length() >> 1


def _fit(samples: Sequence[Sample]) -> tuple[float, ...]:
    """Constants that keep relative errors small; prompts as a whole weigh as much as decoding."""
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
        constants = _without_negatives(weighted.T @ relative, weighted.sum(axis=0))
        errors = np.abs(relative @ constants - 1)
        weights = shares * np.minimum(1.0, HUBER / np.maximum(errors, 1e-9))
    return tuple(float(constant) for constant in constants / scale)


def _without_negatives(gram: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares; the constant that comes out most negative is taken as zero and the rest is solved again."""
    used = np.diag(gram) > 0
    # Features that only ever vary together share their cost, rather than cancel each other.
    gram = gram + 1e-9 * np.trace(gram) * np.eye(len(gram))
    while True:
        solved = np.zeros(len(target))
        solved[used] = np.linalg.solve(gram[np.ix_(used, used)], target[used])
        if (solved >= 0).all():
            return solved
        used[np.argmin(solved)] = False
