"""Serving requests as their clients see them, and what lending guarantees to them.

The records are the simulation's own, so the step arbiter's accounts are checked against something independent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rose.core.admission import Admission
from rose.core.slo import Budgets
from rose.device.step_arbiter import StepArbiter, StepDecision
from rose.engines.base import Request, TokenEvent
from rose.errors import QueueFull


@dataclass(slots=True)
class ServedRequest:
    """One serving request as its client sees it."""

    request: Request
    tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    lent_s: float = 0.0  # before its first token
    lent_steps: int = 0
    longest_gap_s: float = 0.0
    is_cancelled: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.last_token_s - self.first_token_s) / max(1, self.tokens - 1)

    def keeps(self, budgets: Budgets) -> bool:
        """Return whether the request met its budgets; one without a first token did not."""
        if not self.tokens:
            return False
        tpot_s = self.longest_gap_s if budgets.tpot == "every_gap" else self.tpot_s
        return self.ttft_s <= budgets.ttft_s and tpot_s <= budgets.tpot_s

    def token_made(self, tokens: int, now_s: float) -> None:
        if not self.tokens:
            self.first_token_s = now_s
        else:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_token_s)
        self.tokens += tokens
        self.last_token_s = now_s

    def step_lent(self, begin_s: float, end_s: float, *, is_step: bool = True) -> None:
        """Record a lent step, or another pause for rollouts, while this request was in the system."""
        if not self.tokens:
            self.lent_s += end_s - max(begin_s, self.request.arrival_s)
            self.lent_steps += is_step


class ServingClients:
    """The serving requests of a device: those still to come, and those in the system."""

    def __init__(self, arrivals: Iterable[tuple[float, Request]]) -> None:
        self.coming = sorted(arrivals, key=lambda pair: pair[0])[::-1]  # the next one is last
        self.here: dict[str, ServedRequest] = {}
        self.rejected = 0

    def add_due(self, arbiter: StepArbiter, now_s: float) -> list[Request]:
        """Add the requests that have arrived to the serving engine, and return them."""
        added = []
        while self.coming and self.coming[-1][0] <= now_s:
            _, request = self.coming.pop()
            try:
                arbiter.add_serving(request)
            except QueueFull:
                self.rejected += 1
                continue
            self.here[request.request_id] = ServedRequest(request)
            added.append(request)
        return added

    def receive(self, events: Sequence[TokenEvent], now_s: float) -> list[ServedRequest]:
        """Record the tokens of a serving step. Return the requests that have ended."""
        ended = []
        for event in events:
            self.here[event.request_id].token_made(len(event.token_ids), now_s)
            if event.finish_reason is not None:
                ended.append(self.here.pop(event.request_id))
        return ended

    def record_lent(self, begin_s: float, end_s: float, *, is_step: bool = True) -> None:
        for served in self.here.values():
            served.step_lent(begin_s, end_s, is_step=is_step)


def check_lent_step(step: StepDecision, admission: Admission, here: Collection[ServedRequest], now_s: float) -> None:
    """Check the start of a lent step. Raises AssertionError."""
    grant, features = step.grant, step.plan.features
    assert grant is not None
    assert grant.is_open(now_s), "a step on an expired grant"
    assert features.new_tokens <= grant.tokens
    assert features.sequences <= grant.sequences
    assert step.upper_s <= grant.step_s_max
    if admission.mode not in ("idle", "decode"):  # the others guarantee nothing
        return
    assert not here or admission.mode == "decode", "a step beside serving requests in idle mode"
    assert all(served.tokens for served in here), "a step while a prompt waits"
    end_s = now_s + step.upper_s
    assert step.upper_s <= admission.block_s
    share_s, is_mean = admission.budgets.slack_share * admission.budgets.tpot_s, admission.budgets.tpot == "mean"
    assert all(
        end_s <= (served.first_token_s + served.tokens * share_s if is_mean else served.last_token_s + share_s)
        for served in here
    ), "serving's next token would be late"
    answer_s = admission.budgets.answer_s
    ages_s = [age_s for served in here if (age_s := now_s - served.request.arrival_s) < answer_s]
    assert max(ages_s, default=0.0) < admission.age_s, "a step delays an answer that is already late"
