"""Groups: which are drawn, kept, dropped and surplus, told as short stories."""

from __future__ import annotations

import itertools

import pytest

from rose.core.groups import Draw, Drop, GroupRules, Groups, Keep, StepGroups, most_spread, spread


def started(**rules: object) -> Groups:
    groups = Groups(GroupRules(**rules))  # type: ignore[arg-type]
    groups.begin_step()
    return groups


def finish(groups: Groups, group: int, rewards: list[float]) -> Keep | Drop | None:
    fate = None
    for member, reward in enumerate(rewards):
        assert fate is None, "judged before its last member"
        fate = groups.finished(group, member, reward)
    return fate


def test_a_step_draws_its_groups_and_keeps_those_with_variance():
    groups = started(groups=2, size=2, draws_max=8)
    assert groups.to_draw() == [Draw(0, 2), Draw(1, 2)]
    assert groups.to_draw() == [], "both are under way"
    assert finish(groups, 1, [0.0, 1.0]) == Keep(1, (0, 1))
    assert finish(groups, 0, [1.0, 1.0]) == Drop(0, "alike")
    assert not groups.is_complete and groups.missing == 1
    assert groups.to_draw() == [Draw(2, 2)], "one more for the one that taught nothing"
    assert finish(groups, 2, [0.0, 0.5]) == Keep(2, (0, 1))
    assert groups.is_complete and groups.to_draw() == []
    assert groups.end_step() == ([], StepGroups(drawn=3, kept=2, alike=1, trajectories=6))


def test_a_model_that_fails_everywhere_does_not_draw_for_ever():
    groups = started(groups=2, size=2, draws_max=5)
    while draws := groups.to_draw():
        for draw in draws:
            assert finish(groups, draw.group, [0.0, 0.0]) == Drop(draw.group, "alike")
    assert groups.is_complete and groups.missing == 2
    _, counts = groups.end_step()
    assert (counts.kept, counts.total, counts.drawn) == (0, 5, 5)


def test_without_dynamic_sampling_every_group_is_kept_and_none_drawn_again():
    groups = started(groups=2, size=2, dynamic_sampling=False)
    assert len(groups.to_draw()) == 2
    assert finish(groups, 0, [0.0, 0.0]) == Keep(0, (0, 1))
    assert finish(groups, 1, [0.0, 1.0]) == Keep(1, (0, 1))
    assert groups.is_complete and groups.to_draw() == []


def test_drawing_ahead_makes_surplus():
    groups = started(groups=2, size=2, draw_ahead=2.0, draws_max=8)
    assert len(groups.to_draw()) == 4
    assert finish(groups, 3, [0.0, 1.0]) == Keep(3, (0, 1))
    assert finish(groups, 0, [0.0, 1.0]) == Keep(0, (0, 1))
    assert groups.is_complete
    assert finish(groups, 1, [0.0, 1.0]) == Drop(1, "surplus"), "it came in late"
    surplus, counts = groups.end_step()
    assert surplus == [Drop(2, "surplus")]
    assert counts == StepGroups(drawn=4, kept=2, surplus=2, trajectories=6)


def test_numbers_run_on_over_steps_and_late_reports_count_for_nothing():
    groups = started(groups=1, size=2, draw_ahead=2.0)
    groups.to_draw()
    finish(groups, 0, [0.0, 1.0])
    groups.end_step()
    groups.begin_step()
    assert [draw.group for draw in groups.to_draw()] == [2, 3]
    assert groups.finished(1, 0, 1.0) is None, "its group was cancelled as surplus"
    assert groups.counts() == StepGroups(drawn=2, repeated=1)


def test_a_member_reported_twice_is_counted_once():
    groups = started(groups=1, size=2)
    groups.to_draw()
    assert groups.finished(0, 0, 0.0) is None
    assert groups.finished(0, 0, 1.0) is None
    assert groups.lost(0, 0) is None
    assert groups.finished(0, 1, 1.0) == Keep(0, (0, 1))
    assert groups.finished(0, 1, 1.0) is None
    assert groups.counts() == StepGroups(drawn=1, kept=1, trajectories=2, repeated=3)


def test_lost_members_leave_a_smaller_group_or_none():
    groups = started(groups=2, size=3, draws_max=3)
    groups.to_draw()
    assert groups.lost(0, 1) is None
    groups.finished(0, 0, 0.0)
    assert groups.finished(0, 2, 1.0) == Keep(0, (0, 2))
    groups.lost(1, 0)
    groups.finished(1, 1, 1.0)
    assert groups.lost(1, 2) == Drop(1, "lost"), "one alone has nothing to compare with"
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
def test_rules_that_make_no_sense_are_a_bug(rules):
    with pytest.raises(AssertionError):
        Groups(GroupRules(**rules))


def test_an_unknown_member_or_a_reward_that_is_no_number_is_a_bug():
    groups = started(groups=1, size=2)
    groups.to_draw()
    for group, member, reward in ((1, 0, 0.0), (0, 2, 0.0), (0, 0, float("nan"))):
        with pytest.raises(AssertionError):
            groups.finished(group, member, reward)
