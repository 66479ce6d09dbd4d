"""The KV memory of a lent device: one pool of pages, two tenants, serving first.

`core.memory` decides the budgets; here they are carried out. What is only cached goes first. Rollouts whose blocks fit
in no arrangement of the pages that are left are evicted, least work first. The blocks of the others are moved together:
a copy takes a hundredth of the time of computing the block again, but serving waits meanwhile, so one call copies no
more than `MOVED_BYTES_MAX`; requests that are still in the way are evicted too. The policy makes room before every
step; if serving's own planning runs out of pages all the same, `on_short` and `on_refused` make room on the spot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rose.core.memory import (
    Decision,
    Holder,
    MemoryPolicy,
    MemorySampled,
    ResidenceInflation,
    SetRolloutBudget,
    victims,
)
from rose.device.pages import PagePool, PageShare, VirtualRange, group_of
from rose.engines.base import TokenEvent
from rose.engines.batch_scheduler import BatchScheduler
from rose.engines.blocks import BlockPool
from rose.engines.embedded.runner import KvMemory

MOVED_BYTES_MAX = 16 << 20  # two to three milliseconds of one core

Decided = Callable[[float, MemorySampled, Sequence[Decision]], None]


@dataclass(frozen=True, slots=True)
class Tenant:
    """One model's part: its share of the pages, and the memory its engine sees."""

    share: PageShare
    memory: KvMemory

    @classmethod
    def build(cls, pages: PagePool, block_bytes: int, name: str) -> Tenant:
        group = group_of(pages.page_bytes, block_bytes)
        groups = pages.pages // group.pages
        share = PageShare(VirtualRange(pages, groups * group.pages, name), 0, group.pages)
        blocks = BlockPool(groups * group.blocks, blocks_per_page=group.blocks, source=share)
        return cls(share, KvMemory(share.memory.floats(), blocks))

    @property
    def pinned_pages(self) -> int:
        return self.memory.pool.pages_pinned * self.share.group_pages

    def pages_for(self, blocks: int) -> int:
        return -(-blocks // self.memory.pool.blocks_per_page) * self.share.group_pages

    def blocks_within(self, pages: int) -> int:
        return pages // self.share.group_pages * self.memory.pool.blocks_per_page


class SharedMemory:
    """The memory of both engines, which take `serving.memory` and `rollout.memory`; `lend_to` names the rollouts."""

    def __init__(
        self, pages: PagePool, policy: MemoryPolicy, *, serving_block_bytes: int, rollout_block_bytes: int,
        now_s: Callable[[], float],
    ) -> None:  # fmt: skip
        self.pages = pages
        self.policy = policy
        self.serving = Tenant.build(pages, serving_block_bytes, "serving")
        self.rollout = Tenant.build(pages, rollout_block_bytes, "rollout")
        self.inflation = ResidenceInflation()
        self.owner_limit_pages: int | None = None
        self.burst_blocks: Callable[[], int] = lambda: 0  # that serving's next burst may need
        self.weights_swapped = False
        self.moved_blocks = 0
        self.evicted_tokens = 0  # computed, and thrown away
        self.on_decisions: Decided | None = None  # receives every sample and its decisions, for the journal
        self._now_s = now_s
        self._rollouts: BatchScheduler | None = None
        self._on_evicted: Callable[[Sequence[TokenEvent]], None] = lambda events: None
        self.serving.share.budget_pages = pages.pages
        self.serving.share.on_short = self.serving.share.on_refused = self.observe
        self.observe()

    def lend_to(self, rollouts: BatchScheduler, on_evicted: Callable[[Sequence[TokenEvent]], None]) -> None:
        self._rollouts, self._on_evicted = rollouts, on_evicted
        self._make_rollouts_fit()

    def observe(self, serving_asks_pages: int = 0, refused_pages: int = 0) -> None:
        """Carry out what the policy decides: before every step, and whenever serving is short of this many pages."""
        # A model that asks has dropped what it only cached, so all it holds is needed.
        serving = self.serving.share.held if serving_asks_pages else self.serving.pinned_pages
        sample = MemorySampled(
            serving,
            self.rollout.share.held,
            serving_asks_pages,
            self.inflation.mean,
            self.owner_limit_pages,
            self.weights_swapped,
            refused_pages,
            self.serving.pages_for(self.burst_blocks()),
        )
        self.weights_swapped = False
        now_s = self._now_s()
        decisions = self.policy.observe(sample, now_s)
        if decisions and self.on_decisions is not None:
            self.on_decisions(now_s, sample, decisions)
        for decision in decisions:
            if isinstance(decision, SetRolloutBudget):
                self._set_budget(decision.pages)
        if decisions:
            self._make_rollouts_fit()
        if not serving_asks_pages and self.serving.share.groups_over:
            self.serving.memory.pool.shrink(self.serving.share.groups_over)

    def _set_budget(self, rollout_pages: int) -> None:
        self.rollout.share.budget_pages = rollout_pages
        self.serving.share.budget_pages = self.pages.pages - rollout_pages

    def _make_rollouts_fit(self) -> None:
        """Drop cached blocks, evict requests that fit nowhere, move blocks together, evict what is still in the way."""
        pool, share, rollouts = self.rollout.memory.pool, self.rollout.share, self._rollouts
        pool.shrink(share.groups_over)
        if rollouts is None:
            return
        computed = sum(live.computed for live in rollouts.running)
        events = rollouts.limit_kv(self.rollout.blocks_within(share.budget_pages))
        if share.groups_over:
            self.gather(rollouts, share.groups_over)
            pool.shrink(share.groups_over)
        if share.groups_over:
            holders = [Holder(live.request.request_id, live.computed, tuple(live.blocks)) for live in rollouts.running]
            for request_id in victims(holders, pool.blocks_per_page, share.groups_over):
                rollouts.evict(request_id)
                events.append(TokenEvent(request_id, (), (), rollouts.version, "abort"))
            pool.shrink(share.groups_over)
        assert share.groups_over == 0, "rollouts hold more than their budget after an eviction"
        if events:
            self.evicted_tokens += computed - sum(live.computed for live in rollouts.running)
            self._on_evicted(events)

    def gather(self, rollouts: BatchScheduler, groups: int) -> None:
        """Move blocks of rollouts together until this many groups are free, or until it takes too long."""
        moves = rollouts.gather(groups, MOVED_BYTES_MAX // rollouts.limits.block_bytes)
        self.rollout.memory.copy(moves)
        self.moved_blocks += len(moves)

    def remove_rollouts(self) -> None:
        """Give all pages of the rollout model to serving. Its requests must be gone already."""
        self._rollouts = None
        self._set_budget(0)
        pool = self.rollout.memory.pool
        pool.forget_digests()
        pool.shrink(pool.pages_held)
