"""The next dollar: to inference or to training? docs/economics.md has the formulas and a worked example.

    cost per correct answer  =  (answer_usd + rho x rollout_usd) / alpha

    answer_usd    price of one answer to a user
    rollout_usd   price of one rollout: its tokens at a price line, and its part of training
    rho           rollouts per answer
    alpha         the verifier's accept rate

A dollar for inference buys answers, a dollar for training buys rollouts, which raise alpha. Training is the better buy
while alpha rises, by one more rollout per answer, by more than alpha x rollout_usd / answer_usd. A token of a rollout
has three prices (dedicated, serving, borrowed), so there are three thresholds, and a fourth for their blend.

The borrowed price is small and made of risks. `slack_of` prices the slack that a burst would have needed, `waiting_usd`
answers that are slower but in budget, and `worst_case` spikes on all devices at once. A finite sample without a loss
does not make losses impossible: half an event is added to every count (Jeffreys' prior).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

HOUR_S, MINUTE_S = 3600.0, 60.0
MINUTES_OF_HOUR = 60.0
BURST_RATIO = 2.0  # a minute with this many times the requests of a usual one of its hour is a burst
BURST_REQUESTS_MIN = 3  # fewer requests a minute are no burst, however quiet the hour
TAIL_SHARE = 0.05  # of the minutes, the worst: a few are left of a sampled day
HALF = 0.5  # an event that is added to every count (Jeffreys' prior of a share)

LineName = Literal["dedicated", "serving", "borrowed", "blend"]
NextDollar = Literal["training", "inference", "either", "unknown"]


# The threshold


@dataclass(frozen=True, slots=True)
class RolloutPrices:
    """US dollars for a million rollout tokens, and the million tokens bought at each; None where none are on offer."""

    dedicated_usd: float | None
    serving_usd: float | None
    borrowed_usd: float | None
    dedicated_tokens: float = 0.0
    serving_tokens: float = 0.0
    borrowed_tokens: float = 0.0

    @property
    def blend_usd(self) -> float | None:
        """Return the mean price by tokens; None without tokens."""
        bought = [
            (usd, tokens)
            for usd, tokens in (
                (self.dedicated_usd, self.dedicated_tokens),
                (self.serving_usd, self.serving_tokens),
                (self.borrowed_usd, self.borrowed_tokens),
            )
            if usd is not None and tokens > 0
        ]
        total = sum(tokens for _, tokens in bought)
        return sum(usd * tokens for usd, tokens in bought) / total if total else None


@dataclass(frozen=True, slots=True)
class FrontierTerms:
    """What answers and rollouts cost, and how many there are."""

    answers: float  # in some time, a day for instance
    rollouts: float  # in the same time
    answer_usd: float
    rollout_million_tokens: float  # of one rollout
    training_usd: float  # of one rollout: trainer and weights
    accept_ratio: float
    prices: RolloutPrices
    accept_gain: float | None = None  # of the accept rate, by one more rollout per answer; None if not measured

    @property
    def rollout_ratio(self) -> float:
        """Return the rollouts per answer."""
        return self.rollouts / self.answers


@dataclass(frozen=True, slots=True)
class PriceLine:
    """The threshold at one price of rollout tokens."""

    name: LineName
    token_usd: float  # a million
    rollout_usd: float
    cost_per_correct: float
    gain_needed: float  # of the accept rate, by one more rollout per answer
    next_dollar: NextDollar


@dataclass(frozen=True, slots=True)
class Frontier:
    """The thresholds at up to four prices, dearest first, and the price of tokens at which both buys are equal."""

    rollout_ratio: float
    lines: tuple[PriceLine, ...]
    break_even_token_usd: float | None  # None without a measured gain; negative if training loses at any price

    def line(self, name: LineName) -> PriceLine | None:
        return next((line for line in self.lines if line.name == name), None)


def frontier(terms: FrontierTerms) -> Frontier:
    """Return where the next dollar goes at each price; without answers or an accept rate there is no threshold."""
    if not (terms.answers > 0 and terms.answer_usd > 0 and 0 < terms.accept_ratio <= 1):
        return Frontier(math.inf if terms.rollouts else 0.0, (), None)
    prices = terms.prices
    offers: tuple[tuple[LineName, float | None], ...] = (
        ("dedicated", prices.dedicated_usd),
        ("serving", prices.serving_usd),
        ("borrowed", prices.borrowed_usd),
        ("blend", prices.blend_usd),
    )
    lines = tuple(_line(terms, name, usd) for name, usd in offers if usd is not None)
    return Frontier(terms.rollout_ratio, lines, _break_even_usd(terms))


def cost_per_correct(terms: FrontierTerms, token_usd: float) -> float:
    """Return the cost of a correct answer, with all rollout tokens at one price."""
    return (terms.answer_usd + terms.rollout_ratio * _rollout_usd(terms, token_usd)) / terms.accept_ratio


def _rollout_usd(terms: FrontierTerms, token_usd: float) -> float:
    return token_usd * terms.rollout_million_tokens + terms.training_usd


def _line(terms: FrontierTerms, name: LineName, token_usd: float) -> PriceLine:
    rollout_usd = _rollout_usd(terms, token_usd)
    needed = terms.accept_ratio * rollout_usd / terms.answer_usd
    return PriceLine(
        name, token_usd, rollout_usd, cost_per_correct(terms, token_usd), needed, _next_dollar(terms, needed)
    )


def _next_dollar(terms: FrontierTerms, needed: float) -> NextDollar:
    if terms.accept_gain is None:
        return "unknown"
    if math.isclose(terms.accept_gain, needed, rel_tol=1e-9):
        return "either"
    return "training" if terms.accept_gain > needed else "inference"


def _break_even_usd(terms: FrontierTerms) -> float | None:
    if terms.accept_gain is None or not terms.rollout_million_tokens:
        return None
    worth_usd = terms.accept_gain / terms.accept_ratio * terms.answer_usd  # of one rollout
    return (worth_usd - terms.training_usd) / terms.rollout_million_tokens


# The opportunity cost of slack


@dataclass(frozen=True, slots=True)
class LossCount:
    """Requests that arrived in some minutes with lending, and how many of them lending made late."""

    minutes: int
    requests: int
    lost: float  # net: those that lending helped are taken off

    @property
    def per_minute(self) -> float:
        """Return the expected losses of a minute; none in n requests count as half a loss."""
        if not self.minutes or not self.requests:
            return 0.0
        share = min(1.0, (max(0.0, self.lost) + HALF) / (self.requests + 2 * HALF))
        return share * self.requests / self.minutes


@dataclass(frozen=True, slots=True)
class HourSlack:
    """One hour of the day: the odds that the next minute is a burst, by what this one is, and a lent hour's cost."""

    hour: int
    burst_after_calm: float
    burst_after_burst: float
    lent_hour_usd: float  # of one device, lent whenever it may be


def is_burst(requests: int, usual: float) -> bool:
    """Return whether a minute is a burst, given the mean requests a minute of its hour."""
    return requests >= max(BURST_REQUESTS_MIN, BURST_RATIO * usual)


def slack_of(
    minutes_by_hour: dict[int, Sequence[Sequence[int]]], in_burst: LossCount, in_calm: LossCount, breach_usd: float
) -> tuple[HourSlack, ...]:
    """Return what the slack of every hour is worth to serving.

    `minutes_by_hour` has runs of consecutive minutes with their requests at one device. Hours with few minutes lean on
    the whole day: its odds count as one minute of each.
    """
    steps = {hour: _transitions(runs) for hour, runs in minutes_by_hour.items()}
    day = [sum(counts[place] for counts in steps.values()) for place in range(4)]
    day_odds = _share(day[1], day[0], HALF), _share(day[3], day[2], HALF)
    hours = []
    for hour, (calm, calm_to_burst, burst, burst_to_burst) in sorted(steps.items()):
        after_calm = (calm_to_burst + day_odds[0]) / (calm + 1)
        after_burst = (burst_to_burst + day_odds[1]) / (burst + 1)
        in_time = after_calm / (after_calm + 1 - after_burst)  # of all minutes, in the long run
        losses = in_time * in_burst.per_minute + (1 - in_time) * in_calm.per_minute
        hours.append(HourSlack(hour, after_calm, after_burst, MINUTES_OF_HOUR * losses * breach_usd))
    return tuple(hours)


def _transitions(runs: Iterable[Sequence[int]]) -> tuple[int, int, int, int]:
    """Count calm minutes with a successor, bursts after them, bursts with a successor, and bursts after those."""
    runs = [list(run) for run in runs]
    minutes = [count for run in runs for count in run]
    usual = sum(minutes) / len(minutes) if minutes else 0.0
    pairs = [(is_burst(a, usual), is_burst(b, usual)) for run in runs for a, b in pairwise(run)]
    calm, burst = [after for now, after in pairs if not now], [after for now, after in pairs if now]
    return len(calm), sum(calm), len(burst), sum(burst)


def _share(part: float, whole: float, more: float) -> float:
    return (part + more) / (whole + 2 * more)


# Answers that are slower, but in budget


def waiting_usd(added_s: float, usd_per_hour: float) -> float:
    """Return the price of the time that users wait longer for answers within their budgets; less waiting is free."""
    return max(0.0, added_s) / HOUR_S * usd_per_hour


# The worst case


@dataclass(frozen=True, slots=True)
class WorstCase:
    """US dollars a minute that the fleet loses by lending: on average, and in the worst minutes."""

    mean_usd: float  # devices differ, and training wants them for a part of the time
    shortfall_usd: float  # all devices have one of the worst minutes at once, and training wants them all
    shortfall_requests: float
    minutes: int
    tail_minutes: int


def worst_case(
    losses: Sequence[float], devices: int, demand_share: float, breach_usd: float, tail_share: float = TAIL_SHARE
) -> WorstCase:
    """Return the expected shortfall of spikes that come on every device at once, while training wants all of them.

    `losses` has requests lost by lending in each minute on one device. The mean counts `demand_share`, the part of the
    time in which training wants devices; a shortfall minute counts in full. No minute may gain for another.
    """
    assert 0 < tail_share <= 1 and 0 <= demand_share <= 1
    bounded = sorted((max(0.0, lost) for lost in losses), reverse=True)
    if not bounded:
        return WorstCase(0.0, 0.0, 0.0, 0, 0)
    tail = math.ceil(tail_share * len(bounded))
    lost = devices * sum(bounded[:tail]) / tail
    mean = devices * demand_share * sum(bounded) / len(bounded)
    return WorstCase(mean * breach_usd, lost * breach_usd, lost, len(bounded), tail)
