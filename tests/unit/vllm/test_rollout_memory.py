"""A rollout engine holds what serving's need leaves, and gives pages back before its next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.pooled_engine import GROUP_BLOCKS, GROUP_PAGES, GROUPS, PAGE_BYTES, PooledEngine

from rose.vllm import kv_compaction
from rose.vllm.rollout_memory import PooledMemory
from rose.vllm.vllm_arbiter import ServingPages

IDLE = ServingPages(held=0, used=0, asked=0, burst=0)


class Arbiter:
    """What serving publishes, and the agent's control."""

    def __init__(self) -> None:
        self.control = SimpleNamespace(kv_bytes=None)
        self.pages: ServingPages | None = IDLE
        self.wanted: list[int] = []

    def serving_pages(self) -> ServingPages | None:
        return self.pages

    def want_pages(self, pages: int) -> None:
        self.wanted.append(pages)


class Rollouts(PooledEngine):
    """A rollout engine on a pool of five groups, its own null block's included."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.arbiter: Any = Arbiter()
        self.memory = PooledMemory(self.kv, self.scheduler, self.arbiter, now_s=lambda: self.now_s)
        self.evicted: list[str] = []

    def apply(self) -> None:
        self.memory.observe()
        if self.memory.is_due:
            self.memory.fit(self._evict)

    def _evict(self, request: Any) -> None:
        self.evicted.append(request.request_id)
        self.scheduler.finish_requests(request.request_id, "aborted")

    def step(self) -> None:
        self.apply()
        self.memory.before_step()
        super().step()

    @property
    def groups(self) -> int:
        return self.kv.held_groups


@pytest.fixture
def rollouts() -> Rollouts:
    return Rollouts()


def test_rollouts_take_pages_within_what_leaves_serving_its_headroom(rollouts: Rollouts) -> None:
    for name in "abc":
        rollouts.run(name, blocks=6)
    rollouts.run("d", blocks=3)
    assert rollouts.groups == 4, "of four groups beside its own, a fifth stays free: three"
    assert rollouts.arbiter.wanted == []
    rollouts.scheduler.waiting.append(rollouts.scheduler.running.pop())
    assert rollouts.memory.blocks_max == 4 * GROUP_BLOCKS - 1


def test_pages_within_the_budget_that_serving_holds_are_wished_for(rollouts: Rollouts) -> None:
    rollouts.worker.free_groups = 1
    rollouts.apply()
    rollouts.kv.watch_allocations(lambda request, missing: False)
    assert rollouts.memory._grow(2 * GROUP_BLOCKS) == 1
    assert rollouts.arbiter.wanted == [GROUP_PAGES]


def test_what_serving_asks_for_is_given_back_at_once(rollouts: Rollouts) -> None:
    for name in "abc":
        rollouts.run(name, blocks=6)
    rollouts.arbiter.pages = ServingPages(held=2, used=0, asked=2, burst=0)
    rollouts.memory.observe()
    assert rollouts.memory.is_due
    rollouts.apply()
    assert rollouts.groups == 2 and len(rollouts.worker.mapped) == 2
    assert len(rollouts.evicted) == 2 and len(rollouts.scheduler.requests) == 1
    assert not rollouts.memory.is_due
    assert rollouts.memory.status()["moved_blocks"] == len(rollouts.worker.copied)


def test_where_copying_takes_too_long_the_cheapest_pages_are_evicted(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_compaction, "MOVED_BYTES_MAX", 0)
    for name in "abc":
        rollouts.run(name, blocks=6)
    rollouts.arbiter.pages = ServingPages(held=2, used=0, asked=2, burst=0)
    rollouts.apply()
    assert rollouts.groups == 2 and rollouts.worker.copied == [] and rollouts.evicted


def test_an_empty_group_goes_before_any_request(rollouts: Rollouts) -> None:
    rollouts.run("a", blocks=6)
    rollouts.kv.grow(2)
    rollouts.arbiter.pages = ServingPages(held=4, used=4, asked=0, burst=0)
    rollouts.apply()
    assert rollouts.evicted == [] and rollouts.groups == 2


def test_without_word_of_serving_only_the_null_blocks_group_is_held(rollouts: Rollouts) -> None:
    rollouts.run("a", blocks=12)
    rollouts.arbiter.pages = None
    rollouts.apply()
    assert rollouts.groups == 1 and rollouts.memory.blocks_max == GROUP_BLOCKS - 1


def test_a_parked_engine_runs_nothing_and_keeps_one_group(rollouts: Rollouts) -> None:
    rollouts.run("a", blocks=12)
    rollouts.arbiter.control.kv_bytes = 0
    rollouts.apply()
    status = rollouts.memory.status()
    assert rollouts.memory.blocks_max == 0 and rollouts.groups == 1
    assert (status["kv_blocks_limit"], status["pages"]) == (0, GROUP_PAGES)


def test_a_parked_engine_has_its_whole_budget_again_at_once(rollouts: Rollouts) -> None:
    rollouts.apply()
    before = rollouts.memory.blocks_max
    for kv_bytes in (0, None):
        rollouts.arbiter.control.kv_bytes = kv_bytes
        rollouts.apply()
    assert rollouts.memory.blocks_max == before > GROUP_BLOCKS


def test_the_operators_limit_is_in_pages_of_the_pool(rollouts: Rollouts) -> None:
    rollouts.arbiter.control.kv_bytes = 2 * GROUP_PAGES * PAGE_BYTES
    rollouts.apply()
    assert rollouts.memory.blocks_max == 3 * GROUP_BLOCKS - 1
    assert rollouts.memory.status()["pages_max"] == 3 * GROUP_PAGES < GROUPS * GROUP_PAGES


def test_a_lower_budget_is_due_even_if_no_page_must_go(rollouts: Rollouts) -> None:
    rollouts.apply()
    assert not rollouts.memory.is_due
    rollouts.arbiter.pages = ServingPages(held=8, used=8, asked=0, burst=0)
    rollouts.memory.observe()
    assert rollouts.memory.is_due, "a request that waits may never fit now"
    rollouts.apply()
    assert not rollouts.memory.is_due


def test_a_burst_that_serving_knows_keeps_more_pages_free(rollouts: Rollouts) -> None:
    rollouts.arbiter.pages = ServingPages(held=0, used=0, asked=0, burst=4)
    rollouts.apply()
    assert rollouts.memory.status()["headroom_pages"] > 2
