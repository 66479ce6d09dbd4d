"""Usage of a run, from its records: its steps, how long it evaluated, and which requests of users came late.

The bill is of steps: evaluations are priced apart, and starting up or switching a comparison is neither's. So where
rollouts never stop, trajectories that ended between two steps are left out, like the time in which they did.

Where there are steps with and without the borrowed device, the bill is of those with it, and those without say how long
rollouts of as many tokens would have taken (*measured*). Otherwise the dedicated worker's own pace says it
(*estimated*): alone, it would have had all turns to play. A run without a dedicated worker would have had to rent a
device like the borrowed one (*rented*), and one that borrowed nothing would have cost the *same*.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from rose.cost.bill import FixedBasis, RunUsage
from rose.run.run_records import LendingRecord, StepRecord
from rose.run.serving_traffic import UserRequest

COMPARED_STEPS_MIN = 2
"""Steps of each kind that a comparison needs: a single step says little about the pace of a run."""


def usage_of(
    steps: Sequence[StepRecord], *, evaluation_s: float = 0.0, breaches: float = 0.0, headroom_share: float = 0.0
) -> RunUsage:
    """Return what the steps used; fields that older runs did not write may be missing."""
    with_device = [step for step in steps if step.is_borrowed]
    without = [step for step in steps if not step.is_borrowed]
    is_compared = min(len(with_device), len(without)) >= COMPARED_STEPS_MIN and _tokens(without) > 0
    billed = with_device if is_compared else steps
    fixed_s, basis = _measured(billed, without) if is_compared else _estimated(billed)
    return RunUsage(
        run_s=_total(billed, "step_s"),
        rollout_s=_total(billed, "rollout_s"),
        lent_s=_total(with_device, "step_s"),
        lent_rollout_s=_total(with_device, "rollout_s"),
        trajectories=_judged_total(billed, "trajectories"),
        correct=_judged_total(billed, "successes"),
        turns=_judged_total(billed, "turns"),
        generated_tokens=_judged_total(billed, "generated_tokens"),
        dedicated_turns=_pool_turns(billed, "dedicated"),
        borrowed_turns=_pool_turns(billed, "borrowed"),
        fixed_s=fixed_s,
        fixed_basis=basis,
        pool_tokens=_pool_tokens(billed),
        breaches=breaches,
        headroom_share=headroom_share if with_device else 0.0,
        transfer_bytes=_transferred(with_device),
        evaluation_s=evaluation_s,
    )


def _tokens(steps: Sequence[StepRecord]) -> int:
    return sum(step.tokens_played for step in steps)


def breaches_of(
    lent: Sequence[UserRequest], alone: Sequence[UserRequest], counted: LendingRecord | None = None
) -> float:
    """Return how many requests lending made late.

    The device itself counts them. Without its count they are the requests that missed their budget while it was lent,
    less the share that misses it anyway; all of them if serving was never observed alone.
    """
    if counted is not None:
        return float(counted.late_requests)
    judged = _judged(lent)
    others = _judged(alone)
    missed_anyway = others.count(False) / len(others) if others else 0.0
    return max(0.0, judged.count(False) - missed_anyway * len(judged))


def _measured(billed: Sequence[StepRecord], without: Sequence[StepRecord]) -> tuple[float, FixedBasis]:
    """Return the time with rollouts at the pace of the steps without the device; the rest takes what it took."""
    pace_s = _total(without, "rollout_s") / _tokens(without)
    others_s = _total(billed, "step_s") - _total(billed, "rollout_s")
    return pace_s * _tokens(billed) + others_s, "measured"


def _estimated(steps: Sequence[StepRecord]) -> tuple[float, FixedBasis]:
    """Return the time if the dedicated worker played the borrowed turns too, after its own and at its pace."""
    run_s, shared = _total(steps, "step_s"), [step for step in steps if step.is_borrowed]
    dedicated, borrowed = _pool_turns(shared, "dedicated"), _pool_turns(shared, "borrowed")
    if not borrowed:
        return run_s, "same"
    if not dedicated:
        return run_s, "rented"
    return run_s + _total(shared, "rollout_s") * borrowed / dedicated, "estimated"


def _transferred(steps: Sequence[StepRecord]) -> int | None:
    """Return the bytes that the borrowed device fetched: every version once, as it was encoded."""
    known = [step.weights_bytes for step in steps if isinstance(step.weights_bytes, int)]
    return sum(known) if known else None


def _judged(served: Sequence[UserRequest]) -> list[bool]:
    return [row.attained for row in served if row.attained is not None]


def _total(steps: Sequence[StepRecord], key: str) -> float:
    return sum(getattr(step, key) for step in steps)


def _judged_total(steps: Sequence[StepRecord], key: str) -> int:
    """Return the sum over trajectories that ended within steps; all did unless the step says otherwise."""
    return sum(getattr(step if step.in_step is UNSET else step.in_step, key) for step in steps)


def _pool_tokens(steps: Sequence[StepRecord]) -> int | None:
    known = [step.pool_tokens for step in steps if step.pool_tokens is not None]
    return sum(known) if len(known) == len(steps) else None


def _pool_turns(steps: Sequence[StepRecord], kind: str) -> int:
    return sum(step.turns_by_pool.get(kind, 0) for step in steps)
