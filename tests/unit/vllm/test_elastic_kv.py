"""Groups come when a request lacks blocks, and go when every step that could touch them has ended."""

from __future__ import annotations

import pytest
from tests.unit.pooled_engine import GROUP_BLOCKS, GROUP_PAGES, GROUPS, PLAN, PooledEngine
from tests.unit.vllm_stubs import StubRanks, StubScheduler

from rose.errors import Unavailable
from rose.vllm.elastic_kv import ElasticKv


@pytest.fixture
def engine() -> PooledEngine:
    return PooledEngine()


def test_growth_takes_the_lowest_groups_as_far_as_there_are_pages(engine: PooledEngine) -> None:
    engine.worker.free_groups = 2
    assert engine.kv.grow(3) == 2
    assert engine.worker.mapped == {0, 1, 2} and engine.kv.balloon.present == [0, 1, 2]
    assert (engine.kv.held_pages, engine.kv.balloon.free) == (3 * GROUP_PAGES, 3 * GROUP_BLOCKS - 1)
    assert engine.kv.grow(1) == 0


def test_an_engine_that_has_no_worker_yet_does_not_grow() -> None:
    kv = ElasticKv(PLAN, StubScheduler(blocks=GROUP_BLOCKS * GROUPS, plan=PLAN))
    assert not kv.is_attached and kv.grow(1) == 0


def test_a_group_goes_only_after_the_steps_under_way(engine: PooledEngine) -> None:
    engine.kv.grow(2)
    engine.kv.on_step_began()
    engine.kv.on_step_began()
    engine.kv.give_back([2])
    assert engine.worker.mapped == {0, 1, 2} and engine.kv.balloon.present == [0, 1]
    assert engine.kv.held_groups == 3, "its pages are not free yet"
    engine.kv.on_step_ended()
    assert engine.worker.mapped == {0, 1, 2}
    engine.kv.on_step_ended()
    assert engine.worker.mapped == {0, 1} and engine.kv.held_groups == 2


def test_a_group_on_its_way_out_is_not_mapped_again(engine: PooledEngine) -> None:
    engine.kv.grow(2)
    engine.kv.on_step_began()
    engine.kv.give_back([1])
    assert engine.kv.grow(1) == 1 and engine.kv.balloon.present == [0, 2, 3]


def test_memory_that_could_not_be_unmapped_is_tried_again(engine: PooledEngine) -> None:
    engine.kv.grow(1)
    engine.worker.failure = Unavailable("the device refuses")
    with pytest.raises(Unavailable):
        engine.kv.give_back([1])
    assert engine.kv.held_groups == 2
    engine.worker.failure = None
    engine.kv.on_step_ended()
    assert engine.kv.held_groups == 1 and engine.worker.mapped == {0}


def test_an_allocation_that_finds_no_block_grows_by_what_is_missing(engine: PooledEngine) -> None:
    asked: list[int] = []

    def find(request: object, missing: int) -> bool:
        asked.append(missing)
        return engine.kv.grow(engine.kv.groups_for(missing)) > 0

    engine.kv.watch_allocations(find)
    engine.run("a", blocks=9)
    assert asked == [4] and engine.kv.balloon.present == [0, 1], "five blocks were free"
    assert engine.kv.used_pages == 2 * GROUP_PAGES
    assert engine.kv.usage() == 9 / (GROUPS * GROUP_BLOCKS - 1)


def test_a_reset_of_the_prefix_cache_sees_every_block_free(engine: PooledEngine) -> None:
    engine.kv.grow(1)
    assert engine.kv.reset_prefix_cache(engine.scheduler.reset_prefix_cache)
    assert engine.kv.balloon.present == [0, 1]


def engine_of(ranks: StubRanks) -> ElasticKv:
    kv = ElasticKv(PLAN, StubScheduler(blocks=GROUP_BLOCKS * GROUPS, plan=PLAN))
    kv.attach(ranks)
    return kv


def test_a_group_is_taken_on_all_ranks_or_on_none() -> None:
    ranks = StubRanks(3, 1, 2)
    kv = engine_of(ranks)
    assert kv.grow(3) == 1 and kv.balloon.present == [0, 1] and kv.held_groups == 2
    assert [rank.mapped for rank in ranks.ranks] == [{0, 1}] * 3
    assert [rank.free_groups for rank in ranks.ranks] == [2, 0, 1], "what was too much is given back"
    assert kv.grow(1) == 0 and [rank.mapped for rank in ranks.ranks] == [{0, 1}] * 3


def test_a_rank_that_fails_leaves_no_group_on_the_others() -> None:
    ranks = StubRanks(4, 4)
    kv = engine_of(ranks)
    ranks.ranks[1].failure = Unavailable("the device refuses")
    with pytest.raises(Unavailable, match="rank 1: the device refuses"):
        kv.grow(2)
    assert ranks.ranks[0].mapped == {0} and kv.balloon.present == [0]
    assert kv.held_groups == 3, "rank 1 has not confirmed that it has none"
    ranks.ranks[1].failure = None
    kv.on_step_ended()
    assert kv.held_groups == 1 and kv.grow(2) == 2
    assert [rank.mapped for rank in ranks.ranks] == [{0, 1, 2}] * 2


def test_a_group_that_one_rank_cannot_unmap_is_not_used_until_it_can() -> None:
    ranks = StubRanks(4, 4)
    kv = engine_of(ranks)
    kv.grow(2)
    ranks.ranks[0].failure = Unavailable("the device refuses")
    with pytest.raises(Unavailable, match="rank 0"):
        kv.give_back([2])
    assert [rank.mapped for rank in ranks.ranks] == [{0, 1, 2}, {0, 1}] and kv.held_groups == 3
    ranks.ranks[0].failure = None
    assert kv.grow(2) == 2 and kv.balloon.present == [0, 1, 3, 4], "group 2 is still on its way out"
    kv.on_step_ended()
    assert [rank.mapped for rank in ranks.ranks] == [{0, 1, 3, 4}] * 2
