"""Advantages: how much better each trajectory went than its group (GRPO), so that no value model is needed.

Divided by the spread of the group, a rare success among many failures weighs more than one among equals. Trajectories
that wrote too much lose reward first (DAPO's soft overlong punishment). An agent that edits its conversation leaves a
trajectory of several branches, `NAME`, `NAME~1`, `NAME~2`: one member of the group, with one reward and one advantage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Scale = Literal["spread", "none"]

SPREAD_FLOOR = 1e-4  # added, so that rewards that differ by a rounding error do not become large advantages

BRANCH = re.compile(r"~\d+$")


def member_of(trajectory_id: str) -> str:
    """Return the name of the trajectory that this is a branch of, or the name itself."""
    return BRANCH.sub("", trajectory_id)


def member_advantages(rewards: Sequence[tuple[str, float]], scale: Scale = "spread") -> list[float] | None:
    """Return an advantage per (name, reward) of a group, or None unless there are two members to compare.

    The reward of a member is that of its branch that lost most for its length.
    """
    members: list[float] = []
    places: dict[str, int] = {}  # of the newest member of a name
    place_of: list[int] = []
    for name, reward in rewards:
        member = member_of(name)
        if member == name or member not in places:
            places[member] = len(members)
            members.append(reward)
        place = places[member]
        members[place] = min(members[place], reward)
        place_of.append(place)
    if len(members) < 2:
        return None
    found = group_advantages(members, scale)
    return [found[place] for place in place_of]


def group_advantages(rewards: Sequence[float], scale: Scale = "spread") -> list[float]:
    """Return an advantage per reward; their sum is zero. The spread is that of a sample (n - 1)."""
    assert len(rewards) >= 2, "a group of one has nothing to compare with"
    mean = sum(rewards) / len(rewards)
    differences = [reward - mean for reward in rewards]
    if scale == "none":
        return differences
    spread = (sum(difference**2 for difference in differences) / (len(rewards) - 1)) ** 0.5
    return [difference / (spread + SPREAD_FLOOR) for difference in differences]


def overlong_loss(tokens: int, tokens_max: int, buffer_tokens: int, penalty: float = 1.0) -> float:
    """Return the reward lost: 0 up to the buffer before the limit, then more per token. A limit of 0 is none."""
    if not tokens_max or tokens <= tokens_max - buffer_tokens:
        return 0.0
    if tokens >= tokens_max:
        return penalty
    return penalty * (tokens - (tokens_max - buffer_tokens)) / buffer_tokens
