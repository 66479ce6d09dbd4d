"""Cost per correct answer: what a run cost, by how many of its trajectories were right. docs/cost.md has the formulas.

    cost per correct  =  CPM  x  R  x  (1 + rho)  /  alpha

    CPM     blended price of a million generated tokens, of every kind: all that was paid / all that was generated
    R       how many million tokens one judged trajectory takes, thinking included
    rho     tokens of other rollouts per token of judged ones: cut off as surplus, given up, played again
    alpha   the verifier's accept rate: correct / judged trajectories

The product is total / correct by construction and proves nothing about the counts. So the counts are compared: what was
judged, as the run counts it, must be a part of what workers and gateway counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rose.bounds import Finite, Label, Serial
from rose.config.schema import setting


@dataclass(frozen=True, slots=True)
class CostSettings:
    """The prices of a run: assumptions, not measurements. docs/cost.md says where each comes from, also for GPUs."""

    dedicated_usd_per_hour: float = setting(0.04, "price of one device that the job holds for itself", minimum=0)
    dedicated_devices: int = setting(1, "devices the job holds: trainer and dedicated workers", minimum=1)
    serving_usd_per_hour: float = setting(0.04, "price of one serving device, which its users pay", minimum=0)
    energy_usd_per_hour: float = setting(0.001, "what a busy device draws more than an idle one", minimum=0)
    transfer_usd_per_gb: float = setting(0.0, "price of a GB of weights sent to a borrowed device", minimum=0)
    memory_price_share: float = setting(0.25, "share of a device's price that is its memory", minimum=0, maximum=1)
    breach_usd: float = setting(0.0001, "what one request costs that lending made late", minimum=0)
    waiting_usd_per_hour: float = setting(0.0, "price of an hour that users wait longer, within budgets", minimum=0)
    charged_share: float = setting(
        0.0, "share of a serving device's price that its owner charges for lent time", minimum=0, maximum=1
    )


HOUR_S = 3600.0
MILLION = 1e6
GB = 1e9
EXACT = 1e-9  # relative: products of floats differ in the last digits only
MISCOUNTED_SHARE_MIN = 0.1  # less may be the edges: a worker that dies loses its last count, steps cut trajectories

FixedBasis = Literal["measured", "estimated", "rented", "same"]


@dataclass(frozen=True, slots=True)
class RunUsage:
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
    pool_tokens: int | None = None  # None: not counted
    breaches: float = 0.0
    headroom_share: float = 0.0
    transfer_bytes: int | None = None  # None: not measured
    evaluation_s: float = 0.0

    @property
    def pool_turns(self) -> int:
        """Return all turns, at least the judged ones: a worker that died loses its count."""
        return max(self.turns, self.dedicated_turns + self.borrowed_turns)

    @property
    def all_tokens(self) -> float:
        """Return the tokens of all rollouts; without a count, turns of others count like judged ones."""
        if self.pool_tokens is None and self.turns:
            return self.generated_tokens * self.pool_turns / self.turns
        return max(self.generated_tokens, self.pool_tokens or 0)

    def million_tokens_of(self, pool_turns: int) -> float:
        """Return the million tokens that one pool generated: turns are counted by pool, tokens are not."""
        ended = self.dedicated_turns + self.borrowed_turns
        return self.all_tokens / MILLION * pool_turns / ended if ended else 0.0


@dataclass(frozen=True, slots=True)
class Bill:
    """US dollars by what they were paid for."""

    dedicated_rollouts: Finite
    dedicated_training: Finite
    energy: Finite
    transfer: Finite
    headroom: Finite
    slo_risk: Finite

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
    """US dollars for a million tokens; None where a pool generated none."""

    dedicated: Finite | None
    serving: Finite | None
    borrowed: Finite | None


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of the cost of a correct answer."""

    cpm_usd: Finite
    reasoning_million_tokens: Finite
    rollout_ratio: Finite
    accept_ratio: Finite

    def product(self) -> float:
        return self.cpm_usd * self.reasoning_million_tokens * (1 + self.rollout_ratio) / self.accept_ratio


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a run; `*_fixed` is what it would be without borrowing, `fixed_basis` how that is known."""

    total_usd: Finite
    correct: Serial
    bill: Bill
    prices: Prices
    factors: Factors | None  # None without a correct answer
    cost_per_correct: Finite | None
    cost_per_correct_fixed: Finite | None
    fixed_usd: Finite
    fixed_basis: FixedBasis
    evaluation_usd: Finite  # apart: no part of the total
    transfer_bytes: Serial | None
    miscounted: Annotated[tuple[Label, ...], Meta(max_length=8)]  # counts that contradict each other
    is_consistent: bool  # counts agree with each other, and factors multiply to total / correct


def cost_of(usage: RunUsage, prices: CostSettings) -> Cost:
    """Return the cost of a run; without a correct answer it has a bill and no cost per correct answer."""
    bill = bill_of(usage, prices)
    fixed_usd = _held_usd(usage.fixed_s, prices, more=usage.fixed_basis == "rented")
    correct, factors, wrong = usage.correct, factors_of(usage, bill), miscounted(usage)
    cost_per_correct = bill.total / correct if correct else None
    return Cost(
        total_usd=bill.total,
        correct=correct,
        bill=bill,
        prices=prices_of(usage, bill, prices),
        factors=factors,
        cost_per_correct=cost_per_correct,
        cost_per_correct_fixed=fixed_usd / correct if correct else None,
        fixed_usd=fixed_usd,
        fixed_basis=usage.fixed_basis,
        evaluation_usd=_held_usd(usage.evaluation_s, prices),
        transfer_bytes=usage.transfer_bytes,
        miscounted=wrong,
        is_consistent=not wrong and multiplies_to(cost_per_correct, factors),
    )


def bill_of(usage: RunUsage, prices: CostSettings) -> Bill:
    headroom_share = usage.headroom_share * prices.memory_price_share
    return Bill(
        dedicated_rollouts=_held_usd(usage.rollout_s, prices),
        dedicated_training=_held_usd(usage.run_s - usage.rollout_s, prices),
        energy=usage.lent_rollout_s / HOUR_S * prices.energy_usd_per_hour,
        transfer=(usage.transfer_bytes or 0) / GB * prices.transfer_usd_per_gb,
        headroom=usage.lent_s / HOUR_S * prices.serving_usd_per_hour * headroom_share,
        slo_risk=usage.breaches * prices.breach_usd,
    )


def prices_of(usage: RunUsage, bill: Bill, prices: CostSettings) -> Prices:
    dedicated = usage.million_tokens_of(usage.dedicated_turns)
    borrowed = usage.million_tokens_of(usage.borrowed_turns)
    serving_usd = usage.lent_rollout_s / HOUR_S * prices.serving_usd_per_hour
    return Prices(
        dedicated=bill.dedicated_rollouts / dedicated if dedicated else None,
        serving=serving_usd / borrowed if borrowed else None,
        borrowed=bill.borrowed / borrowed if borrowed else None,
    )


def factors_of(usage: RunUsage, bill: Bill) -> Factors | None:
    """Return the factors of the cost of a correct answer; None without one."""
    if not usage.correct or not usage.generated_tokens:
        return None
    return Factors(
        cpm_usd=bill.total / (usage.all_tokens / MILLION),
        reasoning_million_tokens=usage.generated_tokens / usage.trajectories / MILLION,
        rollout_ratio=usage.all_tokens / usage.generated_tokens - 1,
        accept_ratio=usage.correct / usage.trajectories,
    )


def multiplies_to(cost_per_correct: float | None, factors: Factors | None) -> bool:
    """Return whether the product of the factors is the cost per correct answer; a run without one has neither."""
    if factors is None or cost_per_correct is None:
        return factors is None and cost_per_correct is None
    return math.isclose(factors.product(), cost_per_correct, rel_tol=EXACT)


def miscounted(usage: RunUsage) -> tuple[str, ...]:
    """Return the counts of which a part exceeds the whole: run, workers and gateway count independently."""
    pairs: dict[str, tuple[int, int | None]] = {
        "trajectories": (usage.correct, usage.trajectories),
        "turns": (usage.turns, usage.dedicated_turns + usage.borrowed_turns),
        "tokens": (usage.generated_tokens, usage.pool_tokens),
    }
    most = 1 + MISCOUNTED_SHARE_MIN
    return tuple(name for name, (part, whole) in pairs.items() if whole is not None and part > whole * most)


def _held_usd(seconds: float, prices: CostSettings, *, more: bool = False) -> float:
    """Return the price of the devices that the job holds, busy or not; with `more`, of one in addition."""
    return seconds / HOUR_S * prices.dedicated_usd_per_hour * (prices.dedicated_devices + more)
