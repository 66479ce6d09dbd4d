"""The KV memory of a lent device: one pool of pages, two tenants, serving first.

Each model reserves addresses for all of the pool and holds pages within a budget. `core.memory` decides the budgets;
here they are carried out. A page moves in three steps, none of which touches the other model: it is cleared of
rollouts' blocks, unmapped from the rollouts' range, and mapped into serving's when serving takes it.

Clearing loses as little work as it can. What is only cached goes first. Rollouts whose blocks fit in no arrangement of
the pages that are left are evicted, least work first (their clients get "abort" and what they have so far). The blocks
of the others are moved together; requests among cached blocks stand in nearly every page, and without moves hardly
one could be cleared but by evicting. A copy takes a hundredth of the time of computing the block again, but serving
waits meanwhile, so one call copies no more than `MOVED_BYTES_MAX`; whoever stands in the way then is evicted too.

Serving asks in two ways. Before every step the policy sees how much it holds, and makes room early. And if serving's
own planning runs out of pages all the same, `on_short` makes room on the spot, and `on_refused` if it is the system
that has no memory for one; so serving never waits for a page while a rollout holds one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rose.core.memory import Decision, Holder, LendingStretch, MemoryPolicy, MemorySampled, SetRolloutBudget, victims
from rose.coserve.pages import PagePool, PageShare, VirtualRange, group_of
from rose.engines.base import TokenEvent
from rose.engines.blocks import BlockPool
from rose.engines.embedded.memory import KvMemory
from rose.engines.scheduler import BatchScheduler

MOVED_BYTES_MAX = 16 << 20  # two to three milliseconds of one core

Decided = Callable[[float, MemorySampled, Sequence[Decision]], None]


@dataclass(frozen=True, slots=True)
class Tenant:
    """One model's part: its share of the pages, and the memory its engine sees."""

    share: PageShare
    memory: KvMemory

    @property
    def pinned_pages(self) -> int:
        return self.memory.pool.pages_pinned * self.share.group_pages

    def blocks_within(self, pages: int) -> int:
        return pages // self.share.group_pages * self.memory.pool.blocks_per_page


def _tenant(pages: PagePool, block_bytes: int, name: str) -> Tenant:
    group = group_of(pages.page_bytes, block_bytes)
    groups = pages.pages // group.pages
    share = PageShare(VirtualRange(pages, groups * group.pages, name), 0, group.pages)
    blocks = BlockPool(groups * group.blocks, blocks_per_page=group.blocks, source=share)
    return Tenant(share, KvMemory(share.memory.floats(), blocks))


class SharedMemory:
    """Made before the engines, which take `serving.memory` and `rollout.memory`; then `lend_to` names the rollouts."""

    def __init__(
        self, pages: PagePool, policy: MemoryPolicy, *, serving_block_bytes: int, rollout_block_bytes: int,
        now_s: Callable[[], float],
    ) -> None:  # fmt: skip
        self.pages = pages
        self.policy = policy
        self.serving = _tenant(pages, serving_block_bytes, "serving")
        self.rollout = _tenant(pages, rollout_block_bytes, "rollout")
        self.stretch = LendingStretch()
        self.owner_limit_pages: int | None = None
        self.weights_swapped = False
        self.moved_blocks = 0
        self.evicted_tokens = 0  # computed, and thrown away
        self.on_decisions: Decided | None = None  # told of what was decided and from what, if somebody keeps a journal
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
        """Ask the policy and obey; before every step, and whenever serving is short of this many pages."""
        # A model that asks has dropped what it only cached, so all it holds is needed.
        serving = self.serving.share.held if serving_asks_pages else self.serving.pinned_pages
        sample = MemorySampled(
            serving,
            self.rollout.share.held,
            serving_asks_pages,
            self.stretch.mean,
            self.owner_limit_pages,
            self.weights_swapped,
            refused_pages,
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
        """First what is only cached, then whoever could not fit, then moves, then whoever stands in the way still."""
        pool, share = self.rollout.memory.pool, self.rollout.share
        pool.shrink(share.groups_over)
        if self._rollouts is None:
            return
        computed = sum(live.computed for live in self._rollouts.running)
        events = self._rollouts.limit_kv(self.rollout.blocks_within(share.budget_pages))
        if share.groups_over:
            self._gather_for(share.groups_over)
            pool.shrink(share.groups_over)
        if share.groups_over:
            events += self._evict_for(share.groups_over)
            pool.shrink(share.groups_over)
        assert share.groups_over == 0, "rollouts hold more than their budget after an eviction"
        if events:
            self.evicted_tokens += computed - sum(live.computed for live in self._rollouts.running)
            self._on_evicted(events)

    def _gather_for(self, groups: int) -> None:
        rollouts = self._rollouts
        assert rollouts is not None
        moves = rollouts.gather(groups, MOVED_BYTES_MAX // rollouts.limits.block_bytes)
        self.rollout.memory.copy(moves)
        self.moved_blocks += len(moves)

    def _evict_for(self, groups: int) -> list[TokenEvent]:
        rollouts = self._rollouts
        assert rollouts is not None
        holders = [Holder(live.request.request_id, live.computed, tuple(live.blocks)) for live in rollouts.running]
        going = victims(holders, self.rollout.memory.pool.blocks_per_page, groups)
        for request_id in going:
            rollouts.evict(request_id)
        return [TokenEvent(request_id, (), (), rollouts.version, "abort") for request_id in going]

    def remove_rollouts(self) -> None:
        """The rollout model leaves: all its pages go to serving. Its requests must be gone already."""
        self._rollouts = None
        self._set_budget(0)
        pool = self.rollout.memory.pool
        pool.forget_digests()
        pool.shrink(pool.pages_held)
