"""What was learnt of a device's serving side: prompts, own times, bursts, and the share of time that prompts take.

With the step times of the latency models it is all that admission relies on. It is kept apart from the decisions, so
that it outlives them: an engine that is started again begins with a snapshot of what the engine before it had learnt.
A snapshot holds the worst of everything, which is all that a safe decision needs; what is usual is learnt again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rose.core.bursts import BurstReserve, Rise
from rose.core.facts import StepFeatures
from rose.core.latency import LatencyModel
from rose.core.slo import PROMPT_TOKENS_UNKNOWN, OwnGaps, OwnTimes, RecentValues

WAIT_SHARE = 0.5  # of the margin of the TTFT budget that a request may wait for a slot; the rest is for lent steps
STEPS_EVERY = 256  # arrivals, after which step times are looked up again
DRAG_ANSWERS = 100
GOLDEN_RATIO = 0.6180339887  # its multiples spread evenly
WORST_KEPT = 16  # samples of each kind in a snapshot


@dataclass(frozen=True, slots=True)
class HistorySnapshot:
    observed_s: float
    slots: tuple[int, ...]  # arrivals, and those that count against each threshold (`core.bursts.SlotThresholds`)
    token_rises: tuple[int, ...]
    first_tokens: tuple[float, ...]
    gaps: tuple[tuple[float, ...], ...]  # for each class of lengths
    prompt_tokens: int
    answer_s: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class ServingTimes:
    """Serving's times now, over the last thousand requests, and what lending adds to them, in seconds."""

    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    ttft_p50_added_s: float
    ttft_p99_added_s: float
    tpot_p50_added_s: float
    tpot_p99_added_s: float


class ServingHistory:
    """One per device. The SLO accountant fills it as requests arrive and end."""

    def __init__(self, ttft_s: float, slots: int, spare: int = 0) -> None:
        self.prompts = RecentValues(PROMPT_TOKENS_UNKNOWN)
        self.first_tokens = OwnTimes()  # seconds to the first token, without what was lent
        self.gaps = OwnGaps()  # mean seconds between a request's tokens, without what was lent
        self.seen_first_tokens, self.seen_gaps = RecentValues(0.0), RecentValues(0.0)  # the same with what was lent
        self.answers = RecentValues(0.0)  # seconds that whole answers took, without what was lent
        self.bursts = BurstReserve(ttft_s, slots, spare)
        self._ttft_s = ttft_s
        self.lengths = RecentValues(0.0)  # tokens of answers
        self.decode_step_s: Callable[[int], float] | None = None  # of so many requests
        self._drag = 1.0  # by which tokens take longer than decode steps, on average over the last hundred answers
        self._is_seeded = False
        self._quantile = 0.0
        self._until_steps = 0

    def on_arrival(self, prompt_tokens: int, at_s: float, ages_s: Sequence[float] = ()) -> Rise:
        """Count a request; `ages_s` are the own times so far of the requests that are here."""
        self.prompts.observe(prompt_tokens)
        self.bursts.window_s = max(self._ttft_s, self.answers.quantile(0.5))
        self.bursts.wait_s = WAIT_SHARE * self.first_tokens.margin_s(self._ttft_s)
        self._learn_steps()
        return self.bursts.on_arrival(prompt_tokens, self._output_tokens(ages_s), at_s)

    def _output_tokens(self, ages_s: Sequence[float]) -> float | None:
        """Return how many tokens another answer may have; None if nothing is known.

        Each call returns another quantile, so that few calls cover all. The longest answers take long to end, so those
        that are here and longer than nearly all that ended count too: as half through, which is usual.
        """
        self._quantile = (self._quantile + GOLDEN_RATIO) % 1.0
        if not len(self.lengths):
            return None
        gap_s, longest = self.gaps.quantile(0.5), self.lengths.typical
        long = [2 * age_s / gap_s for age_s in ages_s if age_s > longest * gap_s] if gap_s else []
        number = int(self._quantile * (len(self.lengths) + len(long)))
        if number < len(long):
            return long[number]
        return self.lengths.quantile((number - len(long) + 1) / len(self.lengths))

    def _learn_steps(self) -> None:
        """Update what a token takes beside so many requests: a decode step, and other requests' prompts."""
        self._until_steps -= 1
        if self.decode_step_s is not None and self._until_steps <= 0:
            self._until_steps = STEPS_EVERY
            decode_step_s, drag = self.decode_step_s, self._drag
            self.bursts.thresholds.set_steps(lambda count: drag * decode_step_s(count))

    def on_departure(self, prompt_tokens: int, at_s: float) -> None:
        self.bursts.on_departure(prompt_tokens, at_s)

    def seed(self, first_token_s: float, gap_s: float) -> None:
        """Take what a step profile says, before the first request has ended; once."""
        if not self._is_seeded:
            self._is_seeded = True
            self.first_tokens.seed_s = first_token_s
            self.gaps.seed(gap_s)

    def on_first_token(self, taken_s: float, own_s: float | None) -> None:
        """Learn from a first token; `own_s` None if it may have waited for what delayed requests held."""
        self.seen_first_tokens.observe(taken_s)
        if own_s is not None:
            self.first_tokens.observe(max(0.0, own_s))

    def on_answer(self, tokens: int, gap_s: float, gap_lent_s: float, answer_s: float, here: int) -> None:
        """Learn from an answer: the mean gap between its tokens, what was lent of it, its own time, how many ran."""
        own_s = max(0.0, gap_s - gap_lent_s)
        self.seen_gaps.observe(gap_s)
        self.gaps.observe(own_s, tokens)
        self.answers.observe(max(0.0, answer_s))
        step_s = self.decode_step_s(here) if self.decode_step_s is not None else 0.0
        if step_s > 0:
            self._drag += (max(1.0, own_s / step_s) - self._drag) / DRAG_ANSWERS

    @property
    def times(self) -> ServingTimes:
        with_it = [seen.quantile(share) for seen in (self.seen_first_tokens, self.seen_gaps) for share in (0.5, 0.99)]
        without = [own.quantile(share) for own in (self.first_tokens, self.gaps) for share in (0.5, 0.99)]
        added = [max(0.0, seen_s - own_s) for seen_s, own_s in zip(with_it, without, strict=True)]
        return ServingTimes(len(self.seen_first_tokens), *with_it, *added)

    def snapshot(self, now_s: float) -> HistorySnapshot:
        return HistorySnapshot(
            self.bursts.observed_s(now_s),
            self.bursts.thresholds.snapshot(),
            self.bursts.largest_rises(WORST_KEPT),
            self.first_tokens.largest(WORST_KEPT),
            self.gaps.largest(WORST_KEPT),
            int(self.prompts.typical),
            self.answers.typical,
            self.lengths.typical,
        )

    def restore(self, before: HistorySnapshot, now_s: float) -> None:
        """Begin with what another engine of this device had learnt."""
        self._is_seeded = True
        self.bursts.restore(before.observed_s, before.slots, before.token_rises, now_s)
        for seconds in before.first_tokens:
            self.first_tokens.observe(seconds)
        self.gaps.restore(before.gaps)
        self.prompts.observe(before.prompt_tokens)
        self.answers.observe(before.answer_s)
        if before.output_tokens:
            self.lengths.observe(before.output_tokens)


class PrefillDemand:
    """The share of the last window that prompts took. Report every serving step.

    A delayed answer costs little where decode steps have room for more requests. But the answers still to be decoded
    make every step with prompts longer, and where prompts take most of the time, what was lent comes back as a longer
    queue. So the time of steps with prompts is added up, beyond what the same steps take without them. The past is
    forgotten exponentially, over the time that a first token may take.
    """

    def __init__(self, model: LatencyModel, window_s: float) -> None:
        self._model, self._window_s = model, window_s
        self._work_s, self._at_s = 0.0, -math.inf

    def on_step(self, features: StepFeatures, seconds: float, end_s: float) -> None:
        sequences, read = features.sequences, features.kv_read_tokens
        work_s = 0.0
        if features.new_tokens > sequences and self._model.is_calibrated:
            work_s = max(0.0, seconds - self._model.predict(StepFeatures(sequences, read, read, sequences)))
        self._work_s = self._left_s(end_s) + work_s
        self._at_s = max(self._at_s, end_s)

    def share(self, now_s: float) -> float:
        return self._left_s(now_s) / self._window_s

    def _left_s(self, now_s: float) -> float:
        return self._work_s * math.exp(-max(0.0, now_s - self._at_s) / self._window_s)
