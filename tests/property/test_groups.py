"""In any order of reports each group is decided once and each member counts once."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rose.core.groups import Drop, GroupRules, Keep, most_spread, spread
from rose.core.staleness import GroupStream, StalenessRules
from rose.core.trajectory import Trajectory

TRAJECTORY = Trajectory("t", "g", (1,), (True,), (0.0,), ("0",), 0.0)
REWARDS = st.sampled_from([0.0, 0.0, 1.0, -0.1, 0.5])


class GroupMachine(RuleBasedStateMachine):
    """A job of many steps, seen from outside."""

    @initialize(
        groups=st.integers(1, 4),
        size=st.integers(2, 5),
        smaller=st.integers(0, 3),
        dynamic=st.booleans(),
        ahead=st.sampled_from([1.0, 1.5, 3.0]),
        more=st.integers(0, 6),
    )
    def begin(self, groups, size, smaller, dynamic, ahead, more):
        train_size = 0 if smaller == 0 else max(2, size - smaller)
        self.rules = GroupRules(groups, size, train_size, dynamic, groups + more, ahead)
        self.groups = GroupStream(self.rules, StalenessRules(0, groups, 1 << 30))
        self.rewards: dict[int, dict[int, float]] = {}
        self.fates: dict[int, Keep | Drop] = {}
        self.reported: set[tuple[int, int]] = set()
        self.drawn_before = 0

    @rule()
    def draw(self):
        for draw in self.groups.to_draw():
            assert draw.group not in self.rewards, "a group is drawn once"
            self.rewards[draw.group] = {}

    @rule(data=st.data(), reward=REWARDS, is_lost=st.booleans())
    def report(self, data, reward, is_lost):
        """Of any member of any group ever drawn, ended or not, reported before or not."""
        if not self.rewards:
            return
        group = data.draw(st.sampled_from(sorted(self.rewards)))
        member = data.draw(st.integers(0, self.rules.size - 1))
        is_new = (group, member) not in self.reported and group not in self.fates
        self.reported.add((group, member))
        if is_new and not is_lost:
            self.rewards[group][member] = reward
        fate = self.groups.on_lost(group, member) if is_lost else self.groups.on_finished(group, member, reward)
        if fate is not None:
            assert is_new and fate.group == group
            self.fates[group] = fate
            self.check(fate)
            if isinstance(fate, Keep):
                assert self.groups.on_arrived(group, [TRAJECTORY] * len(fate.members)) is None

    @rule()
    def next_step(self):
        if self.groups.batch(0) is None:
            return
        surplus = self.groups.drop_surplus()
        counts = self.groups.take_counts()
        for drop in surplus:
            assert drop.group not in self.fates
            self.fates[drop.group] = drop
        assert set(self.fates) == set(self.rewards), "after a step every group has met its fate"
        drawn = [fate for group, fate in self.fates.items() if group >= self.drawn_before]
        kinds = Counter("kept" if isinstance(fate, Keep) else fate.reason for fate in drawn)
        assert (counts.kept, counts.alike, counts.lost, counts.surplus) == tuple(
            kinds[kind] for kind in ("kept", "alike", "lost", "surplus")
        )
        assert counts.drawn == len(drawn) == counts.total + counts.surplus
        assert counts.trajectories == sum(
            len(self.rewards[group]) for group in self.rewards if group >= self.drawn_before
        )
        self.drawn_before = self.groups.next_group
        self.groups.on_reached(self.groups.taken)

    def check(self, fate):
        rewards = self.rewards[fate.group]
        if isinstance(fate, Drop):
            return
        assert set(fate.members) <= set(rewards) and len(set(fate.members)) == len(fate.members)
        wanted = self.rules.train_size or self.rules.size
        assert len(fate.members) == min(wanted, len(rewards)) >= 2
        if self.rules.dynamic_sampling:
            assert len({rewards[member] for member in fate.members}) > 1

    @invariant()
    def no_more_than_needed(self):
        counts = self.groups.counts()
        assert self.groups.ready <= self.rules.groups
        assert counts.drawn <= self.rules.draws_max


def test_the_counts_balance():
    run_state_machine_as_test(GroupMachine)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.integers(2, 8))
def test_no_choice_of_members_spreads_more(rewards, count):
    count = min(count, len(rewards))
    best = max(
        spread([rewards[index] for index in some]) for some in itertools.combinations(range(len(rewards)), count)
    )
    chosen = most_spread(rewards, count)
    assert len(set(chosen)) == count
    assert spread([rewards[index] for index in chosen]) >= best - 1e-6
