"""Bounded staleness: how far rollouts may run ahead of the trainer in an asynchronous job (as in AReaL).

The staleness of a token is the number of versions between the weights that sampled it and the weights that train on
it. Rollouts never stop, and two rules keep every token within `max_staleness` versions.

*Throttling.* A batch is `groups` groups. A group may begin only while the groups begun so far, without dropped ones,
stay within (seen + max_staleness + 1) batches; `seen` counts the batches whose update every worker runs. Suppose a
group begins then, and groups are taken in the order they began. It is taken at the latest in batch seen +
max_staleness + 1, which trains the weights that `seen + max_staleness` batches made. Its tokens are of `seen` batches
or more, so they are within the bound. The bound on unfinished groups also bounds the buffer.

*0 is the synchronous schedule*: groups begin after every worker has the weights, and a batch ends the step. Only then
may more groups be in progress than the batch lacks (`draw_ahead`); those that it does not need are surplus.

*Dropping.* The trainer takes the oldest complete groups, so faster groups may overtake a slow one until it is too old.
That group is dropped and reported. If this happens to all groups, `Unmet` tells by how much rollouts are too slow.

A batch that made no new version (nothing to train on, a loss spike) counts as seen: it made no token older. A resumed
job first draws `again` the groups that were drawn before and that no batch had taken.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from rose.core.groups import Draw, Drop, GroupAged, GroupRules, Keep, StepGroups, decide_group
from rose.core.trajectory import Trajectory

NO_NUMBER = -1  # of a version that was never published
STALE_IN_A_ROW = 3  # groups dropped for their age since the last batch, or a batch of them, before `Unmet`


@dataclass(frozen=True, slots=True)
class StalenessRules:
    """The bound and the batch size. `batches` is the number of the whole job: no group begins beyond them."""

    max_staleness: int
    batch_groups: int
    batches: int


@dataclass(frozen=True, slots=True)
class Unmet:
    """Consecutive groups are too old: rollouts must be `speed_needed` times as fast, or the bound wider."""

    groups: int
    versions: int  # between the last of them and the weights
    max_staleness: int
    speed_needed: float


def may_begin(rules: StalenessRules, *, seen: int, taken: int, outstanding: int) -> int:
    """Return how many groups may begin now.

    `taken` counts batches, and `seen` those of them that reached the workers. `outstanding` counts groups that began
    and were neither taken nor dropped.
    """
    assert 0 <= seen <= taken, f"{seen} batches have reached the workers, of {taken} taken"
    batches = min(seen + rules.max_staleness + 1, rules.batches)
    return max(0, (batches - taken) * rules.batch_groups - outstanding)


def version_number(label: str) -> int | None:
    """Return the number that a version's name begins with (`12`, or `12-` and a hash), or None."""
    digits = label.partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Return the oldest version that sampled one of their tokens, or None; a name without a number is the oldest."""
    names = {version for trajectory in trajectories for version in trajectory.versions_used()}
    numbers = [version_number(name) for name in names]
    return min((NO_NUMBER if number is None else number for number in numbers), default=None)


def speed_needed(versions: int, max_staleness: int) -> float:
    """Return how many times as fast a group must end that spanned `versions` after its first."""
    return (versions + 1) / (max_staleness + 1)


class GroupStream:
    """The groups of a job. Draw what `to_draw` returns and report all that happens.

    A group is drawn, ends (`finished`, `lost`), arrives with its tokens (`arrived`), and is taken in a batch, or is
    dropped before that.
    """

    def __init__(
        self,
        rules: GroupRules,
        bound: StalenessRules,
        *,
        next_group: int = 0,
        taken: int = 0,
        again: Sequence[int] = (),
    ) -> None:
        assert rules.groups >= 1 and rules.size >= 2 and rules.draws_max >= rules.groups and rules.draw_ahead >= 1.0
        assert rules.train_size == 0 or 2 <= rules.train_size <= rules.size
        assert all(group < next_group for group in again), f"some of groups {again} were never drawn"
        self.rules, self.next_group = rules, next_group
        self.taken, self.seen, self._bound = taken, taken, bound
        self.is_synchronous = bound.max_staleness == 0
        self._again = deque(sorted(again))
        self._open: dict[int, dict[int, float | None]] = {}  # by group, rewards of ended members; None for lost ones
        self._kept: dict[int, Keep] = {}  # complete and kept; their tokens have not arrived
        self._arrived: dict[int, int | None] = {}  # arrived, with the oldest version of its tokens
        self._counts: Counter[str] = Counter()
        self._drawn = self._stale_in_a_row = self._age = 0
        self._is_over = False

    @property
    def outstanding(self) -> int:
        return len(self._open) + len(self._kept) + len(self._arrived)

    @property
    def under_way(self) -> set[int]:
        """Return the groups whose tokens have not arrived."""
        return {*self._open, *self._kept}

    @property
    def ready(self) -> int:
        return len(self._arrived)

    @property
    def not_taken(self) -> set[int]:
        """Return the undecided groups and those still to be drawn again."""
        return {*self._open, *self._kept, *self._arrived, *self._again}

    def to_draw(self) -> list[Draw]:
        """Return the groups to begin now: within the bound, and at most `draws_max` since the last batch."""
        if self._is_over:
            return []
        complete = len(self._kept) + len(self._arrived)
        missing = may_begin(self._bound, seen=self.seen, taken=self.taken, outstanding=complete)
        wanted = ceil(missing * self.rules.draw_ahead) if self.is_synchronous else missing
        count = max(0, min(wanted - len(self._open), self._draws_max - self._drawn))
        draws = []
        for _ in range(count):
            if self._again:
                group = self._again.popleft()
            else:
                group, self.next_group = self.next_group, self.next_group + 1
            draws.append(Draw(group, self.rules.size))
        self._open |= {draw.group: {} for draw in draws}
        self._counts["drawn"] += count
        self._drawn += count
        return draws

    def on_finished(self, group: int, member: int, reward: float) -> Keep | Drop | None:
        """Record a reward, and return the decision on the group once its last member has ended."""
        assert isfinite(reward), f"the reward of member {member} of group {group} is {reward}"
        return self._end_member(group, member, reward)

    def on_lost(self, group: int, member: int) -> Keep | Drop | None:
        """Record that a member will have no reward."""
        return self._end_member(group, member, None)

    def on_arrived(self, group: int, trajectories: Sequence[Trajectory]) -> Drop | None:
        """Store the tokens of a kept group; drop it if fewer than two trajectories arrived."""
        if self._kept.pop(group, None) is None:
            return None
        if len(trajectories) < 2:
            self._counts["lost"] += 1
            return Drop(group, "lost")
        self._arrived[group] = oldest_version(trajectories)
        return None

    def drop_stale(self, version: int) -> list[tuple[GroupAged, Drop]]:
        """Drop and return the arrived groups that are too old for weights of this version."""
        ages = {group: version - oldest for group, oldest in self._arrived.items() if oldest is not None}
        dropped = []
        for group, age in sorted(ages.items()):
            if age > self._bound.max_staleness:
                del self._arrived[group]
                self._counts["stale"] += 1
                self._stale_in_a_row, self._age = self._stale_in_a_row + 1, age
                dropped.append((GroupAged(group, age), Drop(group, "stale")))
        return dropped

    def batch(self, version: int) -> tuple[int, ...] | None:
        """Take the oldest arrived groups for weights of this version; return None while there are too few.

        A batch is short, perhaps empty, only if no more may be drawn and nothing is pending. Call `drop_stale` before.
        """
        is_over = not self.under_way and self._drawn >= self._draws_max
        if len(self._arrived) < self._bound.batch_groups and not is_over:
            return None
        groups = tuple(sorted(self._arrived)[: self._bound.batch_groups])
        for group in groups:
            oldest = self._arrived.pop(group)
            assert oldest is None or version - oldest <= self._bound.max_staleness, f"group {group} is too old"
        self._counts["kept"] = len(groups)
        self.taken, self._drawn = self.taken + 1, 0
        self._stale_in_a_row *= not groups
        return groups

    def drop_surplus(self) -> list[Drop]:
        """Drop the groups that a synchronous step began and its batch did not need, once the batch is taken."""
        surplus = [Drop(group, "surplus") for group in sorted(self._open)] if self.is_synchronous else []
        for drop in surplus:
            del self._open[drop.group]
        self._counts["surplus"] += len(surplus)
        return surplus

    def on_reached(self, batches: int) -> None:
        """Record that every worker runs the version that `batches` batches made."""
        self.seen = max(self.seen, min(batches, self.taken))

    @property
    def unmet(self) -> Unmet | None:
        """Return how the bound is missed, by the groups since the last batch, or None."""
        if self._stale_in_a_row < max(STALE_IN_A_ROW, self._bound.batch_groups):
            return None
        most = self._bound.max_staleness
        return Unmet(self._stale_in_a_row, self._age, most, speed_needed(self._age, most))

    def end(self) -> list[Drop]:
        """End the job and return the remaining groups, which are surplus."""
        self._is_over = True
        surplus = [Drop(group, "surplus") for group in sorted({*self._open, *self._kept, *self._arrived})]
        self._open.clear()
        self._kept.clear()
        self._arrived.clear()
        return surplus

    def counts(self) -> StepGroups:
        return StepGroups(**self._counts)

    def take_counts(self) -> StepGroups:
        """Return and reset the counts."""
        counts = self.counts()
        self._counts.clear()
        return counts

    @property
    def _draws_max(self) -> int:
        """Return the most groups one batch may draw; a synchronous step that keeps every group replaces none."""
        is_fixed = self.is_synchronous and not self.rules.dynamic_sampling
        return self.rules.groups if is_fixed else self.rules.draws_max

    def _end_member(self, group: int, member: int, reward: float | None) -> Keep | Drop | None:
        assert 0 <= member < self.rules.size and 0 <= group < self.next_group, f"no member {member} of group {group}"
        members = self._open.get(group)
        if members is None or member in members:  # counted before, or the group is decided
            self._counts["repeated"] += 1
            return None
        self._counts["trajectories"] += reward is not None
        members[member] = reward
        if len(members) < self.rules.size:
            return None
        del self._open[group]
        rewards = {member: reward for member, reward in members.items() if reward is not None}
        is_full = self.is_synchronous and len(self._kept) + len(self._arrived) >= self._bound.batch_groups
        decision = Drop(group, "surplus") if is_full else decide_group(group, rewards, self.rules)
        if isinstance(decision, Keep):
            self._kept[group] = decision
        else:
            self._counts[decision.reason] += 1
        return decision
