"""Publisher to receivers over real relays, in any order of events: whoever arrives holds what was published."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.contract.chain_ends import QUICK, RUN, equal
from tests.contract.relays import SECRET, FolderStore, HttpStore, Store

from rose.core.versions import VersionId
from rose.weights.manifest import Fenced
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver
from rose.weights.relay.filesystem import FilesystemRelay

SHAPES = {"embed": (23, 16), "up": (40, 16), "norm": (16,)}
KINDS = [Store, FolderStore, HttpStore]
SHARES = {"memory": 0.5, "filesystem": 0.1, "http": 0.04}  # of the profile's examples
STEPS = 30  # of each


class Cluster(RuleBasedStateMachine):
    """One relay, a trainer that may die and be replaced, workers that come, go and miss versions."""

    kind = Store

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed):
        self.folder = Path(tempfile.mkdtemp())
        self.store = self.kind(self.folder)
        self.relay = self.store.open()
        self.random = np.random.default_rng(seed)
        self.weights = {name: self.random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
        self.history: dict[VersionId, dict[str, np.ndarray]] = {}
        self.workers: list[Receiver] = []
        self.running: dict[int, tuple] = {}
        self.replaced: list[Publisher] = []
        self.step = 0
        self.is_lost = False  # with the claims, so that nobody can be told to be replaced
        self.start_trainer(0)

    def start_trainer(self, after_epoch):
        self.trainer = Publisher(
            self.weights,
            self.relay,
            run=RUN,
            secret=SECRET,
            retry=QUICK,
            after_epoch=after_epoch,
            anchor_every=4,
            keep_versions=3,
            chunk_elements_max=250,
            bucket_dense_bytes=800,
        )

    @rule(scale=st.sampled_from([1e-4, 1e-2, 1.0]), anchor=st.booleans())
    def publish(self, scale, anchor):
        self.step += 1
        for array in self.weights.values():
            array += (self.random.standard_normal(array.shape) * scale).astype(np.float32)
        published = self.trainer.publish(self.step, anchor=anchor).result()
        self.trainer.wait()
        self.is_lost = False
        self.history[published.version] = (published.hash, {n: a.copy() for n, a in self.weights.items()})

    @rule()
    def replace_trainer(self):
        self.replaced.append(self.trainer)
        self.start_trainer(self.trainer.epoch)
        self.is_lost = False

    @precondition(lambda self: self.replaced and not self.is_lost)
    @rule()
    def a_replaced_trainer_is_fenced(self):
        with pytest.raises(Fenced):
            self.replaced[-1].publish(self.step + 1000).result()

    @rule()
    def lose_everything(self):
        for entry in self.relay.list():
            self.relay.delete(entry.key)
        self.is_lost = True

    @precondition(lambda self: self.trainer.newest is not None)
    @rule()
    def republish(self):
        self.trainer.republish().result()
        self.is_lost = False

    @precondition(lambda self: len(self.workers) < 3)
    @rule(buffers=st.sampled_from([1, 2]))
    def join(self, buffers):
        self.workers.append(Receiver(self.relay, RUN, secret=SECRET, buffers=buffers, retry=QUICK))

    @precondition(lambda self: self.workers)
    @rule(which=st.integers(0, 2), install=st.booleans())
    def fetch(self, which, install):
        worker = self.workers[which % len(self.workers)]
        received = worker.fetch()
        if received is None:
            return
        self.check(received)
        if install:
            worker.installed(received)
            self.running[id(worker)] = received
        elif worker._buffer_count == 1:
            self.running.pop(id(worker), None)  # its only buffer was written over

    @precondition(lambda self: self.workers)
    @rule(which=st.integers(0, 2))
    def prepare(self, which):
        self.workers[which % len(self.workers)].prepare()

    def check(self, received):
        hash_, weights = self.history[received.version]
        from rose.models.tensors import to_bf16

        assert received.hash == hash_
        assert equal(received.tensors, {name: to_bf16(array) for name, array in weights.items()})

    @invariant()
    def what_runs_is_a_published_version(self):
        for worker in getattr(self, "workers", []):
            received = self.running.get(id(worker))
            if received is not None and worker._buffer_count == 2:
                self.check(received)

    def teardown(self):
        if not hasattr(self, "trainer"):
            return
        self.trainer.republish().result() if self.trainer.newest else self.publish(1e-2, False)
        for worker in self.workers:
            received = worker.fetch()
            if received is not None:
                self.check(received)
                worker.installed(received)
            assert worker.version == self.trainer.newest
        for publisher in [*self.replaced, self.trainer]:
            publisher.close()
        self.store.close()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_whatever_happens_whoever_arrives_holds_what_was_published(kind, monkeypatch):
    monkeypatch.setattr(FilesystemRelay.__init__, "__kwdefaults__", {"durable": False})
    examples = max(1, round(SHARES[kind.name] * settings().max_examples))
    machine = type("Cluster", (Cluster,), {"kind": kind})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    chosen = settings(max_examples=examples, stateful_step_count=STEPS, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(machine, settings=chosen)
