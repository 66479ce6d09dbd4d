"""Two models on one pool of pages, with everything real but the models: policy, shares, block pools, mapped memory.

Serving asks for blocks and always gets them while the pool has the memory, whatever the rollouts hold. Every request
writes its own number into every block it holds, so that a page in two places, or a block handed out twice, is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rose.core.memory import Holder, MemoryLimits, MemoryPolicy, MemorySampled, Regrowth, SetRolloutBudget, victims
from rose.device.pages import PagePool, PageShare, VirtualRange, group_of
from rose.engines.blocks import BlockPool, block_digest, root_digest

PAGE_BYTES = 4096
PAGES = 12
BLOCK_BYTES = {"serving": 1024, "rollout": 1536}  # rollout blocks need groups of three pages


@dataclass
class Model:
    share: PageShare
    pool: BlockPool
    block_floats: int
    held: dict[int, list[int]] = field(default_factory=dict)  # request: blocks

    @property
    def pinned(self) -> int:
        return self.pool.pages_pinned * self.share.group_pages

    def write(self, request: int, blocks: list[int]) -> None:
        self.held[request] = blocks
        for block in blocks:
            self.floats_of(block)[:] = request

    def gather(self, groups: int, moves_max: int) -> None:
        moves = self.pool.gather(groups, moves_max)
        for block, place in moves.items():
            self.floats_of(place)[:] = self.floats_of(block)
        self.held = {name: [moves.get(block, block) for block in blocks] for name, blocks in self.held.items()}

    def floats_of(self, block: int):  # type: ignore[no-untyped-def]
        return self.share.memory.floats()[block * self.block_floats : (block + 1) * self.block_floats]


def model_of(pages: PagePool, name: str) -> Model:
    group = group_of(PAGE_BYTES, BLOCK_BYTES[name])
    groups = PAGES // group.pages
    share = PageShare(VirtualRange(pages, groups * group.pages, name), 0, group.pages)
    pool = BlockPool(groups * group.blocks, blocks_per_page=group.blocks, source=share)
    return Model(share, pool, BLOCK_BYTES[name] // 4)


class SharedMemoryHolds(RuleBasedStateMachine):
    """Serving is never short while a rollout holds a page; no page or block is in two places."""

    def __init__(self, regrowth: Regrowth) -> None:
        super().__init__()
        self.policy = MemoryPolicy(PAGES, MemoryLimits(regrowth=regrowth))
        self.pages = PagePool(PAGES, PAGE_BYTES)
        self.serving, self.rollout = model_of(self.pages, "serving"), model_of(self.pages, "rollout")
        self.serving.share.on_short = lambda pages: self.observe(asks=pages)
        self.now_s = 0.0
        self.requests = self.moves_max = 0

    @initialize(moves_max=st.sampled_from([0, 3, 100]))
    def start(self, moves_max: int) -> None:
        self.moves_max = moves_max
        self.observe()

    @rule(count=st.integers(1, 20))
    def serving_comes(self, count: int) -> None:
        fits = count <= self.serving.pool.capacity - self.serving.pool.used
        blocks = self.serving.pool.allocate(count)
        assert (blocks is not None) == fits, "serving is short while a rollout holds a page"
        if blocks is not None:
            self.requests += 1
            self.serving.write(self.requests, blocks)

    @rule(count=st.integers(1, 12))
    def rollout_comes(self, count: int) -> None:
        blocks = self.rollout.pool.allocate(count)
        if blocks is not None:
            self.requests += 1
            self.rollout.write(self.requests, blocks)

    @rule(data=st.data(), is_serving=st.booleans(), cached=st.booleans())
    def one_ends(self, data: st.DataObject, is_serving: bool, cached: bool) -> None:
        model = self.serving if is_serving else self.rollout
        if not model.held:
            return
        request = data.draw(st.sampled_from(sorted(model.held)))
        blocks = model.held.pop(request)
        if cached:
            digest = root_digest("", str(request))
            for number, block in enumerate(blocks):
                digest = block_digest(digest, [number])
                model.pool.publish(block, digest)
        model.pool.release(blocks)

    @rule(wait_s=st.sampled_from([0.1, 1.0, 11.0, 60.0]), swapped=st.booleans(), stretch=st.floats(1, 3))
    def time_passes(self, wait_s: float, swapped: bool, stretch: float) -> None:
        self.now_s += wait_s
        self.observe(swapped=swapped, stretch=stretch)

    @precondition(lambda self: self.pages.spare)
    @rule()
    def memory_goes_back_to_the_system(self) -> None:
        self.pages.release_spare()

    @invariant()
    def one_place_for_everything(self) -> None:
        self.pages.check()
        for model in (self.serving, self.rollout):
            model.pool.check()
            assert model.pool.pages_held * model.share.group_pages == model.share.held

    @invariant()
    def within_budgets(self) -> None:
        shares = [self.serving.share, self.rollout.share]
        assert sum(share.budget_pages for share in shares) <= PAGES
        assert self.rollout.share.held <= self.rollout.share.budget_pages

    @invariant()
    def everybody_reads_what_it_wrote(self) -> None:
        for model in (self.serving, self.rollout):
            for request, blocks in model.held.items():
                assert all((model.floats_of(block) == request).all() for block in blocks)

    def observe(self, asks: int = 0, swapped: bool = False, stretch: float = 1.0) -> None:
        """What a device's executor does with the policy's decisions."""
        serving = self.serving.share.held if asks else self.serving.pinned
        sample = MemorySampled(serving, self.rollout.share.held, asks, stretch, None, swapped)
        for decision in self.policy.observe(sample, self.now_s):
            if isinstance(decision, SetRolloutBudget):
                self.rollout.share.budget_pages = decision.pages
                self.serving.share.budget_pages = PAGES - decision.pages
            else:
                self.evict()
        if not asks:
            self.serving.pool.shrink(self.serving.share.groups_over)

    def evict(self) -> None:
        pool, share = self.rollout.pool, self.rollout.share
        pool.shrink(share.groups_over)
        self.rollout.gather(share.groups_over, self.moves_max)
        pool.shrink(share.groups_over)
        holders = [Holder(str(request), len(blocks), tuple(blocks)) for request, blocks in self.rollout.held.items()]
        for name in victims(holders, pool.blocks_per_page, share.groups_over):
            pool.release(self.rollout.held.pop(int(name)))
        pool.shrink(share.groups_over)
        assert share.groups_over == 0

    def teardown(self) -> None:
        for model in (self.serving, self.rollout):
            for blocks in model.held.values():
                model.pool.release(blocks)
            model.pool.forget_digests()
            model.pool.shrink(PAGES)
            model.share.memory.free()
        assert self.pages.spare == self.pages.created
        self.pages.close()


@pytest.mark.parametrize("regrowth", ["swap", "hysteresis"])
def test_any_order(regrowth: Regrowth) -> None:
    run_state_machine_as_test(lambda: SharedMemoryHolds(regrowth), settings=settings())
