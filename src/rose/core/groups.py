"""Groups of trajectories: which to draw, which to train on, and which to cancel as surplus.

A group is one task played several times by the same model. Training compares each trajectory with its group, so a
group with equal rewards (a zero-variance group, `alike`) teaches nothing. Dynamic sampling (DAPO) drops such a group
and draws another task, up to a limit per step: a model that always fails would otherwise draw forever.

Training on a trajectory costs more than generating it. Of a large group only the members with the largest reward
variance are trained on. That set is always some of the worst and some of the best.

`core.staleness` tracks the groups of a whole job. Every group is decided once: kept, dropped or surplus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SPREAD_MIN = 1e-6
"""Standard deviation of rewards below which a group has no variance."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """`train_size` 0 trains on every member. `draws_max` bounds the groups drawn in one step."""

    groups: int = 8
    size: int = 8
    train_size: int = 0
    dynamic_sampling: bool = True
    draws_max: int = 32
    draw_ahead: float = 1.0  # groups in progress per missing group of a synchronous step; above 1 some are surplus


@dataclass(frozen=True, slots=True)
class Draw:
    """Play this task `size` times."""

    group: int
    size: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Train on these members of the group."""

    group: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard the group."""

    group: int
    reason: Literal["alike", "lost", "surplus", "stale"]


@dataclass(frozen=True, slots=True)
class MemberEnded:
    """A fact: how one trajectory of a group ended. A lost one has no reward."""

    trajectory_id: str
    group: int
    member: int
    reward: float
    is_success: bool
    turns: int
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class GroupAged:
    """A fact: the distance in versions between a group's oldest token and the weights to be trained."""

    group: int
    versions: int


@dataclass(frozen=True, slots=True)
class StepGroups:
    """Counts of the groups decided since the previous step.

    In a synchronous job drawn = kept + alike + lost + surplus; in an asynchronous one some were `stale`.
    """

    drawn: int = 0
    kept: int = 0
    alike: int = 0
    lost: int = 0
    surplus: int = 0
    trajectories: int = 0
    repeated: int = 0  # reports of a member that was already counted
    stale: int = 0  # older than the staleness bound

    @property
    def total(self) -> int:
        """Return the number of decided groups; a low kept / total shows that a job lacks useful groups."""
        return self.kept + self.alike + self.lost + self.stale


def decide_group(group: int, rewards: Mapping[int, float], rules: GroupRules) -> Keep | Drop:
    """Decide on a complete group by the rewards of its members that were not lost."""
    members = sorted(rewards)
    values = [rewards[member] for member in members]
    if len(members) < 2:
        return Drop(group, "lost")
    if rules.dynamic_sampling and spread(values) < SPREAD_MIN:
        return Drop(group, "alike")
    chosen = most_spread(values, rules.train_size or len(members))
    return Keep(group, tuple(members[index] for index in chosen))


def spread(rewards: Sequence[float]) -> float:
    """Return the standard deviation of the rewards."""
    mean = sum(rewards) / len(rewards)
    return (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5


def most_spread(rewards: Sequence[float], count: int) -> list[int]:
    """Return the indices of the `count` rewards with the largest variance; ties take earlier and more even sets."""
    if count >= len(rewards):
        return list(range(len(rewards)))
    worst = sorted(range(len(rewards)), key=lambda index: (rewards[index], index))
    best = sorted(range(len(rewards)), key=lambda index: (-rewards[index], index))

    def candidate(low: int) -> list[int]:
        chosen = worst[:low]  # equal rewards may be in both lists
        return chosen + [index for index in best if index not in chosen][: count - low]

    even = count // 2
    lows = sorted(range(count + 1), key=lambda low: abs(low - even))
    chosen = max(map(candidate, lows), key=lambda indices: round(spread([rewards[index] for index in indices]), 9))
    return sorted(chosen)
