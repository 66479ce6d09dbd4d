"""The block pool: a state machine over every order of calls, the same with pages that come and go, and stories."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from rose.engines.blocks import BlockPool, block_digest, root_digest

CAPACITY = 12
PER_PAGE = 3


class Lender:
    """A page source with a budget; `urgent_only` pages are kept for requests that cannot do without."""

    def __init__(self, pages: int, budget: int | None = None, urgent_only: int = 0) -> None:
        self.away = set(range(pages))
        self.pages = pages
        self.budget = pages if budget is None else budget
        self.urgent_only = urgent_only
        self.asked: list[bool] = []

    @property
    def lent(self) -> int:
        return self.pages - len(self.away)

    def room(self) -> int:
        return max(0, self.budget - self.lent)

    def acquire(self, count: int, *, urgent: bool) -> list[int]:
        self.asked.append(urgent)
        most = max(0, self.room() - (0 if urgent else self.urgent_only))
        pages = sorted(self.away)[: min(count, most)]
        self.away.difference_update(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        assert not self.away & set(pages) and len(set(pages)) == len(pages), "a page was given back twice"
        self.away.update(pages)


def paged(pages: int, per_page: int = PER_PAGE, **lender: int) -> tuple[BlockPool, Lender]:
    source = Lender(pages, **lender)
    return BlockPool(pages * per_page, blocks_per_page=per_page, source=source), source


def blocks_of(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def publish(pool: BlockPool, blocks: Sequence[int], text: int) -> list[bytes]:
    """Enter a chain of blocks under digests of its own."""
    digests = [root_digest("", str(text))]
    for block in blocks:
        digests.append(block_digest(digests[-1], [text]))
        pool.publish(block, digests[-1])
    return digests[1:]


class PoolHolds(RuleBasedStateMachine):
    """Whatever order things come in, no block has two owners that do not know of each other, and none is lost."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(CAPACITY)
        self.held: dict[int, int] = {}
        self.lists: list[list[int]] = []  # what every owner knows as its blocks
        self.content: dict[bytes, int] = {}

    @rule(target=owners, count=st.integers(1, 5))
    def allocate(self, count: int) -> object:
        before = self.pool.available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > before)
        if blocks is None:
            return multiple()
        for block in blocks:
            assert self.held.get(block, 0) == 0, "a block that somebody holds was handed out"
            self.held[block] = 1
            self.content = {digest: b for digest, b in self.content.items() if b != block}
        return self._owner(blocks)

    @rule(owner=owners, text=st.integers(0, 20))
    def publish(self, owner: list[int], text: int) -> None:
        digest = block_digest(root_digest("", "0"), [text])
        block = owner[0]
        if self.held.get(block, 0):
            self.pool.publish(block, digest)
            if self.pool.find(digest) == block:
                self.content[digest] = block

    @rule(target=owners, text=st.integers(0, 20))
    def find_and_take(self, text: int) -> object:
        digest = block_digest(root_digest("", "0"), [text])
        block = self.pool.find(digest)
        if block is None or (self.pool.references[block] == 0 and self.pool.available < 1):
            return multiple()
        assert self.content.get(digest) == block, "found a block whose content is gone"
        self.pool.take(block)
        self.held[block] = self.held.get(block, 0) + 1
        return self._owner([block])

    @rule(owner=consumes(owners))
    def release(self, owner: list[int]) -> None:
        self.pool.release(owner)
        for block in owner:
            self.held[block] -= 1
        owner.clear()

    @rule(limit=st.integers(0, CAPACITY))
    def limit(self, limit: int) -> None:
        self.pool.set_limit(limit)

    @rule()
    def new_weights(self) -> None:
        self.pool.forget_digests()
        self.content.clear()

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        assert self.pool.used == sum(count > 0 for count in self.held.values())

    def _owner(self, blocks: list[int]) -> list[int]:
        self.lists.append(blocks)
        return blocks


TestPoolHolds = PoolHolds.TestCase


class PagedPoolHolds(PoolHolds):
    """The same with pages that come and go: nothing is ever handed out that lies in a page that is away."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.source = paged(CAPACITY // PER_PAGE, urgent_only=1)

    @rule(budget=st.integers(0, CAPACITY // PER_PAGE), urgent_only=st.integers(0, 2))
    def lend(self, budget: int, urgent_only: int) -> None:
        self.source.budget, self.source.urgent_only = budget, urgent_only

    @rule(pages=st.integers(1, 3))
    def grow(self, pages: int) -> None:
        before = self.pool.pages_held
        assert self.pool.grow(pages) == self.pool.pages_held - before <= pages

    @rule(pages=st.integers(1, 3))
    def shrink(self, pages: int) -> None:
        before, unpinned = self.pool.pages_held, self.pool.pages_held - self.pool.pages_pinned
        assert self.pool.shrink(pages) == before - self.pool.pages_held == min(pages, unpinned)

    @rule(pages=st.integers(1, 4), blocks_max=st.none() | st.integers(0, 3))
    def gather(self, pages: int, blocks_max: int | None) -> None:
        used, pinned = self.pool.used, self.pool.pages_pinned
        moves = self.pool.gather(pages, blocks_max)
        assert not moves.keys() & set(moves.values()), "one move would undo another"
        assert all(self.held.get(block, 0) == 0 for block in moves.values()), "moved on top of somebody"
        for block, place in moves.items():
            self.held[place] = self.held.pop(block)
        for blocks in self.lists:
            blocks[:] = [moves.get(block, block) for block in blocks]
        gone = set(moves.values())  # what was cached there
        self.content = {digest: b for digest, b in self.content.items() if b not in gone}
        self.content = {digest: moves.get(b, b) for digest, b in self.content.items()}
        fewest = -(-used // PER_PAGE)
        wanted = self.pool.pages_held - pages
        best = min(pinned, max(wanted, fewest))
        assert self.pool.pages_pinned == best if blocks_max is None else best <= self.pool.pages_pinned <= pinned
        assert blocks_max is None or len(moves) <= blocks_max
        assert bool(moves) == (self.pool.pages_pinned < pinned), "moves that clear no page"

    @invariant()
    def holds_what_was_lent(self) -> None:
        assert self.pool.pages_held == self.source.lent
        pages = {block // PER_PAGE for block, count in self.held.items() if count}
        assert not pages & self.source.away, "a request holds a block in a page that is away"
        assert self.pool.pages_pinned == len(pages)


TestPagedPoolHolds = PagedPoolHolds.TestCase


def test_least_recently_used_goes_first_and_of_a_chain_its_tail() -> None:
    pool, root = BlockPool(4), root_digest("", "0")
    chains = []
    for text in (1, 2):
        blocks = pool.allocate(2)
        assert blocks is not None
        first = block_digest(root, [text])
        second = block_digest(first, [text])
        pool.publish(blocks[0], first)
        pool.publish(blocks[1], second)
        pool.release(blocks)
        chains.append((first, second))
    assert pool.allocate(1) is not None
    assert pool.find(chains[0][1]) is None and pool.find(chains[0][0]) is not None
    assert pool.find(chains[1][1]) is not None


def test_digests_differ_by_tenant_version_and_everything_in_front() -> None:
    roots = {
        root_digest("a", "1"),
        root_digest("a", "2"),
        root_digest("b", "1"),
        root_digest("a1", ""),
        root_digest("", "a1"),
    }
    assert len(roots) == 5
    one, two = root_digest("a", "1"), root_digest("b", "1")
    assert block_digest(one, [1, 2]) != block_digest(two, [1, 2])
    assert block_digest(block_digest(one, [1]), [2]) != block_digest(block_digest(one, [3]), [2])


def test_a_paged_pool_begins_empty_and_takes_only_the_pages_it_needs() -> None:
    pool, source = paged(4)
    assert pool.pages_held == 0 and pool.available == 12
    assert blocks_of(pool, 2) == [0, 1]
    assert pool.pages_held == source.lent == 1
    assert blocks_of(pool, 4) == [2, 3, 4, 5]
    assert pool.pages_held == 2
    assert pool.allocate(7) is None and pool.pages_held == 2, "what cannot be had changed something"


def test_a_fresh_block_comes_from_the_fullest_page_then_the_lowest() -> None:
    pool, _ = paged(3, per_page=4)
    pool.grow(3)
    taken = blocks_of(pool, 12)
    pool.release([taken[0], taken[1], taken[4], taken[8], taken[9], taken[10]])  # 2, 3 and 1 blocks are left in use
    assert blocks_of(pool, 1) == [4], "the page with three in use is fuller"
    assert blocks_of(pool, 2) == [0, 1]
    assert blocks_of(pool, 1) == [8]
    pool.check()


def test_a_page_that_is_only_cached_is_used_before_one_that_is_empty() -> None:
    pool, _ = paged(2)
    pool.grow(2)
    taken = blocks_of(pool, 6)
    publish(pool, taken[3:4], 1)
    pool.release(taken)
    assert blocks_of(pool, 2) == [4, 5]
    assert pool.shrink(2) == 1, "the empty page was broken into"


def test_pages_run_dry_and_go_while_the_rest_stays_where_it_is() -> None:
    pool, source = paged(4)
    requests = [blocks_of(pool, 3) for _ in range(4)]
    pool.release(requests[1])
    pool.release(requests[2][:1])
    assert pool.shrink(4) == 1 and source.away == {1}
    assert all(pool.references[block] for block in [*requests[0], *requests[2][1:], *requests[3]])
    fresh = blocks_of(pool, 2)
    assert fresh == [6, 3], "a free block first, and then the page that came back"
    pool.check()


def test_shrink_drops_the_cache_by_page_and_spares_running_requests() -> None:
    pool, source = paged(4)
    chains = [blocks_of(pool, 3) for _ in range(4)]
    digests = [publish(pool, chain, text) for text, chain in enumerate(chains)]
    pool.release(chains[2])
    pool.release(chains[0])
    pool.release(chains[3][1:])  # one block of this page is still in use
    assert pool.shrink(1) == 1 and source.away == {2}
    assert [pool.find(chain[0]) is not None for chain in digests] == [True, True, False, True]
    assert pool.shrink(3) == 1 and source.away == {0, 2}, "pages with requests in them stay"
    assert pool.find(digests[3][2]) is not None, "a page that cannot go loses nothing"
    pool.check()


def test_a_cached_page_that_is_used_again_is_no_longer_the_oldest() -> None:
    pool, source = paged(2)
    chains = [blocks_of(pool, 3) for _ in range(2)]
    digests = [publish(pool, chain, text) for text, chain in enumerate(chains)]
    pool.release(chains[0])
    pool.release(chains[1])
    again = pool.find(digests[0][0])
    assert again == chains[0][0]
    pool.take(again)
    pool.release([again])
    assert pool.shrink(1) == 1 and source.away == {1}


def test_losing_a_cached_block_does_not_make_a_page_recent() -> None:
    pool, source = paged(3)
    chains = [blocks_of(pool, 3) for _ in range(3)]
    for text, chain in enumerate(chains[:2]):
        publish(pool, chain, text)
        pool.release(chain)
    pool.release(chains[2][1:])
    pool.set_limit(7)
    assert blocks_of(pool, 1) == chains[2][1:2] and pool.cached == 5, "a block of page 0 made way in the count"
    assert pool.shrink(1) == 1 and source.away == {0}


def test_cached_blocks_count_towards_the_limit_even_with_free_ones() -> None:
    for pool in (BlockPool(9), paged(3)[0]):
        chain = blocks_of(pool, 4)
        digests = publish(pool, chain, 1)
        pool.release(chain)
        pool.set_limit(5)
        assert len(blocks_of(pool, 3)) == 3
        pool.check()
        assert [pool.find(digest) is not None for digest in digests] == [True, True, False, False]


def test_a_missing_block_is_requested_then_dropped_then_insisted_on() -> None:
    pool, source = paged(3, urgent_only=1)
    chain = blocks_of(pool, 6)
    digests = publish(pool, chain, 1)
    pool.release(chain)
    source.asked.clear()
    assert len(blocks_of(pool, 3)) == 3
    assert source.asked == [False], "nothing was to be had without urgency, and the cache was enough"
    assert sum(pool.find(digest) is None for digest in digests) == 3, "no more was dropped than needed"
    assert len(blocks_of(pool, 5)) == 5
    assert source.asked == [False, False, True]
    assert pool.cached == 0 and pool.pages_held == 3


def test_a_source_that_gives_less_than_promised_loses_no_block() -> None:
    pool, source = paged(2)
    held = blocks_of(pool, 3)
    source.acquire = lambda count, urgent: []  # type: ignore[method-assign, assignment, misc]
    assert pool.allocate(1) is None
    pool.release(held)
    pool.check()


def test_a_lower_limit_drops_the_cache_by_page() -> None:
    pool, source = paged(3)
    chains = [blocks_of(pool, 3) for _ in range(3)]
    for text, chain in enumerate(chains):
        publish(pool, chain, text)
    pool.release(chains[1])
    pool.release([chains[0][2]])
    pool.set_limit(7)
    assert pool.cached == 1, "the idle page lost all it cached, the busy one nothing"
    assert pool.shrink(3) == 1 and source.away == {1}


def test_blocks_are_gathered_so_that_pages_can_go_and_are_still_found() -> None:
    pool, source = paged(4, per_page=4)
    chains = [blocks_of(pool, 4) for _ in range(4)]
    digests = [publish(pool, chain, text) for text, chain in enumerate(chains)]
    for chain in chains:
        pool.release(chain[1:])
    assert pool.pages_pinned == 4 and pool.shrink(1) == 0, "one block in every page holds all of them"
    moves = pool.gather(2)
    assert set(moves) == {chains[2][0], chains[3][0]}
    assert pool.shrink(2) == 2 and source.away == {2, 3}
    assert [pool.find(chain[0]) for chain in digests] == [moves.get(chain[0], chain[0]) for chain in chains]
    assert pool.used == 4 and pool.cached == 4, "no more was dropped than the places needed"
    pool.check()


def test_blocks_are_gathered_in_the_fullest_page() -> None:
    pool, _ = paged(3, per_page=4)
    taken = blocks_of(pool, 12)
    pool.release([taken[0], taken[1], taken[4], taken[9], taken[10], taken[11]])  # 2, 3 and 1 blocks are left in use
    assert pool.gather(1) == {taken[8]: taken[4]}


def test_gathering_stops_where_it_would_copy_more_than_it_may() -> None:
    pool, _ = paged(4, per_page=4)
    taken = blocks_of(pool, 16)
    pool.release([*taken[1:4], *taken[6:8], *taken[9:12]])  # 1, 2, 1 and 4 blocks are left in use
    assert pool.gather(2, blocks_max=0) == {}
    assert pool.gather(2, blocks_max=1) == {taken[8]: taken[6]}
    assert pool.gather(2, blocks_max=1) == {taken[0]: taken[7]}
    assert pool.shrink(4) == 2
    pool.check()


def test_gathering_moves_nothing_when_nothing_fits_or_is_wanted() -> None:
    pool, _ = paged(3)
    taken = blocks_of(pool, 8)
    assert pool.gather(1) == {}, "eight blocks do not fit in two pages of three"
    pool.release(taken[:3])
    assert pool.gather(1) == {}, "one page is free already"
    pool.check()


def test_without_a_source_pages_only_say_where_blocks_lie() -> None:
    pool = BlockPool(6, blocks_per_page=3)
    assert pool.pages_held == 2 and pool.available == 6
    with pytest.raises(AssertionError):
        pool.shrink(1)
    with pytest.raises(AssertionError):
        pool.grow(1)


def test_new_weights_empty_the_cache_and_the_pages_can_go() -> None:
    pool, _ = paged(2)
    chain = blocks_of(pool, 6)
    publish(pool, chain, 1)
    pool.release(chain)
    pool.forget_digests()
    pool.check()
    assert pool.cached == 0 and pool.shrink(2) == 2 and pool.pages_held == 0
