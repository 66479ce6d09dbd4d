"""How much better each trajectory went than its group: the only thing a reward is used for.

The group is its own baseline (GRPO), so no value model is needed. Divided by the spread of the group, a rare
success among many failures weighs more than one among equals; `none` leaves that out.

Trajectories that wrote too much lose reward before that (DAPO's soft overlong punishment): nothing up to a buffer
before the limit, then more with every token, and all of the penalty at the limit and beyond. Which groups are worth
training on was decided before, by the rewards that the environment gave.

An agent that edits its conversation leaves a trajectory of several branches, which the gateway hands out as `NAME`,
`NAME~1`, `NAME~2`. They are one member of the group, with one reward and one advantage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Scale = Literal["spread", "none"]

SPREAD_FLOOR = 1e-4
"""Added to the spread, so that rewards that differ by a rounding error do not become large advantages."""

BRANCH = re.compile(r"~\d+$")


def member_of(trajectory_id: str) -> str:
    """The trajectory that this is a branch of; itself, if it is none."""
    return BRANCH.sub("", trajectory_id)


def member_advantages(rewards: Sequence[tuple[str, float]], scale: Scale = "spread") -> list[float] | None:
    """One per trajectory of a group, by name and reward; None unless there are two members to compare.

    Of a member whose branches lost reward for their length the one that lost most counts.
    """
    members: list[float] = []
    places: dict[str, int] = {}  # of the newest member of a name
    of: list[int] = []
    for name, reward in rewards:
        member = member_of(name)
        if member == name or member not in places:
            places[member] = len(members)
            members.append(reward)
        place = places[member]
        members[place] = min(members[place], reward)
        of.append(place)
    if len(members) < 2:
        return None
    found = group_advantages(members, scale)
    return [found[place] for place in of]


def group_advantages(rewards: Sequence[float], scale: Scale = "spread") -> list[float]:
    """One per trajectory of a group; their sum is zero. The spread is that of a sample (n - 1)."""
    assert len(rewards) >= 2, "a group of one has nothing to compare with"
    mean = sum(rewards) / len(rewards)
    differences = [reward - mean for reward in rewards]
    if scale == "none":
        return differences
    spread = (sum(difference**2 for difference in differences) / (len(rewards) - 1)) ** 0.5
    return [difference / (spread + SPREAD_FLOOR) for difference in differences]


def overlong_loss(tokens: int, tokens_max: int, buffer_tokens: int, penalty: float = 1.0) -> float:
    """What a trajectory of so many tokens loses of its reward; never negative. A limit of 0 is none."""
    if not tokens_max or tokens <= tokens_max - buffer_tokens:
        return 0.0
    if tokens >= tokens_max:
        return penalty
    return penalty * (tokens - (tokens_max - buffer_tokens)) / buffer_tokens
