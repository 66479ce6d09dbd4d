"""Cost per correct answer: what a run cost, by how many of its trajectories were right.

    cost per correct  =  CPM  x  R  x  (1 + rho)  /  alpha

    CPM     blended price of a million generated tokens, of every kind: all that was paid / all that was generated
    R       how many million tokens one judged trajectory takes, thinking included
    rho     rollouts beside the judged ones, in tokens: cut off as surplus, given up, played anew
    alpha   the verifier's accept rate: correct / judged trajectories

What one of them divides by another multiplies with, so their product is total / correct by construction and proves
nothing about the counts. Those are held against each other instead: what was judged, as the run counts it, must be a
part of what was played, as workers count turns and the gateway counts tokens.

There are three prices of a rollout token. *Dedicated*: the job holds the device and pays all of it. *Serving*: what the
borrowed time would cost if its owner asked the full price. *Borrowed*: what lending costs at the margin, since the
device is there and paid for: energy, weights over the wire, memory kept free for serving, and the requests of users
that came late because of it.

Pure: a record of what was used in, a record of what it cost out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rose.cost.settings import CostSettings

HOUR_S = 3600.0
MILLION = 1e6
GB = 1e9
EXACT = 1e-9
"""Relative: products of floats differ in the last digits, and in nothing else."""
MISCOUNTED_SHARE_MIN = 0.1
"""Less may be the edges: a worker that dies takes its last count with it, and steps begin and end amid trajectories."""

FixedBasis = Literal["measured", "estimated", "rented", "same"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a run used. Tokens and turns are those of judged trajectories, or with a pool in their name of all."""

    run_s: float
    rollout_s: float
    lent_s: float  # while a device was lent
    lent_rollout_s: float  # while it was lent and there was something to play
    trajectories: int
    correct: int
    turns: int
    generated_tokens: int
    dedicated_turns: int
    borrowed_turns: int
    fixed_s: float  # how long the same would have taken without borrowing
    fixed_basis: FixedBasis
    pool_tokens: int | None = None  # None: nobody counted them
    breaches: float = 0.0
    headroom_share: float = 0.0
    transfer_bytes: int | None = None  # None: nobody measured it
    evaluation_s: float = 0.0

    @property
    def pool_turns(self) -> int:
        """At least those that were judged: a worker that died may have taken its count with it."""
        return max(self.turns, self.dedicated_turns + self.borrowed_turns)

    @property
    def all_tokens(self) -> float:
        """Of all rollouts. Where nobody counted them, others are taken to be as long, turn by turn, as judged ones."""
        if self.pool_tokens is None and self.turns:
            return self.generated_tokens * self.pool_turns / self.turns
        return max(self.generated_tokens, self.pool_tokens or 0)

    def million_tokens_of(self, pool_turns: int) -> float:
        """The part of them that one pool generated: turns are counted by pool, tokens are not."""
        ended = self.dedicated_turns + self.borrowed_turns
        return self.all_tokens / MILLION * pool_turns / ended if ended else 0.0


@dataclass(frozen=True, slots=True)
class Bill:
    """USD, by what they were paid for."""

    dedicated_rollouts: float
    dedicated_training: float
    energy: float
    transfer: float
    headroom: float
    slo_risk: float

    @property
    def dedicated(self) -> float:
        return self.dedicated_rollouts + self.dedicated_training

    @property
    def borrowed(self) -> float:
        return self.energy + self.transfer + self.headroom + self.slo_risk

    @property
    def total(self) -> float:
        return self.dedicated + self.borrowed


@dataclass(frozen=True, slots=True)
class Prices:
    """USD for a million tokens; None where a pool generated none."""

    dedicated: float | None
    serving: float | None
    borrowed: float | None


@dataclass(frozen=True, slots=True)
class Factors:
    """What the cost of a correct answer is made of."""

    cpm_usd: float
    reasoning_million_tokens: float
    rollout_ratio: float
    accept_ratio: float

    def product(self) -> float:
        return self.cpm_usd * self.reasoning_million_tokens * (1 + self.rollout_ratio) / self.accept_ratio


@dataclass(frozen=True, slots=True)
class Cost:
    """`cost_per_correct_fixed` is what the same run would cost without borrowing, `fixed_basis` how that is known."""

    total_usd: float
    correct: int
    bill: Bill
    prices: Prices
    factors: Factors | None  # None without a correct answer
    cost_per_correct: float | None
    cost_per_correct_fixed: float | None
    fixed_usd: float
    fixed_basis: FixedBasis
    evaluation_usd: float  # apart: no part of the total
    transfer_bytes: int | None
    miscounted: tuple[str, ...] = ()  # counts that contradict each other

    def is_consistent(self) -> bool:
        """Whether counts agree with each other, and factors multiply to what total / correct says."""
        if self.miscounted:
            return False
        if self.factors is None or self.cost_per_correct is None:
            return self.factors is None and self.cost_per_correct is None
        return math.isclose(self.factors.product(), self.cost_per_correct, rel_tol=EXACT)


def cost_of(usage: Usage, prices: CostSettings) -> Cost:
    """Raises nothing: a run without a correct answer has a bill, and no cost per correct answer."""
    bill = bill_of(usage, prices)
    fixed_usd = _held_usd(usage.fixed_s, prices, more=usage.fixed_basis == "rented")
    correct = usage.correct
    return Cost(
        total_usd=bill.total,
        correct=correct,
        bill=bill,
        prices=prices_of(usage, bill, prices),
        factors=factors_of(usage, bill),
        cost_per_correct=bill.total / correct if correct else None,
        cost_per_correct_fixed=fixed_usd / correct if correct else None,
        fixed_usd=fixed_usd,
        fixed_basis=usage.fixed_basis,
        evaluation_usd=_held_usd(usage.evaluation_s, prices),
        transfer_bytes=usage.transfer_bytes,
        miscounted=miscounted(usage),
    )


def bill_of(usage: Usage, prices: CostSettings) -> Bill:
    headroom_share = usage.headroom_share * prices.memory_price_share
    return Bill(
        dedicated_rollouts=_held_usd(usage.rollout_s, prices),
        dedicated_training=_held_usd(usage.run_s - usage.rollout_s, prices),
        energy=usage.lent_rollout_s / HOUR_S * prices.energy_usd_per_hour,
        transfer=(usage.transfer_bytes or 0) / GB * prices.transfer_usd_per_gb,
        headroom=usage.lent_s / HOUR_S * prices.serving_usd_per_hour * headroom_share,
        slo_risk=usage.breaches * prices.breach_usd,
    )


def prices_of(usage: Usage, bill: Bill, prices: CostSettings) -> Prices:
    dedicated = usage.million_tokens_of(usage.dedicated_turns)
    borrowed = usage.million_tokens_of(usage.borrowed_turns)
    serving_usd = usage.lent_rollout_s / HOUR_S * prices.serving_usd_per_hour
    return Prices(
        dedicated=bill.dedicated_rollouts / dedicated if dedicated else None,
        serving=serving_usd / borrowed if borrowed else None,
        borrowed=bill.borrowed / borrowed if borrowed else None,
    )


def factors_of(usage: Usage, bill: Bill) -> Factors | None:
    """Their product is total / correct by construction: that it is guards against a factor changed here alone."""
    if not usage.correct or not usage.generated_tokens:
        return None
    return Factors(
        cpm_usd=bill.total / (usage.all_tokens / MILLION),
        reasoning_million_tokens=usage.generated_tokens / usage.trajectories / MILLION,
        rollout_ratio=usage.all_tokens / usage.generated_tokens - 1,
        accept_ratio=usage.correct / usage.trajectories,
    )


def miscounted(usage: Usage) -> tuple[str, ...]:
    """What has a part greater than its whole. Each is counted by somebody else: one of them missed or doubled some."""
    pairs: dict[str, tuple[int, int | None]] = {
        "trajectories": (usage.correct, usage.trajectories),
        "turns": (usage.turns, usage.dedicated_turns + usage.borrowed_turns),
        "tokens": (usage.generated_tokens, usage.pool_tokens),
    }
    most = 1 + MISCOUNTED_SHARE_MIN
    return tuple(name for name, (part, whole) in pairs.items() if whole is not None and part > whole * most)


def _held_usd(seconds: float, prices: CostSettings, *, more: bool = False) -> float:
    """Devices that are held, busy or not; with `more`, one beside them."""
    return seconds / HOUR_S * prices.dedicated_usd_per_hour * (prices.dedicated_devices + more)
