"""Deadlines of serving, and the slack that lending can take.

A request has a deadline for its first token and a pace for the later ones. When serving alone would meet them is
predicted from a `ServingView` as serving would run it: prompts first come first served, in chunks that fill a step
beside one token of every running request. Every time is an upper estimate, so slack errs on the safe side.

By default the pace is a request's *mean* time per token, as load generators measure it: token k is due k paces after
the first one, so a request ahead of its schedule has credit, and the credit of a few tokens pays for one efficient
rollout step. With `every_gap` each gap between two tokens has the deadline on its own.

What serving itself needs is learnt from requests that ended (`OwnTimes`): lending may delay requests only by so much
that hardly any of the last thousand, delayed by as much, would have missed its budget. The length of an answer is not
known in advance, so a whole answer has no deadline; but lending takes no more time from one that has taken long.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rose.core.facts import ServingView, StepFeatures
from rose.core.latency import LatencyModel
from rose.errors import ConfigError

Tpot = Literal["mean", "every_gap"]

NEWEST_KEPT, TYPICAL_QUANTILE = 1000, 0.99
PROMPT_TOKENS_UNKNOWN = 512  # before the first prompt has come
# This share of the last requests may come within one lent delay of the budget. About half of them meet a lent step, and
# on average half of its length: so lending loses less than one request in a thousand to what it could not foresee.
AT_RISK_SHARE = 0.002
SEEDED_UNTIL = 50  # requests; after so many, what they took says more than the start-up profile
LENGTH_CLASSES = 5  # of answers: 1, 2 to 7, 8 to 31, 32 to 127, and more tokens


@dataclass(frozen=True, slots=True)
class Budgets:
    """What serving has promised. `slack_share` scales the budgets, never what is left of them.

    `answer_s` is how long users wait for a whole answer, from its arrival to the last token, if they give up at all.
    `tpot` says whether `tpot_s` is promised for a request's mean time per token or for every gap between two tokens.
    """

    ttft_s: float
    tpot_s: float
    slack_share: float = 0.7
    answer_s: float = math.inf
    tpot: Tpot = "mean"

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if not 0 < value < math.inf:
                raise ConfigError(f"budget {name} must be above 0 and finite, got {value}", hint="give seconds above 0")
        if not self.answer_s > 0:
            raise ConfigError(f"answer_s must be above 0, got {self.answer_s}", hint="give seconds above 0")
        if not 0 < self.slack_share <= 1:
            raise ConfigError(
                f"slack_share must be above 0 and at most 1, got {self.slack_share}; it is the share of a budget that "
                "lending may use up",
                hint="choose between 0.5 and 0.85; 0.7 is the default",
            )


class RecentValues:
    """The newest values of a quantity and their quantiles. An update costs a search and a short move of memory."""

    def __init__(self, unknown: float, kept: int = NEWEST_KEPT) -> None:
        self._unknown = unknown  # before the first value
        self._kept = kept
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, value: float) -> None:
        if len(self._newest) == self._kept:
            del self._sorted[bisect.bisect_left(self._sorted, self._newest.popleft())]
        self._newest.append(value)
        bisect.insort(self._sorted, value)

    def __len__(self) -> int:
        return len(self._newest)

    @property
    def typical(self) -> float:
        return self.quantile(TYPICAL_QUANTILE)

    def quantile(self, share: float) -> float:
        return self._sorted[max(0, math.ceil(share * len(self._sorted)) - 1)] if self._sorted else self._unknown

    def all_but(self, share: float) -> float:
        """Return the value that at most this share of them exceeds."""
        return self._sorted[-1 - int(share * len(self._sorted))] if self._sorted else self._unknown

    def largest(self, count: int) -> tuple[float, ...]:
        """Return the largest values: all that a restarted engine needs for its reserves."""
        return tuple(self._sorted[-count:])


class OwnTimes(RecentValues):
    """Seconds that serving itself took, without what was lent, for the last thousand requests.

    On a slow device most of it is other requests' prompts between two tokens, known only when the request ends.
    """

    def __init__(self) -> None:
        super().__init__(0.0)
        self.seed_s = 0.0  # counts as one of them until `SEEDED_UNTIL` are known

    def margin_s(self, budget_s: float) -> float:
        """Return the largest delay that would have made hardly any of them miss this budget.

        Requests that missed it by themselves do not count: lending cannot lose them.
        """
        within_budget = bisect.bisect_right(self._sorted, budget_s)
        nearest = within_budget - 1 - int(AT_RISK_SHARE * len(self._sorted))
        own_s = self._sorted[nearest] if nearest >= 0 else 0.0
        if len(self._sorted) < SEEDED_UNTIL and own_s < self.seed_s <= budget_s:
            own_s = self.seed_s
        return budget_s - own_s


class OwnGaps:
    """Mean seconds per token that serving itself took, by the length of the answer.

    One prompt between the two tokens of a short answer takes most of its budget; in a long answer it hardly shows. So
    the margin of a request with k tokens is that of the answers that reached at least k.
    """

    def __init__(self) -> None:
        self._by_class = tuple(OwnTimes() for _ in range(LENGTH_CLASSES))

    def observe(self, own_s: float, tokens: int) -> None:
        for times in self._by_class[: length_class(tokens) + 1]:
            times.observe(own_s)

    def seed(self, own_s: float) -> None:
        for times in self._by_class:
            times.seed_s = own_s

    def margins_s(self, budget_s: float) -> list[float]:
        """Return the margin for each length class."""
        return [times.margin_s(budget_s) for times in self._by_class]

    def quantile(self, share: float) -> float:
        return self._by_class[0].quantile(share)

    def largest(self, count: int) -> tuple[tuple[float, ...], ...]:
        return tuple(times.largest(count) for times in self._by_class)

    def restore(self, largest: Sequence[Sequence[float]]) -> None:
        for times, values_s in zip(self._by_class, largest, strict=False):
            for value_s in values_s:
                times.observe(value_s)


def length_class(tokens: int) -> int:
    """Return the class of answers with so many tokens; each class begins at four times the length of the last one."""
    return min(tokens.bit_length() >> 1, LENGTH_CLASSES - 1)


@dataclass(frozen=True, slots=True)
class ServingOutlook:
    """What serving alone would do from now on, by upper estimates.

    The cost of a chunk is taken as linear between a step that only decodes and a full one, which needs two predictions
    however long the queue is.
    """

    waiting_tokens: int
    decode_step_s: float  # one token for every running request
    full_step_s: float  # the same with as many prompt tokens as a step takes
    step_tokens: int

    def prefill_s(self, tokens: int) -> float:
        """Return the time until this many prompt tokens are computed, beside decoding."""
        whole, rest = divmod(tokens, self.step_tokens)
        seconds = whole * self.full_step_s
        if rest:
            seconds += self.decode_step_s + (self.full_step_s - self.decode_step_s) * rest / self.step_tokens
        return seconds

    @property
    def next_step_s(self) -> float:
        tokens = min(self.waiting_tokens, self.step_tokens)
        return self.prefill_s(tokens) if tokens else self.decode_step_s

    def next_ttft_s(self, typical_tokens: int) -> float:
        """Return the time to first token of a typical request that arrives now."""
        return self.prefill_s(self.waiting_tokens + typical_tokens)


def look_ahead(view: ServingView, model: LatencyModel, step_tokens: int, typical_tokens: int) -> ServingOutlook:
    """Predict what serving alone would do next, with prompts of typical length."""
    decodes = len(view.running)
    context = sum([request.context_tokens for request in view.running])
    prompts = [request.tokens_left for request in view.waiting]
    decode = StepFeatures(decodes, context + decodes, context + decodes, decodes)
    chunk = max(1, step_tokens - decodes)
    longest = max(typical_tokens, *prompts) if prompts else typical_tokens
    depth = max(0, longest - chunk) // 2  # tokens in front of a chunk, on average over the longest prompt
    full = StepFeatures(
        decodes + chunk,
        context + decodes + depth + chunk,
        context + decodes + chunk * depth + chunk * (chunk + 1) // 2,
        decodes + 1,
    )
    decode_s, full_s = model.upper(decode), model.upper(full)
    return ServingOutlook(sum(prompts), decode_s, max(decode_s, full_s), chunk)


def waiting_ttfts_s(view: ServingView, outlook: ServingOutlook, now_s: float) -> list[float]:
    """Return the time to first token of every waiting request; prompts that share a step get theirs together."""
    step_tokens, full_s, total_tokens = outlook.step_tokens, outlook.full_step_s, outlook.waiting_tokens
    last_s = outlook.prefill_s(total_tokens)
    ttfts_s, tokens = [], 0
    for request in view.waiting:
        tokens += request.tokens_left
        steps = -(-tokens // step_tokens)
        prefill_s = steps * full_s if steps * step_tokens < total_tokens else last_s
        ttfts_s.append(now_s - request.arrival_s + prefill_s)
    return ttfts_s


def prefill_slack_s(view: ServingView, outlook: ServingOutlook, ttft_s: float, now_s: float) -> float:
    """Return the least that a waiting request can spare of this budget."""
    return ttft_s - max(waiting_ttfts_s(view, outlook, now_s), default=-math.inf)


def decode_slack_s(view: ServingView, pace_s: float, step_s: float, now_s: float) -> float:
    """Return the least that a running request can spare: its next token takes a step, due `pace_s` after the last."""
    return min([request.last_token_s for request in view.running], default=math.inf) + pace_s - now_s - step_s


def credit_s(view: ServingView, paces_s: Sequence[float], step_s: float, now_s: float) -> float:
    """Return the same if token k is due k paces after the first one; `paces_s` has a pace for each length class."""
    last = LENGTH_CLASSES - 1
    due_s = [
        request.first_token_s + request.tokens * paces_s[min(request.tokens.bit_length() >> 1, last)]
        for request in view.running
    ]
    return min(due_s, default=math.inf) - now_s - step_s


def answer_slack_s(view: ServingView, age_s: float, answer_s: float, now_s: float) -> float:
    """Return the time until a running request is `age_s` old; clients that wait beyond `answer_s` are patient."""
    if age_s == math.inf or not view.running:
        return math.inf
    arrivals_s = [request.arrival_s for request in view.running]
    oldest_s = min(arrivals_s)
    if now_s - oldest_s >= answer_s:
        oldest_s = min([arrival_s for arrival_s in arrivals_s if now_s - arrival_s < answer_s], default=math.inf)
    return oldest_s + age_s - now_s
