"""Groups of a synchronous job: which are drawn, kept, dropped and surplus."""

from __future__ import annotations

import itertools

import pytest

from rose.core.groups import Draw, Drop, GroupRules, Keep, StepGroups, most_spread, spread
from rose.core.staleness import GroupStream, StalenessRules
from rose.core.trajectory import Trajectory

TRAJECTORY = Trajectory("t", "g", (1,), (True,), (0.0,), ("0",), 0.0)


def started(**rules: object) -> GroupStream:
    known = GroupRules(**rules)  # type: ignore[arg-type]
    return GroupStream(known, StalenessRules(0, known.groups, 100))


def finish(groups: GroupStream, group: int, rewards: list[float]) -> Keep | Drop | None:
    """Report the rewards of a group, and let its tokens arrive if it is kept."""
    fate = None
    for member, reward in enumerate(rewards):
        assert fate is None, "judged before its last member"
        fate = groups.on_finished(group, member, reward)
    if isinstance(fate, Keep):
        assert groups.on_arrived(group, [TRAJECTORY] * len(fate.members)) is None
    return fate


def test_a_step_draws_its_groups_and_keeps_those_with_variance():
    groups = started(groups=2, size=2, draws_max=8)
    assert groups.to_draw() == [Draw(0, 2), Draw(1, 2)]
    assert groups.to_draw() == [], "both are under way"
    assert finish(groups, 1, [0.0, 1.0]) == Keep(1, (0, 1))
    assert finish(groups, 0, [1.0, 1.0]) == Drop(0, "alike")
    assert groups.batch(0) is None
    assert groups.to_draw() == [Draw(2, 2)], "one more for the one that taught nothing"
    assert finish(groups, 2, [0.0, 0.5]) == Keep(2, (0, 1))
    assert groups.to_draw() == [] and groups.batch(0) == (1, 2) and groups.drop_surplus() == []
    assert groups.take_counts() == StepGroups(drawn=3, kept=2, alike=1, trajectories=6)


def test_a_model_that_always_fails_does_not_draw_forever():
    groups = started(groups=2, size=2, draws_max=5)
    while draws := groups.to_draw():
        for draw in draws:
            assert finish(groups, draw.group, [0.0, 0.0]) == Drop(draw.group, "alike")
    assert groups.batch(0) == ()
    counts = groups.take_counts()
    assert (counts.kept, counts.total, counts.drawn) == (0, 5, 5)


def test_without_dynamic_sampling_every_group_is_kept_and_none_drawn_again():
    groups = started(groups=2, size=2, dynamic_sampling=False)
    assert len(groups.to_draw()) == 2
    assert finish(groups, 0, [0.0, 0.0]) == Keep(0, (0, 1))
    assert finish(groups, 1, [0.0, 1.0]) == Keep(1, (0, 1))
    assert groups.to_draw() == [] and groups.batch(0) == (0, 1)


def test_drawing_ahead_makes_surplus():
    groups = started(groups=2, size=2, draw_ahead=2.0, draws_max=8)
    assert len(groups.to_draw()) == 4
    assert finish(groups, 3, [0.0, 1.0]) == Keep(3, (0, 1))
    assert finish(groups, 0, [0.0, 1.0]) == Keep(0, (0, 1))
    assert finish(groups, 1, [0.0, 1.0]) == Drop(1, "surplus"), "it came in late"
    assert groups.batch(0) == (0, 3)
    assert groups.drop_surplus() == [Drop(2, "surplus")]
    assert groups.take_counts() == StepGroups(drawn=4, kept=2, surplus=2, trajectories=6)


def test_numbers_continue_over_steps_and_late_reports_are_ignored():
    groups = started(groups=1, size=2, draw_ahead=2.0)
    groups.to_draw()
    finish(groups, 0, [0.0, 1.0])
    assert groups.batch(0) == (0,) and groups.drop_surplus() == [Drop(1, "surplus")]
    groups.take_counts()
    assert groups.to_draw() == [], "workers have still to take the weights"
    groups.on_reached(1)
    assert [draw.group for draw in groups.to_draw()] == [2, 3]
    assert groups.on_finished(1, 0, 1.0) is None, "its group was cancelled as surplus"
    assert groups.counts() == StepGroups(drawn=2, repeated=1)


def test_a_member_reported_twice_is_counted_once():
    groups = started(groups=1, size=2)
    groups.to_draw()
    assert groups.on_finished(0, 0, 0.0) is None
    assert groups.on_finished(0, 0, 1.0) is None
    assert groups.on_lost(0, 0) is None
    assert groups.on_finished(0, 1, 1.0) == Keep(0, (0, 1))
    assert groups.on_finished(0, 1, 1.0) is None
    assert groups.counts() == StepGroups(drawn=1, trajectories=2, repeated=3)


def test_lost_members_leave_a_smaller_group_or_none():
    groups = started(groups=2, size=3, draws_max=3)
    groups.to_draw()
    assert groups.on_lost(0, 1) is None
    groups.on_finished(0, 0, 0.0)
    assert groups.on_finished(0, 2, 1.0) == Keep(0, (0, 2))
    groups.on_lost(1, 0)
    groups.on_finished(1, 1, 1.0)
    assert groups.on_lost(1, 2) == Drop(1, "lost"), "one alone has nothing to compare with"
    assert groups.to_draw() == [Draw(2, 3)]


def test_large_groups_train_on_their_most_spread_members():
    groups = started(groups=1, size=6, train_size=4)
    groups.to_draw()
    assert finish(groups, 0, [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]) == Keep(0, (0, 1, 2, 3))
    assert groups.counts().trajectories == 6


@pytest.mark.parametrize(
    "rewards, count, chosen",
    [
        ([0.0, 1.0, 0.0, 1.0], 4, [0, 1, 2, 3]),
        ([0.0, 0.0, 0.0, 1.0, 1.0, 1.0], 4, [0, 1, 3, 4]),  # two of each
        ([0.0, 0.0, 0.0, 0.0, 1.0], 2, [0, 4]),  # the rare success is always there
        ([1.0, 1.0, 0.0, 1.0, 1.0], 2, [0, 2]),  # and so is the rare failure
        ([0.5, 0.1, 0.9, 0.4, 0.6], 2, [1, 2]),  # the extremes
        ([3.0, 3.0, 3.0], 2, [0, 1]),  # all alike
    ],
)
def test_most_spread(rewards, count, chosen):
    assert most_spread(rewards, count) == chosen


def test_no_other_choice_spreads_more():
    rewards = [0.0, -0.1, 1.0, 0.9, 0.0, -0.3, 0.0, 1.0]
    for count in range(2, 8):
        best = max(spread([rewards[index] for index in some]) for some in itertools.combinations(range(8), count))
        assert spread([rewards[index] for index in most_spread(rewards, count)]) == pytest.approx(best)


@pytest.mark.parametrize(
    "rules",
    [{"groups": 0}, {"size": 1}, {"groups": 4, "draws_max": 3}, {"size": 4, "train_size": 5}, {"draw_ahead": 0.5}],
)
def test_contradicting_rules_are_a_bug(rules):
    with pytest.raises(AssertionError):
        started(**rules)


def test_an_unknown_member_or_a_reward_that_is_no_number_is_a_bug():
    groups = started(groups=1, size=2)
    groups.to_draw()
    for group, member, reward in ((1, 0, 0.0), (0, 2, 0.0), (0, 0, float("nan"))):
        with pytest.raises(AssertionError):
            groups.on_finished(group, member, reward)
