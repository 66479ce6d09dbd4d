"""Bounded staleness: how far rollouts may run ahead of a trainer that learns while they go on.

A token is as stale as there are versions between the weights that wrote it and the weights that learn from it. In an
asynchronous job (as in AReaL) rollouts never stop, and two things keep every token within `max_staleness` versions.

*Throttling.* A batch is `groups` groups. A group may begin only while the groups begun so far, those thrown away not
counted, stay within (seen + max_staleness + 1) batches, where `seen` counts the batches whose update every worker
runs. Say a group begins then. Whoever takes groups in the order they began takes it in batch seen + max_staleness + 1
at the latest, that is, to change the weights that `seen + max_staleness` batches made; and it was written by weights
of `seen` batches or more. So its tokens are within the bound. 0 is the synchronous schedule, and the bound on what is
under way bounds the buffer too.

*Dropping.* Groups do not end in the order they began: the trainer takes whichever have ended, oldest first, and a slow
group may be overtaken until it is too old. It is then dropped, whole, and told. If that is what becomes of all of them,
`Unmet` says by how much rollouts are too slow for the bound.

A batch that made no new version (nothing to learn from, a spike) counts as seen like any other: it made nothing older.

A job that goes on after it was stopped draws `again` first: groups that had been drawn and that no batch had taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rose.core.groups import Draw, Drop, GroupAged, GroupBooks, GroupRules, Keep, StepGroups, fate_of
from rose.core.trajectory import Trajectory

NO_NUMBER = -1  # of a version that nobody has published
STALE_IN_A_ROW = 3  # groups dropped for their age since the last batch, or a batch of them, before it is said


@dataclass(frozen=True, slots=True)
class StalenessRules:
    """`batches` is how many the whole job takes: nothing is begun that no batch would need."""

    max_staleness: int
    batch_groups: int
    batches: int


@dataclass(frozen=True, slots=True)
class Unmet:
    """Groups are too old one after the other: rollouts must be `speed_needed` times as quick, or the bound wider."""

    groups: int
    versions: int  # that lie between the last of them and the weights
    max_staleness: int
    speed_needed: float


def may_begin(rules: StalenessRules, *, seen: int, taken: int, outstanding: int) -> int:
    """How many groups may begin now. `taken` counts batches, `outstanding` groups begun and neither taken nor dropped.

    `seen` of the batches taken have reached the workers.
    """
    assert 0 <= seen <= taken, f"{seen} batches have reached the workers, of {taken} taken"
    batches = min(seen + rules.max_staleness + 1, rules.batches)
    return max(0, (batches - taken) * rules.batch_groups - outstanding)


def version_number(label: str) -> int | None:
    """A version's name begins with its number: `12`, or `12-` and a hash. None if it does not."""
    digits = label.partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """The oldest that wrote one of their tokens; None if none was written. One without a number is before all."""
    names = {version for trajectory in trajectories for version in trajectory.versions_used()}
    numbers = [version_number(name) for name in names]
    return min((NO_NUMBER if number is None else number for number in numbers), default=None)


def speed_needed(versions: int, max_staleness: int) -> float:
    """How many times as quick a group would have to end: its life touched so many versions after its first one."""
    return (versions + 1) / (max_staleness + 1)


class GroupStream(GroupBooks):
    """The books of groups in an asynchronous job. Draw what `to_draw` says and report all that happens.

    A group is drawn, ends (`finished`, `lost`), arrives with its tokens (`arrived`), and is taken in a batch, or is
    dropped on the way. Each has exactly one fate, and each member counts once, however often it is reported.
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
        assert all(group < next_group for group in again), f"of groups {again} some were never drawn"
        super().__init__(rules, next_group)
        self.taken, self.seen, self._bound = taken, taken, bound
        self._again = deque(sorted(again))
        self._coming: dict[int, Keep] = {}  # over and worth training on; the tokens are on their way
        self._ready: dict[int, int | None] = {}  # here, with the oldest version that wrote one of its tokens
        self._drawn = self._stale_in_a_row = self._age = 0
        self._is_over = False

    @property
    def outstanding(self) -> int:
        return len(self._open) + len(self._coming) + len(self._ready)

    @property
    def under_way(self) -> set[int]:
        """Groups whose tokens have not arrived and may yet be wanted."""
        return {*self._open, *self._coming}

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def not_taken(self) -> set[int]:
        """Groups that have met no fate, and those that are still to be drawn again."""
        return {*self._open, *self._coming, *self._ready, *self._again}

    def to_draw(self) -> list[Draw]:
        """Groups to begin now: as the bound allows, and no more since the last batch than `draws_max`."""
        if self._is_over:
            return []
        allowed = may_begin(self._bound, seen=self.seen, taken=self.taken, outstanding=self.outstanding)
        draws = self._draw(min(allowed, self.rules.draws_max - self._drawn))
        self._drawn += len(draws)
        return draws

    def arrived(self, group: int, trajectories: Sequence[Trajectory]) -> Drop | None:
        """The tokens to train on are here; too few of them are of no use."""
        if self._coming.pop(group, None) is None:
            return None
        if len(trajectories) < 2:
            self._counts["lost"] += 1
            return Drop(group, "lost")
        self._ready[group] = oldest_version(trajectories)
        return None

    def drop_stale(self, version: int) -> list[tuple[GroupAged, Drop]]:
        """Those of the groups here that are too old for weights of this version."""
        ages = {group: version - oldest for group, oldest in self._ready.items() if oldest is not None}
        dropped = []
        for group, age in sorted(ages.items()):
            if age > self._bound.max_staleness:
                del self._ready[group]
                self._counts["stale"] += 1
                self._stale_in_a_row, self._age = self._stale_in_a_row + 1, age
                dropped.append((GroupAged(group, age), Drop(group, "stale")))
        return dropped

    def batch(self, version: int) -> tuple[int, ...] | None:
        """The oldest groups that are here, for weights of this version; None while there are too few.

        Fewer than a batch, perhaps none, only if no more may be drawn and nothing is on its way. To be called after
        `drop_stale`.
        """
        is_over = not self.under_way and self._drawn >= self.rules.draws_max
        if len(self._ready) < self._bound.batch_groups and not is_over:
            return None
        groups = tuple(sorted(self._ready)[: self._bound.batch_groups])
        for group in groups:
            oldest = self._ready.pop(group)
            assert oldest is None or version - oldest <= self._bound.max_staleness, f"group {group} is too old"
        self._counts["kept"] = len(groups)
        self.taken, self._drawn = self.taken + 1, 0
        self._stale_in_a_row *= not groups
        return groups

    def reached(self, batches: int) -> None:
        """Every worker runs what so many batches made."""
        self.seen = max(self.seen, min(batches, self.taken))

    @property
    def unmet(self) -> Unmet | None:
        """Whether the bound cannot be met, by the groups that came since the last batch."""
        if self._stale_in_a_row < max(STALE_IN_A_ROW, self._bound.batch_groups):
            return None
        most = self._bound.max_staleness
        return Unmet(self._stale_in_a_row, self._age, most, speed_needed(self._age, most))

    def end(self) -> list[Drop]:
        """The job is over, and nothing more begins: what is still there is surplus."""
        self._is_over = True
        surplus = [Drop(group, "surplus") for group in sorted({*self._open, *self._coming, *self._ready})]
        self._open.clear()
        self._coming.clear()
        self._ready.clear()
        return surplus

    def take_counts(self) -> StepGroups:
        """What became of groups since the last time this was asked."""
        counts = self.counts()
        self._counts.clear()
        return counts

    def _number(self) -> int:
        return self._again.popleft() if self._again else super()._number()

    def _fate(self, group: int, rewards: Mapping[int, float]) -> Keep | Drop:
        fate = fate_of(group, rewards, self.rules)
        if isinstance(fate, Keep):
            self._coming[group] = fate
        else:
            self._counts[fate.reason] += 1
        return fate
