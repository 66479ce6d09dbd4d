"""A stub of vLLM's scheduler whose KV memory comes from a pool: five groups of six blocks, in two pages each."""

from __future__ import annotations

from tests.unit.vllm_stubs import StubRequest, StubScheduler, StubWorker

from rose.vllm.elastic_kv import ElasticKv
from rose.vllm.kv_allocation import PoolPlan
from rose.vllm.kv_groups import KvGroups

GROUP_BLOCKS, GROUP_PAGES, GROUPS = 6, 2, 5
PAGE_BYTES = 4096
PLAN = PoolPlan("/a/pool", True, KvGroups(PAGE_BYTES, GROUP_BLOCKS, GROUPS, PAGE_BYTES, (0, 1 << 20)))


class PooledEngine:
    """A scheduler, its groups and the worker that maps them."""

    def __init__(self, free_groups: int = GROUPS - 1) -> None:
        self.scheduler = StubScheduler(blocks=GROUP_BLOCKS * GROUPS, plan=PLAN)
        self.kv = ElasticKv(PLAN, self.scheduler)
        self.worker = StubWorker(free_groups)
        self.kv.attach(self.worker)

    def run(self, name: str, blocks: int) -> StubRequest:
        """Let a request run whose prompt fills so many blocks but for one token."""
        request = StubRequest(name, prompt_tokens=blocks * 16 - 1)
        self.scheduler.add_request(request)
        self.step()
        assert request in self.scheduler.running
        return request

    def step(self) -> None:
        self.scheduler.update_from_output(self.scheduler.schedule(), None)
