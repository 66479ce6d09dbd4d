"""Whatever happens to trainer, relay and members, in whatever order: who arrives holds exactly what was published.

Versions are published with and without anchors, members fall behind, join and restart, the relay loses single keys or
everything, calls fail in four ways, trainers die halfway and are replaced, and a stranger writes junk where they are
about to write. No member ever holds half of anything for the newest, and at the end, with the trouble over, all arrive.
"""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.contract.chain_ends import RUN, TENSORS, Member, Trainer, equal, random_weights, shard, stepped
from tests.contract.faulty_relay import Fault, FaultyRelay

from rose.core.versions import VersionId
from rose.errors import RoseError
from rose.weights.chain import Folder, Names, RetryPolicy
from rose.weights.layouts import Rule, row_shards, tensor_parallel, whole
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.relay_base import KeyExists

RULES = {"embed": Rule(0, 12, 12), "up": Rule(1, 3)}
LAYOUTS = [[whole(TENSORS)], tensor_parallel(TENSORS, RULES, 2), row_shards([whole(TENSORS)], 3)]
FAULTS = [Fault.NONE, Fault.REQUEST_LOST, Fault.REPLY_LOST, Fault.LATE, Fault.CORRUPT]
ONCE = RetryPolicy(limit_s=0.0)
STUBBORN = RetryPolicy(limit_s=1.0, first_wait_s=0.0, wait_s_max=0.0)


class Chains(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.random = random.Random(seed)
        self.fault_share = 0.0
        self.relay = FaultyRelay(self.empty_relay(), self._fault)
        self.published: dict[VersionId, dict] = {}
        self.weights = random_weights(seed)
        self.step = self.now_s = 0
        self.members: list[tuple[Member, VersionId | None]] = []
        self.trainer = self._new_trainer()

    def empty_relay(self):
        return MemoryRelay()

    def _fault(self, name, key):
        return self.random.choice(FAULTS) if self.random.random() < self.fault_share else Fault.NONE

    def _new_trainer(self) -> Trainer:
        share, self.fault_share = self.fault_share, 0.0
        self.now_s += 1  # between two trainers some time passes
        options = {"workers": LAYOUTS, "retry": STUBBORN, "chunk_elements_max": 20}
        trainer = Trainer(self.relay, at_least=self.now_s, **options)
        self.fault_share = share
        return trainer

    def _publish(self, anchor: bool) -> None:
        self.step += 1
        self.weights = stepped(self.weights, self.step)
        target = VersionId(self.trainer.writer.epoch, self.step)
        self.published[target] = self.weights  # whether or not its manifest gets through
        self.trainer.publish(self.step, self.weights, anchor=anchor)

    @rule(anchor=st.booleans())
    def publish(self, anchor):
        try:
            self._publish(anchor)
        except RoseError:
            assert self.fault_share, "nothing was wrong"

    @rule()
    def trainer_dies_while_publishing(self):
        try:
            self.trainer.push(self.step + 1, stepped(self.weights, 1000 + self.step), anchor=False)
        except RoseError:
            assert self.fault_share
        self.trainer = self._new_trainer()

    @rule(keep=st.integers(1, 6))
    def sweep(self, keep):
        try:
            self.trainer.writer.sweep(keep)
        except RoseError:
            assert self.fault_share

    @rule(layout=st.sampled_from(LAYOUTS), rank=st.integers(0, 2))
    def join(self, layout, rank):
        if len(self.members) < 4:
            member = Member(self.relay, placements=layout[rank % len(layout)], retry=ONCE)
            self.members.append((member, None))

    @rule(index=st.integers(0, 3))
    def leave(self, index):
        if index < len(self.members):
            self.members.pop(index)

    @rule(index=st.integers(0, 3))
    def sync(self, index):
        if index >= len(self.members):
            return
        member = self.members[index][0]
        try:
            target = member.sync()
        except RoseError:
            assert self.fault_share or self.has_lost
            self.members[index] = (member, None)  # a staging under way: it may hold anything, and never runs
            return
        if target is not None:
            self.members[index] = (member, target)

    has_lost = False

    @rule(share=st.floats(0, 1), data=st.randoms(use_true_random=False))
    def relay_loses(self, share, data):
        for entry in self.relay.inner.list():
            if data.random() < share:
                self.relay.inner.delete(entry.key)
        self.has_lost = True

    @rule(kind=st.sampled_from(["claim", "anchor", "delta"]), ahead=st.integers(0, 3))
    def stranger_writes(self, kind, ahead):
        """Junk, where the trainers of this run are about to write."""
        epoch, names = self.trainer.writer.epoch, Names(RUN)
        folder = Folder(VersionId(epoch + ahead % 2, self.step + 1), kind, ahead // 2)
        with contextlib.suppress(KeyExists):
            self.relay.inner.put_new(
                names.claim(epoch + ahead) if kind == "claim" else names.manifest(folder), [b"junk"]
            )

    @rule(share=st.sampled_from([0.0, 0.02, 0.2]))
    def weather(self, share):
        self.fault_share = share

    @invariant()
    def who_arrived_holds_what_was_published(self):
        for member, held in getattr(self, "members", []):
            if held is not None:
                assert equal(member.arrays, shard(self.published[held], member.placements)), held

    def teardown(self):
        if not hasattr(self, "trainer"):
            return
        self.fault_share = 0.0
        self.relay.list()  # what was late arrives
        self._publish(anchor=False)
        if not self.trainer.writer.check_relay():
            self.trainer.republish()
        joined = [Member(self.relay, placements=layout[-1]) for layout in LAYOUTS]
        newest = VersionId(self.trainer.writer.epoch, self.step)
        for member in [*joined, *(member for member, _ in self.members)]:
            member.reader.refused.clear()
            assert member.sync() == newest
            assert equal(member.arrays, shard(self.weights, member.placements))


@pytest.mark.parametrize("where", ["memory", "filesystem"])
def test_everybody_arrives(where, tmp_path):
    folders = iter(range(10**6))

    class Here(Chains):
        def empty_relay(self):
            return MemoryRelay() if where == "memory" else FilesystemRelay(tmp_path / str(next(folders)), durable=False)

    examples = max(1, settings().max_examples // (2 if where == "memory" else 10))
    run_state_machine_as_test(Here, settings=settings(max_examples=examples, stateful_step_count=30))
