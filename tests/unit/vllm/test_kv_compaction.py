"""Requests that fit into fewer groups stay with what was computed; only the others are evicted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pooled_engine import GROUP_BLOCKS, GROUPS, PooledEngine

from rose.core.memory import Holder
from rose.vllm import kv_compaction
from rose.vllm.kv_compaction import Compaction, choose


def test_requests_with_the_most_work_stay_as_far_as_they_fit() -> None:
    holders = [Holder("a", 100, (1, 2, 8)), Holder("b", 300, (9, 10)), Holder("c", 200, (3, 11, 12, 13, 14))]
    stay = choose(holders, {0: 3, 1: 6, 2: 0}, size=8, groups=1)
    assert stay.groups == {0} and stay.requests == {"b", "a"}, "seven blocks: three, four with one more each"


def test_the_fullest_groups_are_kept_and_shared_blocks_count_once() -> None:
    holders = [Holder("a", 2, (8, 9, 10)), Holder("b", 1, (8, 9, 11))]
    stay = choose(holders, {0: 0, 1: 4, 2: 1, 3: 6}, size=4, groups=2)
    assert stay.groups == {0, 3} and stay.requests == {"a", "b"}


@given(st.lists(st.tuples(st.integers(0, 50), st.sets(st.integers(1, 39), min_size=1, max_size=12)), max_size=8))
def test_what_stays_always_has_room(drawn: list[tuple[int, set[int]]]) -> None:
    holders = [Holder(str(number), work, tuple(blocks)) for number, (work, blocks) in enumerate(drawn)]
    used = {block for holder in holders for block in holder.blocks}
    references = {group: sum(block // 8 == group for block in used) for group in range(5)}
    for groups in range(1, 6):
        stay = choose(holders, references, 8, groups)
        blocks = {block for holder in holders if holder.request_id in stay.requests for block in holder.blocks}
        assert len(stay.groups) == groups and 0 in stay.groups
        assert len(blocks) + len(stay.requests) <= groups * 8 - 1


class Rollouts(PooledEngine):
    """Requests of three blocks and a half, which lie in three groups."""

    def __init__(self) -> None:
        super().__init__()
        self.kv.grow(3)
        self.requests = [self.run(name, blocks=4) for name in "abcde"]
        self.step()
        self.compaction = Compaction(self.kv, self.scheduler)
        self.evicted: list[str] = []

    def holders(self) -> list[Holder]:
        manager = self.scheduler.kv_cache_manager
        return [
            Holder(one.request_id, one.num_computed_tokens, tuple(manager.get_block_ids(one.request_id)[0]))
            for one in self.scheduler.requests.values()
        ]

    def compact(self, groups: int) -> bool:
        def evict(request: object) -> None:
            self.evicted.append(request.request_id)  # type: ignore[attr-defined]
            self.scheduler.finish_requests(self.evicted[-1], "aborted")

        return self.compaction.carry_out(self.holders(), groups, evict)


@pytest.fixture
def rollouts() -> Rollouts:
    return Rollouts()


def test_a_cut_moves_what_fits_and_evicts_the_rest(rollouts: Rollouts) -> None:
    pool = rollouts.scheduler.kv_cache_manager.block_pool
    hashes = {block.block_hash for block in pool.blocks if block.block_hash is not None}
    assert rollouts.compact(groups=2)
    assert rollouts.kv.held_groups == 2 and len(rollouts.worker.mapped) == 2
    assert len(rollouts.evicted) == 3 and len(rollouts.scheduler.requests) == 2
    present = rollouts.kv.balloon.present
    for request in rollouts.scheduler.requests.values():
        kept = {f"{request.request_id}:{place}" for place in range(request._all_token_ids.__len__() // 16)}
        here = {
            block.block_hash for group in rollouts.kv.balloon.present for block in rollouts.kv.balloon.blocks_of(group)
        }
        assert kept & hashes <= here, "every full block is found in a group that stays"
    assert rollouts.compaction.moved_blocks == len(rollouts.worker.copied) > 0
    for source, target in rollouts.worker.copied:
        assert source // GROUP_BLOCKS not in present
        assert target // GROUP_BLOCKS in present and pool.blocks[target].ref_cnt == 0
    assert {request.num_preemptions for request in rollouts.scheduler.waiting} == {1}


def test_a_request_inside_the_kept_groups_is_not_disturbed(rollouts: Rollouts) -> None:
    rollouts.scheduler.finish_requests("e", "aborted")
    assert rollouts.compact(groups=GROUPS - 1) and rollouts.evicted == []
    assert len(rollouts.scheduler.running) == 4 and rollouts.worker.copied == []


def test_too_much_to_copy_is_left_to_eviction(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_compaction, "MOVED_BYTES_MAX", 0)
    assert not rollouts.compact(groups=2)
    assert rollouts.evicted == [] and rollouts.kv.held_groups == 4 and len(rollouts.scheduler.running) == 5
