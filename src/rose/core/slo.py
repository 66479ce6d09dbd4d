"""Deadlines of serving, and how far away they are: what lending time can be taken from.

A request has a deadline for its first token and one for every later token. How soon serving would reach them by itself
is worked out from a `ServingView` as serving would run it: prompts first come first served, in chunks that fill a
step beside one token of every running request. Every time is an upper estimate, so slack errs on the safe side.

Tokens that all come in time may still add up to an answer that takes a minute where it took seconds, and proxies and
clients give up on those. How long an answer will be nobody knows, so this cannot be a deadline; but lending can stop
taking time from an answer that has taken long already.

A chunk's cost is taken as linear between a step that only decodes and a full one, which needs two predictions however
long the queue is; that requests begin to decode while later ones wait is left to the upper estimate's margin. Nobody
knows the next request, nor what is still to come between the tokens of those that run, nor how long serving itself
will be at an answer; all are taken as the P99 of the last thousand.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass

from rose.core.facts import ServingView, StepFeatures
from rose.core.latency import LatencyModel
from rose.errors import ConfigError

NEWEST_KEPT, TYPICAL_QUANTILE = 1000, 0.99
PROMPT_TOKENS_UNKNOWN = 512  # before the first prompt has come


@dataclass(frozen=True, slots=True)
class Budgets:
    """What serving has promised. `slack_share` scales the budgets, never what is left of them.

    `answer_s` is how long users wait for a whole answer, from its arrival to the last token, if they give up at all.
    """

    ttft_s: float
    tpot_s: float
    slack_share: float = 0.7
    answer_s: float = math.inf

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if not 0 < value < math.inf:
                raise ConfigError(f"budget {name} is {value}, which no request can meet", hint="give seconds above 0")
        if not self.answer_s > 0:
            raise ConfigError(f"answer_s is {self.answer_s}, and no answer takes no time", hint="give seconds above 0")
        if not 0 < self.slack_share <= 1:
            raise ConfigError(
                f"slack_share is {self.slack_share}; it is the part of a budget that lending may use up",
                hint="choose between 0.5 and 0.85; 0.7 is the default",
            )


class Newest:
    """The P99 of the last thousand of something. A search and a short move of memory for each."""

    def __init__(self, unknown: float) -> None:
        self._unknown = unknown  # before the first
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, value: float) -> None:
        if len(self._newest) == NEWEST_KEPT:
            del self._sorted[bisect.bisect_left(self._sorted, self._newest.popleft())]
        self._newest.append(value)
        bisect.insort(self._sorted, value)

    @property
    def typical(self) -> float:
        if not self._sorted:
            return self._unknown
        return self._sorted[math.ceil(TYPICAL_QUANTILE * len(self._sorted)) - 1]


class PromptLengths(Newest):
    """Tokens of prompts that came."""

    def __init__(self, unknown_tokens: int = PROMPT_TOKENS_UNKNOWN) -> None:
        super().__init__(unknown_tokens)

    @property
    def typical_tokens(self) -> int:
        return int(self.typical)


class OwnGaps(Newest):
    """Mean seconds between a request's tokens, without what was lent: how much of the budget serving itself needs.

    Others' prompts are most of it: they come between two tokens, whenever they come. What they took is not known of a
    request before it ends, and lending that had used up its budget by then would have made it miss.
    """

    def __init__(self) -> None:
        super().__init__(0.0)


class OwnAnswers(Newest):
    """Seconds that whole answers took, without what was lent."""

    def __init__(self) -> None:
        super().__init__(0.0)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What serving alone would do from now on, by upper estimates."""

    waiting_tokens: int
    decode_step_s: float  # one token for every running request
    full_step_s: float  # and as much of prompts as a step takes
    step_tokens: int

    def prefill_s(self, tokens: int) -> float:
        """Until this many prompt tokens are computed, beside decoding."""
        whole, rest = divmod(tokens, self.step_tokens)
        seconds = whole * self.full_step_s
        if rest:
            seconds += self.decode_step_s + (self.full_step_s - self.decode_step_s) * rest / self.step_tokens
        return seconds

    @property
    def next_step_s(self) -> float:
        if self.waiting_tokens == 0:
            return self.decode_step_s
        return self.prefill_s(min(self.waiting_tokens, self.step_tokens))

    def next_ttft_s(self, typical_tokens: int) -> float:
        """Of a typical request that comes now."""
        return self.prefill_s(self.waiting_tokens + typical_tokens)


def look_ahead(view: ServingView, model: LatencyModel, step_tokens: int, typical_tokens: int) -> Outlook:
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
    return Outlook(sum(prompts), decode_s, max(decode_s, full_s), chunk)


def waiting_ttfts_s(view: ServingView, outlook: Outlook, now_s: float) -> list[float]:
    """Of every waiting request, first come first served. Prompts that share a step get their first tokens together."""
    step_tokens, full_s, total_tokens = outlook.step_tokens, outlook.full_step_s, outlook.waiting_tokens
    last_s = outlook.prefill_s(total_tokens)
    found, tokens = [], 0
    for request in view.waiting:
        tokens += request.tokens_left
        steps = -(-tokens // step_tokens)
        prefill_s = steps * full_s if steps * step_tokens < total_tokens else last_s
        found.append(now_s - request.arrival_s + prefill_s)
    return found


def prefill_slack_s(view: ServingView, outlook: Outlook, ttft_s: float, now_s: float) -> float:
    """What the waiting request that is worst off can spare of this budget."""
    return ttft_s - max(waiting_ttfts_s(view, outlook, now_s), default=-math.inf)


def decode_slack_s(view: ServingView, outlook: Outlook, tpot_s: float, now_s: float) -> float:
    """What the running request whose newest token is oldest can spare before its next one, of this budget."""
    if not view.running:
        return math.inf
    return _oldest_token_s(view) + tpot_s - now_s - outlook.next_step_s


def arrival_slack_s(view: ServingView, outlook: Outlook, tpot_s: float, typical_tokens: int, now_s: float) -> float:
    """The same if a typical prompt comes meanwhile and its first chunk shares the next step.

    Infinite where that step alone is longer than the budget: serving by itself would miss it too.
    """
    step_s = outlook.prefill_s(min(outlook.waiting_tokens + typical_tokens, outlook.step_tokens))
    if not view.running or step_s >= tpot_s:
        return math.inf
    return _oldest_token_s(view) + tpot_s - now_s - step_s


def answer_slack_s(view: ServingView, age_s: float, answer_s: float, now_s: float) -> float:
    """Until the first of the running requests is so old. Who is older than `answer_s` still waits, and is patient."""
    if age_s == math.inf or not view.running:
        return math.inf
    arrivals_s = [request.arrival_s for request in view.running]
    oldest_s = min(arrivals_s)
    if now_s - oldest_s >= answer_s:
        oldest_s = min([arrival_s for arrival_s in arrivals_s if now_s - arrival_s < answer_s], default=math.inf)
    return oldest_s + age_s - now_s


def _oldest_token_s(view: ServingView) -> float:
    return min([request.last_token_s for request in view.running])
