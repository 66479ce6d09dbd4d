"""Whether lending kept its promise: what each request lost to it, and every breach with its cause.

A lent step longer than its upper estimate is a breach of its own. A missed deadline is a breach if serving alone would
have met it. What serving alone would have done cannot be observed, so it is bounded from both sides:

- At most, it is the request's own time less the time lent in front of it: from its arrival to its first token, and
  before its arrival since prompts last stopped waiting; for its later tokens, from the first to the last. If that meets
  the budget, the miss is a breach of `ttft` or `tpot`.
- At least: requests beside it might not have been there, because lending made them live longer. For a first token,
  steps would have been shorter by what those requests added (`slowdown`), and if slots or KV memory were short, it
  would have had its own earlier, by no more than what was lent in the life of a request in front of it. For later
  tokens, a life that is longer by a share meets up to that share more prompts and requests, its own share or that of
  the requests beside it. If even this bound misses the budget, serving alone missed it too.

Otherwise the miss is *ambiguous*. It counts as lost, in the breaker and on the bill. A request that is cancelled
between tokens counts as much as one that ends: a stop string ends a request by cancelling it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rose.core.bursts import Rise
from rose.core.history import ServingHistory
from rose.core.slo import Budgets

Kind = Literal["step", "ttft", "tpot", "ambiguous"]
KINDS: tuple[Kind, ...] = ("step", "ttft", "tpot", "ambiguous")
STEPS_KEPT = 256  # enough to find those that ran after the oldest arrival that is not reported yet


@dataclass(frozen=True, slots=True)
class Breach:
    """A missed objective: `actual_s` exceeded `limit_s`; of it, `lent_s` was lent to rollouts."""

    objective: Kind
    cause: str
    at_s: float
    limit_s: float
    actual_s: float
    lent_s: float
    request_id: str = ""


@dataclass(slots=True)
class _Account:
    """One request. `lent_*` are readings of the total lent time."""

    arrival_s: float
    prompt_tokens: int
    rise: Rise
    lent_before_s: float  # at its arrival
    lent_mark_s: float  # when what counts for its next deadline began
    company_s: float  # the most that was lent, before that, in the life of a request that was here
    company_share: float  # of the time that all requests had been here when it came, the part that was not lent
    first_token_s: float | None = None
    last_token_s: float = 0.0
    lent_at_token_s: float = 0.0  # at its newest token
    longest_gap_s: float = 0.0
    longest_gap_lent_s: float = 0.0


class SloAccountant:
    """Report lent steps and the milestones of every serving request; each report returns a breach or None.

    `history` learns from it what serving itself took. `slowdown` returns by how much a full batch of requests slows
    down steps with prompts.
    """

    def __init__(
        self,
        budgets: Budgets,
        history: ServingHistory | None = None,
        *,
        slots: int = 0,
        slowdown: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.budgets, self._slots, self._slowdown = budgets, slots, slowdown
        self.history = history or ServingHistory(budgets.ttft_s, slots)
        self.total_lent_s = 0.0
        self.breaches: Counter[Kind] = Counter()
        self._lent_without_queue_s = 0.0  # total when no prompt waited
        self._waiting = 0
        self._shortage_s = -math.inf  # when slots or KV memory were short last
        self._accounts: dict[str, _Account] = {}
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)

    @property
    def open_accounts(self) -> int:
        return len(self._accounts)

    # Events

    def on_lent_step(self, begin_s: float, end_s: float, upper_s: float) -> Breach | None:
        self._steps.append((begin_s, end_s))
        seconds = end_s - begin_s
        self.total_lent_s += seconds
        if seconds <= upper_s:
            return None
        cause = "a lent step took longer than its upper estimate"
        return self._count(Breach("step", cause, end_s, upper_s, seconds, seconds))

    def on_arrival(self, request_id: str, arrival_s: float, prompt_tokens: int = 0) -> None:
        """Open an account; steps that ended after the arrival have been reported before."""
        since_s = 0.0
        for begin_s, end_s in reversed(self._steps):
            if end_s <= arrival_s:
                break
            since_s += end_s - max(begin_s, arrival_s)
        before_s = self.total_lent_s - since_s
        if not self._waiting:
            self._lent_without_queue_s = before_s
        mark_s = min(before_s, self._lent_without_queue_s)
        oldest = next(iter(self._accounts.values()), None)
        company_s = max(0.0, mark_s - oldest.lent_before_s) if oldest is not None else 0.0
        ages_s = [arrival_s - other.arrival_s - (before_s - other.lent_before_s) for other in self._accounts.values()]
        rise = self.history.on_arrival(prompt_tokens, arrival_s, ages_s)
        share = self._own_share(arrival_s, before_s)
        self._accounts[request_id] = _Account(arrival_s, prompt_tokens, rise, before_s, mark_s, company_s, share)
        self._waiting += 1
        if len(self._accounts) > self._slots:
            self.on_shortage(arrival_s)

    def on_shortage(self, now_s: float) -> None:
        """Record that requests wait for slots or KV memory, perhaps because lending delayed the holders."""
        self._shortage_s = max(self._shortage_s, now_s)

    def on_first_token(self, request_id: str, now_s: float) -> Breach | None:
        account = self._accounts[request_id]
        lent_s, taken_s = self.total_lent_s - account.lent_mark_s, now_s - account.arrival_s
        account.first_token_s = account.last_token_s = now_s
        account.lent_mark_s = account.lent_at_token_s = self.total_lent_s
        self._waiting -= 1
        own_s = alone_s_min = taken_s - lent_s
        if self.total_lent_s > account.lent_before_s or account.company_s > 0:  # lending may have cost it anything
            alone_s_min = own_s / self._slowdown()
            if self._shortage_s >= account.arrival_s:
                alone_s_min -= account.company_s
        self.history.on_first_token(taken_s, own_s if alone_s_min > 0 else None)
        if alone_s_min <= self.budgets.ttft_s:  # else serving alone was overloaded, and no reserve helps
            self.history.bursts.learn(account.rise)
        return self._judge("ttft", self.budgets.ttft_s, taken_s, lent_s, alone_s_min, now_s, request_id)

    def on_token(self, request_id: str, now_s: float) -> None:
        """Record a later token; needed only if every gap counts."""
        account = self._accounts[request_id]
        gap_s, lent_s = now_s - account.last_token_s, self.total_lent_s - account.lent_at_token_s
        if gap_s > account.longest_gap_s:
            account.longest_gap_s, account.longest_gap_lent_s = gap_s, lent_s
        account.last_token_s, account.lent_at_token_s = now_s, self.total_lent_s

    def on_finished(self, request_id: str, tokens: int, now_s: float) -> Breach | None:
        """Judge a request that got its last token; `tokens` were generated, the first one included."""
        here = min(len(self._accounts), self._slots)
        account = self._close(request_id, now_s)
        if account is None or account.first_token_s is None:
            return None
        self.history.lengths.observe(tokens)
        if tokens < 2:
            return None
        gaps = tokens - 1
        lent_s, taken_s = (self.total_lent_s - account.lent_mark_s) / gaps, (now_s - account.first_token_s) / gaps
        answer_s = now_s - account.arrival_s - (self.total_lent_s - account.lent_before_s)
        self.history.on_answer(tokens, taken_s, lent_s, answer_s, here)
        if self.budgets.tpot == "every_gap" and account.longest_gap_s:
            lent_s, taken_s = account.longest_gap_lent_s, account.longest_gap_s
        own_s = taken_s - lent_s
        own_share = min(account.company_share, self._own_share(now_s, self.total_lent_s))
        alone_s_min = own_s * min(own_share, own_s / taken_s) if taken_s > 0 else 0.0
        return self._judge("tpot", self.budgets.tpot_s, taken_s, lent_s, alone_s_min, now_s, request_id)

    def on_cancelled(self, request_id: str, tokens: int, now_s: float) -> Breach | None:
        """Judge a request that was cancelled after so many tokens, as if its next token came now."""
        account = self._accounts.get(request_id)
        if account is None or account.first_token_s is not None:
            return self.on_finished(request_id, tokens + 1, now_s)
        breach = self.on_first_token(request_id, now_s)
        self._close(request_id, now_s)
        return breach

    def discard(self, request_id: str, now_s: float) -> None:
        """Close the account of a request that teaches nothing."""
        self._close(request_id, now_s)

    # Budgets

    def is_within_budgets(self, request_id: str, tokens: int, now_s: float) -> bool:
        """Return whether a request that gets the last of its tokens now has kept both budgets."""
        account = self._accounts[request_id]
        first_token_s = now_s if account.first_token_s is None else account.first_token_s
        if first_token_s - account.arrival_s > self.budgets.ttft_s:
            return False
        if self.budgets.tpot == "every_gap" and account.longest_gap_s:
            return account.longest_gap_s <= self.budgets.tpot_s
        return now_s - first_token_s <= self.budgets.tpot_s * max(0, tokens - 1)

    def is_within_budgets_if_cancelled(self, request_id: str, tokens: int, now_s: float) -> bool | None:
        """Return the same for `on_cancelled`; None if it ended in time without a token: its end is unknown."""
        is_within = self.is_within_budgets(request_id, tokens + 1, now_s)
        return None if is_within and self._accounts[request_id].first_token_s is None else is_within

    # Accounts

    def _close(self, request_id: str, now_s: float) -> _Account | None:
        account = self._accounts.pop(request_id, None)
        if account is not None:
            if len(self._accounts) >= self._slots:
                self.on_shortage(now_s)
            self._waiting -= account.first_token_s is None
            self.history.on_departure(account.prompt_tokens, now_s)
        return account

    def _own_share(self, at_s: float, total_lent_s: float) -> float:
        """Return which share of the time that the requests here have been here was not lent."""
        here_s = sum([at_s - account.arrival_s for account in self._accounts.values()])
        lent_s = sum([total_lent_s - account.lent_before_s for account in self._accounts.values()])
        return max(0.0, 1 - lent_s / here_s) if here_s > 0 else 1.0

    def _judge(
        self,
        kind: Literal["ttft", "tpot"],
        limit_s: float,
        taken_s: float,
        lent_s: float,
        alone_s_min: float,
        now_s: float,
        request_id: str,
    ) -> Breach | None:
        if taken_s <= limit_s or alone_s_min > limit_s:
            return None
        objective: Kind = kind
        cause = "missed its deadline; without the time lent in front of it, it would have met it"
        if taken_s - lent_s > limit_s:
            objective = "ambiguous"
            cause = f"missed its {kind} deadline; without the requests that lending delayed, it might have met it"
        return self._count(Breach(objective, cause, now_s, limit_s, taken_s, lent_s, request_id))

    def _count(self, breach: Breach) -> Breach:
        self.breaches[breach.objective] += 1
        return breach
