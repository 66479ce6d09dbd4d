"""Groups of trajectories: which to draw, which to learn from, which are too many.

A group is one task played several times by the same model. What a trajectory teaches is how much better or worse it
went than the others of its group, so a group in which all went alike teaches nothing. With *dynamic sampling*
(DAPO) such a group is dropped and another task drawn in its place, up to a limit per step: a model that fails
everywhere would otherwise draw for ever.

Large groups find rare successes, but training costs more per trajectory than generating it. So of a large group
only the members whose rewards spread most are trained on. That set is always some of the worst and some of the
best: moving a member outwards never lowers the variance.

`Groups` keeps the books of a whole synchronous job, `core.staleness` those of an asynchronous one. Each group has
exactly one fate: kept, dropped or surplus.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Literal

SPREAD_MIN = 1e-6
"""Standard deviation of rewards below which a group counts as all alike."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """`train_size` 0 trains on every member. `draws_max` bounds the groups drawn in one step."""

    groups: int = 8
    size: int = 8
    train_size: int = 0
    dynamic_sampling: bool = True
    draws_max: int = 32
    draw_ahead: float = 1.0  # groups under way per group still missing; more than 1 makes some of them surplus


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
    """Forget the group; nothing of it is trained on."""

    group: int
    reason: Literal["alike", "lost", "surplus", "stale"]


@dataclass(frozen=True, slots=True)
class MemberEnded:
    """A fact: how one trajectory ended. A lost one has no reward."""

    trajectory_id: str
    group: int
    member: int
    reward: float
    is_success: bool
    turns: int
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class GroupAged:
    """A fact: so many versions lie between the oldest token of a group and the weights that would learn from it."""

    group: int
    versions: int


@dataclass(frozen=True, slots=True)
class StepGroups:
    """What became of the groups of one step. drawn = kept + alike + lost + surplus once it is over.

    Where rollouts never stop these are the groups that met their fate since the step before, and some were `stale`.
    """

    drawn: int = 0
    kept: int = 0
    alike: int = 0
    lost: int = 0
    surplus: int = 0
    trajectories: int = 0
    repeated: int = 0  # reports of a member that was counted before
    stale: int = 0  # older than an asynchronous job may learn from

    @property
    def total(self) -> int:
        """Groups that were judged; kept / total is what a starving job shows first."""
        return self.kept + self.alike + self.lost + self.stale


class OpenGroup:
    """The members that have ended so far, of a group under way."""

    __slots__ = ("lost", "rewards")

    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}
        self.lost: set[int] = set()

    def has(self, member: int) -> bool:
        return member in self.rewards or member in self.lost

    def is_complete(self, size: int) -> bool:
        return len(self.rewards) + len(self.lost) >= size


class GroupBooks(ABC):
    """Groups under way. Whoever inherits says when to draw, and what becomes of a group that is over.

    A group is numbered once and for ever, and each of its members counts once, however often it is reported.
    """

    def __init__(self, rules: GroupRules, next_group: int) -> None:
        self.rules, self.next_group = rules, next_group
        self._open: dict[int, OpenGroup] = {}
        self._counts: Counter[str] = Counter()

    def finished(self, group: int, member: int, reward: float) -> Keep | Drop | None:
        """A member has its reward. Says what becomes of the group, once its last member has ended."""
        assert isfinite(reward), f"the reward of member {member} of group {group} is {reward}"
        state = self._new_member(group, member)
        if state is None:
            return None
        self._counts["trajectories"] += 1
        state.rewards[member] = reward
        return self._judged(group, state)

    def lost(self, group: int, member: int) -> Keep | Drop | None:
        """A member will never have a reward; the others make do without it."""
        state = self._new_member(group, member)
        if state is None:
            return None
        state.lost.add(member)
        return self._judged(group, state)

    def counts(self) -> StepGroups:
        return StepGroups(**self._counts)

    @abstractmethod
    def _fate(self, group: int, rewards: Mapping[int, float]) -> Keep | Drop:
        """What becomes of a group that is over; to be counted, too."""

    def _draw(self, count: int) -> list[Draw]:
        draws = [Draw(self._number(), self.rules.size) for _ in range(count)]
        self._open |= {draw.group: OpenGroup() for draw in draws}
        self._counts["drawn"] += len(draws)
        return draws

    def _number(self) -> int:
        """Of another group."""
        self.next_group += 1
        return self.next_group - 1

    def _new_member(self, group: int, member: int) -> OpenGroup | None:
        """The member's group, or None if it was counted before or its group has met its fate."""
        assert 0 <= member < self.rules.size and 0 <= group < self.next_group, f"no member {member} of group {group}"
        state = self._open.get(group)
        if state is None or state.has(member):
            self._counts["repeated"] += 1
            return None
        return state

    def _judged(self, group: int, state: OpenGroup) -> Keep | Drop | None:
        if not state.is_complete(self.rules.size):
            return None
        del self._open[group]
        return self._fate(group, state.rewards)


class Groups(GroupBooks):
    """One per job. Draw what `to_draw` says, report every member once it ends, do what the reports return."""

    def __init__(self, rules: GroupRules, next_group: int = 0) -> None:
        assert rules.groups >= 1 and rules.size >= 2 and rules.draws_max >= rules.groups and rules.draw_ahead >= 1.0
        assert rules.train_size == 0 or 2 <= rules.train_size <= rules.size
        super().__init__(rules, next_group)

    def begin_step(self) -> None:
        """A new step; the one before must be over."""
        assert not self._open, f"groups {sorted(self._open)} are still under way"
        self._counts.clear()

    @property
    def missing(self) -> int:
        """Groups the step still lacks."""
        return max(0, self.rules.groups - self._counts["kept"])

    @property
    def is_complete(self) -> bool:
        """Whether the step can be trained: it has its groups, or nothing is under way and no more may be drawn."""
        return not self.missing or (not self._open and not self._may_draw())

    def to_draw(self) -> list[Draw]:
        """Groups to start now, so that those under way make up for those missing."""
        wanted = ceil(self.missing * self.rules.draw_ahead) - len(self._open)
        return self._draw(min(wanted, self._may_draw()))

    def end_step(self) -> tuple[list[Drop], StepGroups]:
        """The step is over: what is still under way is surplus, to be cancelled. And what became of all."""
        surplus = [Drop(group, "surplus") for group in sorted(self._open)]
        self._counts["surplus"] += len(surplus)
        self._open.clear()
        return surplus, self.counts()

    def _may_draw(self) -> int:
        limit = self.rules.draws_max if self.rules.dynamic_sampling else self.rules.groups
        return max(0, limit - self._counts["drawn"])

    def _fate(self, group: int, rewards: Mapping[int, float]) -> Keep | Drop:
        fate = fate_of(group, rewards, self.rules) if self.missing else Drop(group, "surplus")
        self._counts["kept" if isinstance(fate, Keep) else fate.reason] += 1
        return fate


def fate_of(group: int, rewards: Mapping[int, float], rules: GroupRules) -> Keep | Drop:
    """What becomes of a group that is over, by the rewards of those of its members that were not lost."""
    members = sorted(rewards)
    values = [rewards[member] for member in members]
    if len(members) < 2:
        return Drop(group, "lost")
    if rules.dynamic_sampling and spread(values) < SPREAD_MIN:
        return Drop(group, "alike")
    chosen = most_spread(values, rules.train_size or len(members))
    return Keep(group, tuple(members[index] for index in chosen))


def spread(rewards: Sequence[float]) -> float:
    """Standard deviation."""
    mean = sum(rewards) / len(rewards)
    return (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5


def most_spread(rewards: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` rewards whose variance is largest; of equals the earlier ones, and as even as can be."""
    if count >= len(rewards):
        return list(range(len(rewards)))
    worst = sorted(range(len(rewards)), key=lambda index: (rewards[index], index))
    best = sorted(range(len(rewards)), key=lambda index: (-rewards[index], index))

    def taken(low: int) -> list[int]:
        """`low` of the worst; the best fill up. When all are alike the two lists overlap."""
        chosen = worst[:low]
        return chosen + [index for index in best if index not in chosen][: count - low]

    even = count // 2
    lows = sorted(range(count + 1), key=lambda low: abs(low - even))
    found = max(lows, key=lambda low: round(spread([rewards[index] for index in taken(low)]), 9))
    return sorted(taken(found))
