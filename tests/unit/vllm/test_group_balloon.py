"""The balloon holds every group without memory, and no block is lost or handed out twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.vllm_stubs import BlockPool

from rose.vllm.group_balloon import GroupBalloon

SIZE, GROUPS = 4, 5


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(SIZE * GROUPS)


def test_at_first_only_the_null_blocks_group_can_be_used(pool: BlockPool) -> None:
    balloon = GroupBalloon(pool, SIZE, GROUPS)
    assert (balloon.present, balloon.absent) == ([0], [1, 2, 3, 4])
    assert (balloon.limit, balloon.free, balloon.used, balloon.held_blocks) == (3, 3, 0, 16)
    assert pool.free == {1, 2, 3}


def test_a_released_group_is_free_and_a_held_one_forgets_its_cache(pool: BlockPool) -> None:
    balloon = GroupBalloon(pool, SIZE, GROUPS)
    balloon.release([2])
    assert pool.free == {1, 2, 3, 8, 9, 10, 11} and balloon.limit == 7
    pool.blocks[9].block_hash = "cached"
    assert balloon.cached == 1
    balloon.hold([2])
    assert pool.blocks[9].block_hash is None and pool.free == {1, 2, 3}


def test_empty_groups_come_with_the_least_cached_first(pool: BlockPool) -> None:
    balloon = GroupBalloon(pool, SIZE, GROUPS)
    balloon.release([1, 2, 3])
    pool.blocks[5].block_hash = pool.blocks[13].block_hash = pool.blocks[14].block_hash = "cached"
    assert balloon.empty() == [2, 1, 3]
    pool.blocks[8].ref_cnt = 1
    pool.free.remove(8)
    assert balloon.empty() == [1, 3]
    assert balloon.references()[2] == 1


def test_a_group_in_use_is_never_held(pool: BlockPool) -> None:
    balloon = GroupBalloon(pool, SIZE, GROUPS)
    balloon.release([1])
    pool.use(4)
    with pytest.raises(AssertionError, match="in use"):
        balloon.hold([1])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, GROUPS - 1)), max_size=12))
def test_any_order_of_holding_and_releasing_loses_no_block(moves: list[tuple[bool, int]]) -> None:
    pool = BlockPool(SIZE * GROUPS)
    balloon = GroupBalloon(pool, SIZE, GROUPS)
    for is_release, group in moves:
        if is_release and group in balloon.absent:
            balloon.release([group])
        elif not is_release and group not in balloon.absent:
            balloon.hold([group])
        held = {block for absent in balloon.absent for block in range(absent * SIZE, (absent + 1) * SIZE)}
        assert held | pool.free == set(range(1, SIZE * GROUPS)) and not held & pool.free
        assert balloon.limit == len(pool.free)
