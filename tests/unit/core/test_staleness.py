"""The staleness bound by hand: what may begin, what is too old, and what is reported when it cannot be met."""

from __future__ import annotations

import pytest

from rose.core.groups import Drop, GroupAged, GroupRules
from rose.core.staleness import GroupStream, StalenessRules, Unmet, may_begin, oldest_version, speed_needed
from rose.core.trajectory import NO_VERSION, Trajectory
from rose.run.job import grown

RULES = GroupRules(groups=2, size=2, dynamic_sampling=True, draws_max=8)


@pytest.mark.parametrize(
    "story, bound, seen, taken, outstanding, expected",
    [
        ("a synchronous job plays one batch", 0, 0, 0, 0, 4),
        ("and nothing while it learns", 0, 0, 1, 0, 0),
        ("until every worker has the weights", 0, 1, 1, 0, 4),
        ("two versions ahead: three batches", 2, 0, 0, 0, 12),
        ("less what is under way or waits", 2, 0, 0, 7, 5),
        ("a batch that is being learnt counts still", 2, 0, 1, 8, 0),
        ("and when workers have it, others begin", 2, 1, 1, 8, 4),
        ("the last batches draw no more than they need", 2, 9, 9, 0, 4),
        ("after the last nothing begins", 2, 10, 10, 0, 0),
    ],
)
def test_how_many_may_begin(story, bound, seen, taken, outstanding, expected):
    rules = StalenessRules(bound, batch_groups=4, batches=10)
    assert may_begin(rules, seen=seen, taken=taken, outstanding=outstanding) == expected, story


def trajectory(versions: tuple[str, ...]) -> Trajectory:
    count = len(versions)
    mask = tuple(version != NO_VERSION for version in versions)
    return Trajectory("t", "g", (1,) * count, mask, (0.0,) * count, versions, 0.0)


def test_one_old_token_makes_a_group_old():
    old, new = trajectory(("", "7-ab", "", "9-cd")), trajectory(("", "9-cd"))
    assert oldest_version([new, old]) == 7
    assert oldest_version([trajectory(("",))]) is None, "nothing was written"
    assert oldest_version([new, trajectory(("mine",))]) == -1, "a version without a number is before all"


def played(stream: GroupStream, group: int, version: str = "0") -> None:
    assert stream.on_finished(group, 0, 0.0) is None
    assert stream.on_finished(group, 1, 1.0) is not None
    assert stream.on_arrived(group, [trajectory((version,))] * 2) is None


def test_the_oldest_groups_are_taken_first_and_a_slow_one_grows_too_old():
    stream = GroupStream(RULES, StalenessRules(1, 2, 10))
    assert [draw.group for draw in stream.to_draw()] == [0, 1, 2, 3]
    for group in (3, 1, 2):
        played(stream, group)
    assert stream.batch(0) == (1, 2), "of three that are here"
    stream.on_reached(1)
    assert [draw.group for draw in stream.to_draw()] == [4, 5]
    for group in (4, 5):
        played(stream, group, "1")
    assert stream.batch(1) == (3, 4) and stream.drop_stale(2) == []
    played(stream, 0)
    assert stream.drop_stale(2) == [(GroupAged(0, 2), Drop(0, "stale"))]
    assert stream.batch(2) is None and stream.ready == 1, "5 is here, and fresh"


def test_a_resumed_job_first_draws_groups_no_batch_had_taken():
    stream = GroupStream(RULES, StalenessRules(1, 2, 10), next_group=9, taken=2, again=[7, 3, 5])
    assert stream.outstanding == 0 and stream.not_taken == {3, 5, 7}
    assert [draw.group for draw in stream.to_draw()] == [3, 5, 7, 9] and stream.next_group == 10
    for group in (7, 3):
        played(stream, group, "2")
    assert stream.batch(2) == (3, 7) and stream.not_taken == {5, 9}
    stream.on_reached(3)
    assert [draw.group for draw in stream.to_draw()] == [10, 11]


def test_a_job_without_useful_groups_takes_short_batches():
    """Groups in which all went alike are drawn anew, up to the limit; then the step has to do without."""
    stream = GroupStream(RULES, StalenessRules(0, 2, 10))
    drawn = 0
    while draws := stream.to_draw():
        for draw in draws:
            drawn += 1
            for member in range(draw.size):
                stream.on_finished(draw.group, member, 0.0)
    assert drawn == RULES.draws_max and stream.batch(0) == ()
    counts = stream.take_counts()
    assert (counts.drawn, counts.alike, counts.kept, counts.total) == (8, 8, 0, 8)
    stream.on_reached(1)
    assert len(stream.to_draw()) == 2, "and the next one begins anew"


def test_an_unmet_bound_reports_the_speed_needed():
    stream = GroupStream(RULES, StalenessRules(1, 2, 10))
    said = []
    for _ in range(3):
        draws = stream.to_draw()
        for draw in draws[:2]:
            played(stream, draw.group)
            stream.drop_stale(version=5)
            said.append(stream.unmet)
    assert said[:2] == [None, None] and said[2] == Unmet(3, 5, 1, 3.0)


@pytest.mark.parametrize("versions, bound, expected", [(3, 1, 2.0), (1, 0, 2.0), (5, 2, 2.0), (2, 2, 1.0)])
def test_the_speed_that_a_bound_needs(versions, bound, expected):
    assert speed_needed(versions, bound) == expected


def test_a_counter_that_begins_anew():
    assert (grown(10, 15), grown(10, 3)) == (5, 3)
