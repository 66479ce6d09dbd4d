"""The block pool: a state machine over every order of calls, and a few stories."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from rose.engines.blocks import BlockPool, block_digest, root_digest

CAPACITY = 12


class PoolHolds(RuleBasedStateMachine):
    """Whatever order things come in, no block has two owners that do not know of each other, and none is lost."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(CAPACITY)
        self.held: dict[int, int] = {}
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
        return tuple(blocks)

    @rule(owner=owners, text=st.integers(0, 20))
    def publish(self, owner: tuple[int, ...], text: int) -> None:
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
        return (block,)

    @rule(owner=consumes(owners))
    def release(self, owner: tuple[int, ...]) -> None:
        self.pool.release(owner)
        for block in owner:
            self.held[block] -= 1

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


TestPoolHolds = PoolHolds.TestCase


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
