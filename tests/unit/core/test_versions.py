"""Which records lead to a version, and which must stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.versions import (
    UNKNOWN,
    VersionDemand,
    VersionId,
    VersionRecord,
    anchor_is_due,
    has_waited_long,
    kept,
    newest,
    shortest,
)

DELTA_BYTES, ANCHOR_BYTES = 10, 100


def version(number: int, epoch: int = 1) -> VersionId:
    return VersionId(epoch, number)


def delta(number: int, base: int | None = None, size: int = DELTA_BYTES, epoch: int = 1) -> VersionRecord:
    return VersionRecord(version(number, epoch), version(number - 1 if base is None else base, epoch), size)


def anchor(number: int, size: int = ANCHOR_BYTES, attempt: int = 0, epoch: int = 1) -> VersionRecord:
    return VersionRecord(version(number, epoch), None, size, attempt)


@pytest.mark.parametrize(
    "story, links, held, target, way",
    [
        ("in step", [anchor(1), delta(2), delta(3)], [2], 3, [delta(3)]),
        ("already there", [anchor(1), delta(2)], [2], 2, []),
        ("two behind", [anchor(1), delta(2), delta(3)], [1], 3, [delta(2), delta(3)]),
        ("joins", [anchor(1), delta(2), delta(3)], [], 3, [anchor(1), delta(2), delta(3)]),
        ("joins near an anchor", [anchor(1), delta(2), anchor(2), delta(3)], [], 3, [anchor(2), delta(3)]),
        ("far behind: an anchor is cheaper", [anchor(1), *map(delta, range(2, 20)), anchor(19)], [2], 19, [anchor(19)]),
        ("steps were skipped", [anchor(1), delta(5, 1), delta(9, 5)], [1], 9, [delta(5, 1), delta(9, 5)]),
        ("a delta is missing", [anchor(1), delta(3)], [1], 3, None),
        ("a delta is missing, an anchor helps", [anchor(1), delta(3), anchor(3)], [1], 3, [anchor(3)]),
        ("holds something else", [anchor(1), delta(2)], [7], 2, [anchor(1), delta(2)]),
        ("nothing there", [], [], 1, None),
        ("an older version", [anchor(1), delta(2), delta(3)], [3], 2, [anchor(1), delta(2)]),
    ],
)  # fmt: skip
def test_shortest(story, links, held, target, way):
    found = shortest(links, {version(number) for number in held}, version(target))
    assert found == (None if way is None else tuple(way)), story


def test_a_later_attempt_replaces_an_earlier_one():
    assert shortest([anchor(1, attempt=1), anchor(1)], (), version(1)) == (anchor(1, attempt=1),)


def test_records_in_a_circle_terminate():
    links = [VersionRecord(version(1), version(2), 1), VersionRecord(version(2), version(1), 1)]
    assert shortest(links, (), version(2)) is None


@pytest.mark.parametrize(
    "links, expected",
    [
        ([], None),
        ([delta(2)], None),
        ([anchor(1), delta(2), delta(4)], version(2)),
        ([anchor(9), anchor(1, epoch=2)], version(1, epoch=2)),
        ([anchor(9), delta(10, epoch=2)], version(9)),
    ],
)
def test_newest(links, expected):
    assert newest(links) == expected


@pytest.mark.parametrize(
    "since, every, due", [(None, 16, True), (0, 1, True), (0, 2, False), (1, 2, True), (5, 16, False)]
)
def test_anchor_is_due(since, every, due):
    assert anchor_is_due(since, every) is due


def test_without_an_anchor_everything_stays():
    assert kept([delta(2), delta(3)], 1) == {delta(2), delta(3)}


def test_a_new_epochs_snapshot_supersedes_the_old_epoch():
    old = [anchor(1), delta(2)]
    assert kept([*old, anchor(2, epoch=2)], 10) == {anchor(2, epoch=2)}
    assert kept(old, 10) == set(old)


@given(
    steps=st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.integers(1, 50)), min_size=1, max_size=40),
    versions=st.integers(0, 12),
)
def test_every_guaranteed_receiver_has_a_chain(steps, versions):
    """Chains with skipped steps and anchors anywhere: after sweeping, joiners and recent holders still arrive."""
    links, published = [anchor(1, 30)], [1]
    for step, is_anchor, size in steps:
        number = published[-1] + step
        links.append(delta(number, published[-1], size))
        if is_anchor:
            links.append(anchor(number, 30))
        published.append(number)
    stays = kept(links, versions)
    target = version(published[-1])
    assert stays <= set(links)
    assert newest(stays) == target
    assert sum(link.is_anchor for link in stays) == 1
    for held in published[-versions:] if versions else []:
        way = shortest([link for link in stays if not link.is_anchor], {version(held)}, target)
        assert way is not None
    assert kept(list(stays), versions) == stays


@given(st.data())
def test_the_shortest_chain_is_valid_and_cheapest(data):
    count = data.draw(st.integers(1, 7))
    links = [delta(n, size=data.draw(st.integers(1, 9))) for n in range(2, count + 1) if data.draw(st.integers(0, 4))]
    links += [anchor(n, data.draw(st.integers(1, 30))) for n in range(1, count + 1) if data.draw(st.booleans())]
    held = {version(n) for n in range(1, count + 1) if data.draw(st.integers(0, 3)) == 0}
    target = version(count)
    way = shortest(links, held, target)
    assert (way is None) == (cheapest(links, held, target) is None)
    if way is None:
        return
    at = None
    for index, link in enumerate(way):
        assert link.base == at if index else link.base is None or link.base in held
        at = link.version
    assert at == target or (not way and target in held)
    assert sum(link.size_bytes for link in way) == cheapest(links, held, target)


def cheapest(links, held, target) -> int | None:
    """The same by brute force: relax until nothing changes."""
    cost = dict.fromkeys(held, 0)
    for _ in range(len(links) + 1):
        for link in links:
            before = 0 if link.is_anchor else cost.get(link.base)
            if before is not None:
                cost[link.version] = min(cost.get(link.version, 10**9), before + link.size_bytes)
    return cost.get(target)


@pytest.mark.parametrize(
    "demand, version, number, is_allowed",
    [
        (VersionDemand(), "1", 1, True),
        (VersionDemand("2"), "2", 2, True),
        (VersionDemand("2"), "3", 3, False),
        (VersionDemand(number_min=2), "2", 2, True),
        (VersionDemand(number_min=2), "3", 3, True),
        (VersionDemand(number_min=2), "1", 1, False),
        (VersionDemand(number_min=-1), "0", -1, True),
        (VersionDemand(number_min=UNKNOWN), "9", 9, False),
        (VersionDemand("2", 3), "2", 2, False),
    ],
)
def test_a_demand_allows_one_version_or_all_from_one_on(
    demand: VersionDemand, version: str, number: int, is_allowed: bool
) -> None:
    assert demand.allows(version, number) is is_allowed


def test_a_turn_waits_another_time_for_weights_than_for_a_free_worker() -> None:
    assert has_waited_long(6, 10, 5, has_version=False) and not has_waited_long(6, 10, 5, has_version=True)
    assert has_waited_long(6, 5, 10, has_version=True) and not has_waited_long(6, 5, 10, has_version=False)
