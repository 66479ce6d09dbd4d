"""In any order no token older than the bound is trained on, and nothing counts twice."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rose.core.groups import Drop, GroupRules, Keep
from rose.core.staleness import GroupStream, StalenessRules, may_begin, oldest_version
from rose.core.trajectory import Trajectory

REWARDS = st.sampled_from([0.0, 0.0, 1.0, 0.5])


@given(
    bound=st.integers(0, 5), batch=st.integers(1, 6), batches=st.integers(1, 40), seen=st.integers(0, 40),
    ahead=st.integers(0, 8), outstanding=st.integers(0, 60),
)  # fmt: skip
def test_what_begins_stays_within_the_bound(bound, batch, batches, seen, ahead, outstanding):
    rules = StalenessRules(bound, batch, batches)
    taken = min(seen + ahead, batches)
    seen = min(seen, taken)
    allowed = may_begin(rules, seen=seen, taken=taken, outstanding=outstanding)
    total = taken * batch + outstanding + allowed
    assert allowed >= 0
    assert not allowed or total <= (seen + bound + 1) * batch, "AReaL's rule"
    assert not allowed or total <= batches * batch, "nothing that no batch will need"
    assert may_begin(rules, seen=seen, taken=taken, outstanding=outstanding + 1) == max(0, allowed - 1)
    if ahead == 0 and taken < batches and outstanding < batch:
        assert allowed > 0, "a trainer that has been waited for is never starved by the rule"


@given(bound=st.integers(0, 4), batch=st.integers(1, 4), batches=st.integers(1, 12), delay=st.integers(0, 3))
def test_groups_that_end_in_order_are_never_too_old(bound, batch, batches, delay):
    """Workers are at most `delay` versions late, and the trainer takes a batch whenever there is one."""
    rules = StalenessRules(bound, batch, batches)
    queue: list[int] = []  # of each group the version it was begun on
    taken = seen = 0
    while taken < batches:
        queue += [seen] * may_begin(rules, seen=seen, taken=taken, outstanding=len(queue))
        if len(queue) >= batch:
            now, queue = queue[:batch], queue[batch:]
            assert all(0 <= taken - begun <= bound for begun in now)
            taken += 1
        else:
            assert seen < taken, "only workers that are late hold the trainer up"
            seen += 1
        seen = max(seen, taken - delay)


class Stream(RuleBasedStateMachine):
    """A whole job: groups are drawn, end in any order, arrive, are taken; workers take versions when they like."""

    @initialize(
        groups=st.integers(1, 3), size=st.integers(2, 3), bound=st.integers(0, 3), batches=st.integers(1, 8),
        dynamic=st.booleans(), more=st.integers(0, 12),
    )  # fmt: skip
    def begin(self, groups, size, bound, batches, dynamic, more):
        self.rules = GroupRules(groups, size, 0, dynamic, groups + more)
        self.bound = StalenessRules(bound, groups, batches)
        self.stream = GroupStream(self.rules, self.bound)
        self.begun: dict[int, int] = {}  # group -> the version that its first token was written by
        self.members: dict[int, set[int]] = {}
        self.over: dict[int, Keep] = {}
        self.fates: dict[int, str] = {}
        self.version = 0
        self.counted: Counter[str] = Counter()
        self.draw()

    @rule()
    def draw(self):
        for draw in self.stream.to_draw():
            assert draw.group not in self.begun, "a group is drawn once"
            self.begun[draw.group], self.members[draw.group] = self.stream.seen, set()

    @precondition(lambda self: set(self.begun) - set(self.fates))
    @rule(data=st.data(), reward=REWARDS, is_lost=st.booleans())
    def report(self, data, reward, is_lost):
        group = data.draw(st.sampled_from(sorted(self.begun)))
        member = data.draw(st.integers(0, self.rules.size - 1))
        is_new = member not in self.members[group]
        self.members[group].add(member)
        fate = self.stream.on_lost(group, member) if is_lost else self.stream.on_finished(group, member, reward)
        assert fate is None or is_new
        if isinstance(fate, Keep):
            self.over[group] = fate
        elif fate is not None:
            self.note(fate)

    @precondition(lambda self: self.over)
    @rule(data=st.data(), is_torn=st.booleans())
    def arrive(self, data, is_torn):
        group = data.draw(st.sampled_from(sorted(self.over)))
        members = self.over.pop(group).members
        came = [self.trajectory(group, member) for member in members[: 1 if is_torn else None]]
        lost = self.stream.on_arrived(group, came)
        assert (lost is not None) == is_torn
        if lost is not None:
            self.note(lost)

    @rule()
    def take(self):
        for aged, drop in self.stream.drop_stale(self.version):
            assert aged.versions == self.version - self.begun[drop.group] > self.bound.max_staleness
            self.note(drop)
        groups = self.stream.batch(self.version) if self.stream.taken < self.bound.batches else None
        if groups is None:
            return
        for group in groups:
            assert self.version - self.begun[group] <= self.bound.max_staleness, "beyond the bound"
            self.settle(group, "kept")
        assert len(groups) == self.rules.groups or not self.stream.under_way
        self.version += bool(groups)
        counts = self.stream.take_counts()
        assert {"alike": counts.alike, "lost": counts.lost, "stale": counts.stale, "kept": counts.kept} == {
            name: self.counted[name] for name in ("alike", "lost", "stale", "kept")
        }
        self.counted.clear()

    @rule(late=st.integers(0, 2))
    def reach(self, late):
        self.stream.on_reached(self.stream.taken - late)

    @invariant()
    def bounded(self):
        most = (self.bound.max_staleness + 1) * self.bound.batch_groups
        assert self.stream.outstanding <= most, "the buffer is bounded"
        assert self.stream.outstanding == len(self.begun) - len(self.fates)

    def trajectory(self, group: int, member: int) -> Trajectory:
        versions = ("", str(self.begun[group]), f"{self.begun[group] + member}-ab")
        return Trajectory(f"{group}/{member}", str(group), (1, 2, 3), (False, True, True), (0.0,) * 3, versions, 0.0)

    def note(self, drop: Drop) -> None:
        self.settle(drop.group, drop.reason)

    def settle(self, group: int, fate: str) -> None:
        assert group not in self.fates, "a group has one fate"
        self.fates[group] = fate
        self.counted[fate] += 1


def test_the_counts_of_an_asynchronous_job():
    run_state_machine_as_test(Stream)


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4), max_size=4))
def test_the_oldest_version_counts_every_token(versions):
    trajectories = [
        Trajectory("t", "g", (1,) * len(row), (True,) * len(row), (0.0,) * len(row), tuple(map(str, row)), 0.0)
        for row in versions
    ]
    assert oldest_version(trajectories) == min(itertools.chain.from_iterable(versions), default=None)
