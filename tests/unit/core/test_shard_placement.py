"""Which shard a group lives on, and how many groups each shard contributes to a batch."""

from __future__ import annotations

from collections import Counter

import pytest

from rose.core.shard_placement import ShardBatches, group_of, plan_batch, shard_of

GROUPS = [f"run/{number}" for number in range(4000)]


@pytest.mark.parametrize(
    "session, group",
    [
        ("run/7/0", "run/7"),
        ("run/7/0.abcdefghijklmnop", "run/7"),
        ("alone", "alone"),
        ("alone.abcdefghijklmnop", "alone"),
        ("run/7/v1.2", "run/7"),
        ("/x", "/x"),
        ("x/", "x"),
        ("", ""),
    ],
)
def test_a_session_names_its_group(session: str, group: str) -> None:
    assert group_of(session) == group


@pytest.mark.parametrize("shards", [1, 2, 3, 16])
def test_groups_are_spread_evenly(shards: int) -> None:
    counts = Counter(shard_of(group, shards) for group in GROUPS)
    mean = len(GROUPS) / shards
    assert len(counts) == shards and all(abs(count - mean) < 6 * mean**0.5 for count in counts.values())


def test_one_more_shard_moves_groups_only_to_itself() -> None:
    moved = [(shard_of(group, 4), shard_of(group, 5)) for group in GROUPS]
    assert {after for before, after in moved if before != after} == {4}
    assert 0.15 < sum(before != after for before, after in moved) / len(GROUPS) < 0.25


@pytest.mark.parametrize(
    "what, groups, shards, parts",
    [
        ("too few", 3, [(0, 0, 1), (0, 0, 1)], None),
        ("most from the fullest", 3, [(0, 0, 5), (0, 0, 1)], [3, 0]),
        ("an empty part", 1, [(0, 0, 0), (0, 0, 2)], [0, 1]),
        ("one part was made before", 3, [(1, 2, 7), (0, 0, 4)], [2, 1]),
        ("one part was made, and the other shards have less than is asked for now", 9, [(1, 2, 7), (0, 0, 1)], [2, 1]),
        ("all parts were made, of whatever size", 3, [(1, 1, 9), (1, 0, 9)], [1, 0]),
        ("a part that is larger than what is asked for now", 1, [(1, 4, 0), (0, 0, 3)], [4, 0]),
    ],
)
def test_each_shard_contributes_its_part(
    what: str, groups: int, shards: list[tuple[int, int, int]], parts: list[int] | None
) -> None:
    assert plan_batch(groups, 0, [ShardBatches(*shard) for shard in shards]) == parts, what
