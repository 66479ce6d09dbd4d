"""The balloon takes free blocks from the top of the pool, and returns the lowest first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.vllm_stubs import BlockPool

from rose.vllm.balloon import Balloon


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(11)  # ten blocks and the null block


def test_a_lower_limit_takes_the_highest_blocks_in_runs(pool: BlockPool) -> None:
    balloon = Balloon(pool)
    assert (balloon.blocks, balloon.limit, balloon.held) == (10, 10, 0)
    pool.blocks[9].ref_cnt = 1
    pool.free.remove(9)
    assert balloon.resize(6) == [(6, 9), (10, 11)]
    assert (balloon.limit, balloon.held, balloon.free, balloon.used) == (6, 4, 5, 1)
    assert pool.free == {1, 2, 3, 4, 5}


def test_a_higher_limit_returns_the_lowest_blocks(pool: BlockPool) -> None:
    balloon = Balloon(pool)
    balloon.resize(2)
    assert balloon.resize(5) == []
    assert pool.free == {1, 2, 3, 4, 5} and balloon.limit == 5


def test_blocks_that_requests_use_are_not_taken_but_counted_as_missing(pool: BlockPool) -> None:
    balloon = Balloon(pool)
    pool.use(7)
    assert balloon.missing(limit=2) == 5
    assert balloon.resize(2) == [(8, 11)]
    assert (balloon.limit, balloon.used, balloon.missing(limit=2)) == (7, 7, 5)


def test_blocks_of_the_prefix_cache_are_taken_like_free_ones(pool: BlockPool) -> None:
    balloon = Balloon(pool)
    pool.blocks[10].block_hash = pool.blocks[1].block_hash = "cached"
    assert balloon.cached == 2
    balloon.resize(9)
    assert balloon.cached == 1 and pool.blocks[10].block_hash is None


@given(st.lists(st.integers(-3, 15), max_size=8))
def test_any_sequence_of_limits_loses_no_block(limits: list[int]) -> None:
    pool = BlockPool(11)
    balloon, held = Balloon(pool), set[int]()
    for limit in limits:
        taken = {number for first, end in balloon.resize(limit) for number in range(first, end)}
        held = (held - pool.free) | taken
        assert balloon.limit == min(10, max(0, limit))
        assert held | pool.free == set(range(1, 11)) and not held & pool.free
