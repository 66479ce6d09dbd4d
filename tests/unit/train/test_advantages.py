"""Advantages within a group, branches of one member, and the reward that length costs."""

from __future__ import annotations

import pytest

from rose.train.advantages import group_advantages, member_advantages, member_of, overlong_loss


def test_advantages_by_hand():
    # mean 0.25, differences -0.25 -0.25 -0.25 0.75, variance (3/16 + 9/16) / 3 = 1/4, spread 0.5
    found = group_advantages([0.0, 0.0, 0.0, 1.0])
    assert found == pytest.approx([-0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, 0.75 / 0.5001])
    assert group_advantages([0.0, 0.0, 0.0, 1.0], "none") == pytest.approx([-0.25, -0.25, -0.25, 0.75])
    assert group_advantages([2.0, 2.0]) == [0.0, 0.0]
    assert sum(group_advantages([0.3, -0.1, 1.0, 0.9])) == pytest.approx(0.0)


@pytest.mark.parametrize(
    "name, member", [("r/0/1", "r/0/1"), ("r/0/1~1", "r/0/1"), ("r/0/1~12", "r/0/1"), ("~x", "~x")]
)
def test_branches_are_named_after_their_member(name, member):
    assert member_of(name) == member


def test_all_branches_of_a_member_have_its_advantage():
    low, high = group_advantages([0.0, 1.0])
    assert member_advantages([("a", 0.0), ("a~1", 0.0), ("a~2", 0.0), ("b", 1.0)]) == [low, low, low, high]
    assert member_advantages([("a", 0.0), ("a~1", -0.5), ("b", 0.5)]) == group_advantages([-0.5, 0.5])[:1] * 2 + [
        group_advantages([-0.5, 0.5])[1]
    ], "the branch that lost most for its length counts"
    assert member_advantages([("a", 0.0), ("a", 1.0)]) == [low, high], "a name that is used twice is two members"
    assert member_advantages([("a", 0.0), ("a~1", 0.0)]) is None and member_advantages([]) is None


@pytest.mark.parametrize(
    "tokens_written, expected", [(80, 0.0), (81, 0.025), (90, 0.25), (99, 0.475), (100, 0.5), (5000, 0.5)]
)
def test_reward_lost_by_writing_too_much(tokens_written, expected):
    assert overlong_loss(tokens_written, 100, 20, penalty=0.5) == pytest.approx(expected)


def test_limits_of_length():
    assert overlong_loss(5000, 0, 0) == 0.0, "no limit"
    assert (overlong_loss(99, 100, 0), overlong_loss(100, 100, 0), overlong_loss(101, 100, 0)) == (0.0, 0.0, 1.0)
