"""What a run used, from the lines it wrote: the step lines, how long it evaluated, and what users lost meanwhile.

The bill is of steps: evaluations are priced apart, and starting up or switching a comparison is neither's. So where
rollouts never stop, trajectories that ended between two steps are left out, like the time in which they did.

Where there are steps with and without the borrowed device, the bill is of those with it, and those without say how long
rollouts of as many tokens would have taken (*measured*). Otherwise the dedicated worker's own pace says it
(*estimated*): alone, it would have had all turns to play. A run without a dedicated worker would have had to rent a
device like the borrowed one (*rented*), and one that borrowed nothing would have cost the *same*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.cost.bill import FixedBasis, Usage

Line = dict[str, Any]
COMPARED_STEPS_MIN = 2
"""Of each kind: a single step says little about the pace of a run."""


def usage_of(
    steps: Sequence[Line], *, evaluation_s: float = 0.0, breaches: float = 0.0, headroom_share: float = 0.0
) -> Usage:
    """`steps` are the step lines of metrics.jsonl; keys that older runs did not write may be missing."""
    with_device = [step for step in steps if step["is_borrowed"]]
    without = [step for step in steps if not step["is_borrowed"]]
    is_compared = min(len(with_device), len(without)) >= COMPARED_STEPS_MIN and sum(map(tokens_played, without)) > 0
    billed = with_device if is_compared else steps
    fixed_s, basis = _measured(billed, without) if is_compared else _estimated(billed)
    return Usage(
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


def tokens_played(step: Line) -> int:
    """What a step's time is held against: tokens of judged trajectories, or, where rollouts never stop, the pool's."""
    return int(step["pool_tokens" if "in_step" in step else "generated_tokens"])


def breaches_of(lent: Sequence[Line], alone: Sequence[Line], told: dict[str, int] | None = None) -> float:
    """Requests that lending made late.

    The device itself knows (`told`: its breaches by objective). Without its word they are the requests that missed
    their budget while it was lent, less the share that misses it anyway; where nobody looked at serving alone, all.
    """
    if told is not None:
        return float(told.get("ttft", 0) + told.get("tpot", 0))
    judged = _judged(lent)
    others = _judged(alone)
    missed_anyway = others.count(False) / len(others) if others else 0.0
    return max(0.0, judged.count(False) - missed_anyway * len(judged))


def _measured(billed: Sequence[Line], without: Sequence[Line]) -> tuple[float, FixedBasis]:
    """Rollouts at the seconds per token of the steps without the device; the rest takes what it took."""
    pace_s = _total(without, "rollout_s") / sum(map(tokens_played, without))
    others_s = _total(billed, "step_s") - _total(billed, "rollout_s")
    return pace_s * sum(map(tokens_played, billed)) + others_s, "measured"


def _estimated(steps: Sequence[Line]) -> tuple[float, FixedBasis]:
    """The dedicated worker plays the borrowed device's turns too, after its own and at the same pace."""
    run_s, shared = _total(steps, "step_s"), [step for step in steps if step["is_borrowed"]]
    dedicated, borrowed = _pool_turns(shared, "dedicated"), _pool_turns(shared, "borrowed")
    if not borrowed:
        return run_s, "same"
    if not dedicated:
        return run_s, "rented"
    return run_s + _total(shared, "rollout_s") * borrowed / dedicated, "estimated"


def _transferred(steps: Sequence[Line]) -> int | None:
    """What the borrowed device fetched: every version once, as it was encoded for the way."""
    known = [step["weights_bytes"] for step in steps if step.get("weights_bytes") is not None]
    return sum(known) if known else None


def _judged(served: Sequence[Line]) -> list[bool]:
    return [row["attained"] for row in served if row["attained"] is not None]


def _total(steps: Sequence[Line], key: str) -> float:
    return sum(step[key] for step in steps)


def _judged_total(steps: Sequence[Line], key: str) -> int:
    """Of trajectories that ended within steps; where that is not told apart, there were no others."""
    return sum(step.get("in_step", step)[key] for step in steps)


def _pool_tokens(steps: Sequence[Line]) -> int | None:
    known = [step["pool_tokens"] for step in steps if "pool_tokens" in step]
    return sum(known) if len(known) == len(steps) else None


def _pool_turns(steps: Sequence[Line], kind: str) -> int:
    return sum(step["turns_by_pool"].get(kind, 0) for step in steps)
