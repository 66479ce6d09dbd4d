"""Whether lending kept its word: what each request lost to it, and every breach with its cause.

A lent step longer than its upper estimate is a breach of its own. A missed deadline is a breach if serving alone would
have met it. What serving alone would have done is the request's own time less the time lent in front of it: from its
arrival to its first token, and before its arrival since prompts last stopped waiting, for it queued behind those that
such steps had held up; for its later tokens, from the first to the last. A step under way when it arrived counts
from the arrival on. This errs against lending: not every second lent in front of a request was lost to it.

Time lent earlier in the same busy period, when no prompt waited, leaves more requests decoding than there would have
been, and these make every step a little longer. How much cannot be told; misses that only this could explain are
counted as `doubtful`, never hidden, and are no breaches.

Whether a request kept its budgets is asked here too (`kept`, `kept_by_leaving`), so that one rule holds wherever there
is lending. Who leaves between tokens counts as much as who ends: a stop string ends a request by cancelling it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from rose.core.slo import Budgets, OwnAnswers, OwnGaps

STEPS_KEPT = 256  # enough to find those that ran after the oldest arrival not yet told of


@dataclass(frozen=True, slots=True)
class Breach:
    """`actual_s` went over `limit_s`; of it, `lent_s` was lent to rollouts."""

    objective: Literal["step", "ttft", "tpot"]
    cause: str
    at_s: float
    limit_s: float
    actual_s: float
    lent_s: float
    request_id: str = ""


@dataclass(slots=True)
class _Account:
    arrival_s: float
    lent_before_s: float  # its arrival, in all
    mark_s: float  # what had been lent in all when what counts for it began
    busy_s: float  # lent before that, in the same busy period
    first_token_s: float | None = None


class Ledger:
    """Tell it of lent steps and of every serving request's milestones; it answers with a breach or None.

    `own_gaps` and `own_answers` are told what serving itself took for a token and for the answer, request by request.
    """

    def __init__(
        self, budgets: Budgets, own_gaps: OwnGaps | None = None, own_answers: OwnAnswers | None = None
    ) -> None:
        self.budgets = budgets
        self._own_gaps, self._own_answers = own_gaps or OwnGaps(), own_answers or OwnAnswers()
        self.total_lent_s = 0.0
        self.breaches = self.doubtful = 0
        self._busy_mark_s = self._queue_mark_s = 0.0  # lent in all when serving last had no work; when no prompt waited
        self._waiting = 0
        self._accounts: dict[str, _Account] = {}
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)

    @property
    def open_accounts(self) -> int:
        return len(self._accounts)

    def lent(self, begin_s: float, end_s: float, upper_s: float) -> Breach | None:
        self._steps.append((begin_s, end_s))
        self.total_lent_s += end_s - begin_s
        if end_s - begin_s <= upper_s:
            return None
        seconds = end_s - begin_s
        self.breaches += 1
        return Breach("step", "a lent step took longer than its upper estimate", end_s, upper_s, seconds, seconds)

    def arrived(self, request_id: str, arrival_s: float) -> None:
        """A request is here; steps that ended after its arrival have been told of already."""
        before_s = self.total_lent_s - self._lent_since(arrival_s)
        if not self._accounts:
            self._busy_mark_s = before_s
        if not self._waiting:
            self._queue_mark_s = before_s
        mark_s = min(before_s, self._queue_mark_s)
        self._accounts[request_id] = _Account(arrival_s, before_s, mark_s, max(0.0, mark_s - self._busy_mark_s))
        self._waiting += 1

    def first_token(self, request_id: str, now_s: float) -> Breach | None:
        account = self._accounts[request_id]
        lent_s, taken_s = self.total_lent_s - account.mark_s, now_s - account.arrival_s
        account.first_token_s, account.mark_s = now_s, self.total_lent_s
        self._waiting -= 1
        if self._is_doubtful(taken_s, lent_s, account.busy_s):
            self.doubtful += 1
        return self._judge("ttft", self.budgets.ttft_s, taken_s, lent_s, now_s, request_id)

    def finished(self, request_id: str, tokens: int, now_s: float) -> Breach | None:
        """After its last token; `tokens` were generated, the first one included."""
        account = self._forget(request_id)
        if account is None or account.first_token_s is None or tokens < 2:
            return None
        gaps = tokens - 1
        lent_s, taken_s = (self.total_lent_s - account.mark_s) / gaps, (now_s - account.first_token_s) / gaps
        self._own_gaps.observe(max(0.0, taken_s - lent_s))
        self._own_answers.observe(max(0.0, now_s - account.arrival_s - (self.total_lent_s - account.lent_before_s)))
        return self._judge("tpot", self.budgets.tpot_s, taken_s, lent_s, now_s, request_id)

    def kept(self, request_id: str, tokens: int, now_s: float) -> bool:
        """With the last of so many tokens now: the first one in time, and the mean gap between the others."""
        account = self._accounts[request_id]
        first_token_s = now_s if account.first_token_s is None else account.first_token_s
        gaps_s = self.budgets.tpot_s * max(0, tokens - 1)
        return first_token_s - account.arrival_s <= self.budgets.ttft_s and now_s - first_token_s <= gaps_s

    def kept_by_leaving(self, request_id: str, tokens: int, now_s: float) -> bool | None:
        """As in `left`. None of who left without a token and in time: how it would have gone on nobody knows."""
        is_kept = self.kept(request_id, tokens + 1, now_s)
        return None if is_kept and self._accounts[request_id].first_token_s is None else is_kept

    def left(self, request_id: str, tokens: int, now_s: float) -> Breach | None:
        """Its client gave up with so many tokens made: as if the next one had come now, for earlier it did not."""
        account = self._accounts.get(request_id)
        if account is None or account.first_token_s is not None:
            return self.finished(request_id, tokens + 1, now_s)
        breach = self.first_token(request_id, now_s)
        self.gone(request_id)
        return breach

    def gone(self, request_id: str) -> None:
        """Nobody waits for it any more, and nothing is to be learnt from it."""
        self._forget(request_id)

    def _forget(self, request_id: str) -> _Account | None:
        account = self._accounts.pop(request_id, None)
        if account is not None and account.first_token_s is None:
            self._waiting -= 1
        return account

    def _lent_since(self, since_s: float) -> float:
        seconds = 0.0
        for begin_s, end_s in reversed(self._steps):
            if end_s <= since_s:
                break
            seconds += end_s - max(begin_s, since_s)
        return seconds

    def _is_doubtful(self, taken_s: float, lent_s: float, busy_s: float) -> bool:
        return taken_s - lent_s > self.budgets.ttft_s >= taken_s - lent_s - busy_s

    def _judge(
        self,
        kind: Literal["ttft", "tpot"],
        limit_s: float,
        taken_s: float,
        lent_s: float,
        now_s: float,
        request_id: str,
    ) -> Breach | None:
        if taken_s <= limit_s or taken_s - lent_s > limit_s:
            return None
        self.breaches += 1
        cause = "missed its deadline; without the time lent in front of it, it would have met it"
        return Breach(kind, cause, now_s, limit_s, taken_s, lent_s, request_id)
