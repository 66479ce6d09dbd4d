"""What lending promises serving, checked from what a simulation knows of the requests itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rose.core.admission import Admission
from rose.core.slo import Budgets
from rose.coserve.lending import NextStep
from rose.engines.base import Request


@dataclass(slots=True)
class Served:
    """One serving request, as its client sees it."""

    request: Request
    tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    lent_s: float = 0.0  # in front of its first token
    lent_steps: int = 0
    longest_gap_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.last_token_s - self.first_token_s) / max(1, self.tokens - 1)

    def keeps(self, budgets: Budgets) -> bool:
        return self.ttft_s <= budgets.ttft_s and self.tpot_s <= budgets.tpot_s

    def token_made(self, tokens: int, now_s: float) -> None:
        if not self.tokens:
            self.first_token_s = now_s
        else:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_token_s)
        self.tokens += tokens
        self.last_token_s = now_s

    def step_lent(self, begin_s: float, end_s: float) -> None:
        """A rollout's step ran while this request was here."""
        if not self.tokens:
            self.lent_s += end_s - max(begin_s, self.request.arrival_s)
            self.lent_steps += 1


def check_lent_step(step: NextStep, admission: Admission, here: Collection[Served], now_s: float) -> None:
    """At the start of a lent step. Raises AssertionError."""
    grant, features = step.grant, step.plan.features
    assert grant is not None
    assert grant.is_open(now_s), "a step on an expired grant"
    assert features.new_tokens <= grant.tokens
    assert features.sequences <= grant.sequences
    assert step.upper_s <= grant.step_s_max
    if admission.mode not in ("idle", "decode"):  # the others promise nothing
        return
    assert not here or admission.mode == "decode", "idle mode beside serving's work"
    assert all(served.tokens for served in here), "a step beside a prompt that waits"
    assert not here or not admission.is_latched(now_s)
    end_s = now_s + step.upper_s
    assert step.upper_s <= admission.block_s
    share_s = admission.budgets.slack_share * admission.budgets.tpot_s
    assert all(end_s <= served.last_token_s + share_s for served in here), "serving's next token would be late"
    answer_s = admission.budgets.answer_s
    ages_s = [age_s for served in here if (age_s := now_s - served.request.arrival_s) < answer_s]
    assert max(ages_s, default=0.0) < admission.age_s, "an answer that has taken long already is held up"
