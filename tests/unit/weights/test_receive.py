"""The receiver: a version is whole and verified before anybody sees it, and the old one runs until then."""

from __future__ import annotations

import logging
import resource

import numpy as np
import pytest
from tests.contract.chain_ends import QUICK, RUN, SECRET, equal, random_weights, shard, stepped
from tests.contract.faulty_relay import Fault, FaultyRelay

from rose.config.server_settings import EngineSettings
from rose.engines.embedded.engine import EmbeddedEngine
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.models.model_spec import read_spec
from rose.models.presets import write_preset
from rose.models.tensors import MemoryTensors, check, open_tensors, to_bf16
from rose.observe.metrics import Metrics
from rose.weights.layouts import Rule, fuse, tensor_parallel, tensors_of
from rose.weights.manifest import WeightsRefused
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.shards import Tensor
from rose.weights.weight_metrics import ReceiveMetrics

PUBLISH = {"run": RUN, "secret": SECRET, "retry": QUICK, "chunk_elements_max": 40, "bucket_dense_bytes": 200}
RECEIVE = {"secret": SECRET, "retry": QUICK}
TENSORS = [Tensor("embed", (11, 6)), Tensor("up", (9, 6))]


class Trainer:
    """Publishes a numpy model in memory, one step after the other."""

    def __init__(self, relay, **options) -> None:
        self.weights = {name: array & 0x7EFF for name, array in random_weights(0, TENSORS).items()}
        self.publisher = Publisher(self.weights, relay, **(PUBLISH | options))
        self.step = 0

    def go_on(self, steps: int = 1) -> dict[str, np.ndarray]:
        for _ in range(steps):
            self.step += 1
            for name, array in stepped(self.weights, self.step).items():
                self.weights[name][...] = array
            self.published = self.publisher.publish(self.step).result()
            self.publisher.wait()
        return {name: array.copy() for name, array in self.weights.items()}


def test_a_version_is_fetched_swapped_in_and_followed_by_the_next():
    relay = MemoryRelay()
    trainer, receiver = Trainer(relay), Receiver(relay, RUN, **RECEIVE)
    assert receiver.fetch() is None and receiver.version is None
    for step in range(1, 6):
        weights = trainer.go_on()
        received = receiver.fetch()
        assert received.version.version == step and equal(received.tensors, weights)
        assert received.hash == trainer.published.hash
        receiver.installed(received)
        assert receiver.version == received.version and receiver.fetch() is None


@pytest.mark.parametrize("prepared", [True, False])
def test_what_runs_is_never_touched(prepared):
    relay = MemoryRelay()
    trainer, receiver = Trainer(relay), Receiver(relay, RUN, **RECEIVE)
    running = None
    for _ in range(6):
        weights = trainer.go_on()
        received = receiver.fetch()
        if running is not None:
            assert equal(running[0].tensors, running[1])
        receiver.installed(received)
        running = received, weights
        if prepared:
            receiver.prepare()
    assert equal(running[0].tensors, running[1])


def test_each_delta_is_read_once():
    relay = MemoryRelay()
    trainer, receiver = Trainer(relay), Receiver(relay, RUN, **RECEIVE)
    trainer.go_on()
    receiver.installed(receiver.fetch())
    for _ in range(3):
        trainer.go_on()
        newest = trainer.publisher.newest
        received = receiver.fetch()
        manifest = receiver.reader.manifest_of(newest)
        records = sum(
            e.size_bytes for e in relay.list() if e.key.endswith(f"v{newest.version:010}/delta.0000/manifest")
        )
        assert received.size_bytes == manifest.size_bytes() + records
        receiver.installed(received)


def test_an_engine_that_does_not_take_a_version_gets_the_next_one_all_the_same():
    relay = MemoryRelay()
    trainer, receiver = Trainer(relay), Receiver(relay, RUN, **RECEIVE)
    first = trainer.go_on()
    running = receiver.fetch()
    receiver.installed(running)
    trainer.go_on()
    refused = receiver.fetch()
    assert receiver.fetch() is refused  # still the one to install
    latest = trainer.go_on(2)
    received = receiver.fetch()
    assert equal(received.tensors, latest) and equal(running.tensors, first)
    with pytest.raises(RequestRefused, match="not the one"):
        receiver.installed(refused)
    receiver.installed(received)


def test_views_are_for_reading():
    relay = MemoryRelay()
    Trainer(relay).go_on()
    received = Receiver(relay, RUN, **RECEIVE).fetch()
    with pytest.raises(ValueError):
        received.tensors["up"][0] = 1


def test_who_joins_late_takes_an_anchor_and_the_deltas_after_it():
    relay = MemoryRelay()
    trainer = Trainer(relay, anchor_every=4)
    weights = trainer.go_on(7)
    receiver = Receiver(relay, RUN, **RECEIVE)
    received = receiver.fetch()
    assert equal(received.tensors, weights) and received.version.version == 7
    assert receiver.lag_versions >= 1  # nothing is installed yet
    receiver.installed(received)
    assert receiver.lag_versions == 0


def test_weights_that_are_here_already_are_not_fetched():
    relay = MemoryRelay()
    weights = Trainer(relay).go_on()
    received = Receiver(relay, RUN, tensors=TENSORS, initial=weights, **RECEIVE).fetch()
    assert received.seconds["decode"] == 0 and equal(received.tensors, weights)


def test_another_layout_gets_its_own_share():
    relay = MemoryRelay()
    rules = {"embed": Rule(0, 11), "up": Rule(0, 9)}
    worker = fuse(tensor_parallel(TENSORS, rules, 2), ["embed", "up"], "both")
    trainer = Trainer(relay, workers=[worker])
    weights = trainer.go_on(3)
    for placements in worker:
        received = Receiver(relay, RUN, tensors=TENSORS, placements=placements, **RECEIVE).fetch()
        assert equal(received.tensors, shard(weights, placements))


@pytest.mark.parametrize("buffers", [1, 2])
def test_any_failure_leaves_the_old_version_and_the_next_try_goes_on(buffers):
    relay = FaultyRelay(MemoryRelay(), lambda name, key: Fault.NONE)
    trainer, receiver = Trainer(relay), Receiver(relay, RUN, buffers=buffers, **RECEIVE)
    first = trainer.go_on()
    running = receiver.fetch()
    receiver.installed(running)
    latest = trainer.go_on()
    relay.faults = lambda name, key: Fault.CORRUPT if name == "get" and ".b00001" in key else Fault.NONE
    with pytest.raises(RoseError):
        receiver.fetch()
    if buffers == 2:
        assert equal(running.tensors, first) and receiver.version == running.version
    relay.faults = lambda name, key: Fault.NONE
    trainer.publisher.republish().result()
    received = receiver.fetch()
    assert equal(received.tensors, latest)


def test_a_run_of_another_secret_or_model_is_refused_loudly(caplog):
    relay = MemoryRelay()
    Trainer(relay).go_on()
    stranger = Receiver(relay, RUN, secret=b"another secret, as long as it must be", retry=QUICK)
    with caplog.at_level(logging.WARNING), pytest.raises(WeightsRefused, match="nothing in the relay can be used"):
        stranger.fetch()
    assert "weights refused" in caplog.text
    other_model = Receiver(relay, RUN, tensors=[Tensor("embed", (11, 7)), TENSORS[1]], **RECEIVE)
    with pytest.raises(WeightsRefused, match="embed"):
        other_model.fetch()


def test_versions_of_another_run_are_not_seen():
    relay = MemoryRelay()
    Trainer(relay).go_on()
    assert Receiver(relay, "another-run", **RECEIVE).fetch() is None


def test_shapes_that_change_are_refused_and_the_old_version_stays():
    relay = MemoryRelay()
    trainer, receiver = Trainer(relay), Receiver(relay, RUN, **RECEIVE)
    weights = trainer.go_on()
    running = receiver.fetch()
    receiver.installed(running)
    with Publisher({"embed": np.zeros((3, 3), np.uint16)}, relay, **PUBLISH) as other:
        other.publish(9).result()
        with pytest.raises(WeightsRefused):
            receiver.fetch()
    assert equal(running.tensors, weights)


def test_a_full_disk_is_an_error_before_anything_is_mapped(tmp_path):
    relay = MemoryRelay()
    Trainer(relay).go_on()
    receiver = Receiver(relay, RUN, folder=tmp_path, **RECEIVE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(Unavailable, match="no room"):
            receiver.fetch()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert receiver.fetch() is not None


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("models") / "model", seed=3)


def floats_of(folder) -> dict[str, np.ndarray]:
    tensors = open_tensors(folder)
    return {name: np.array(tensors.float32(name)) for name in tensors.names()}


@pytest.mark.parametrize("buffers", [1, 2])
def test_an_engine_stages_what_was_received_from_memory_or_from_the_folder(model_folder, tmp_path, buffers):
    relay, weights = MemoryRelay(), floats_of(model_folder)
    spec = read_spec(model_folder)
    options = PUBLISH | {"chunk_elements_max": 20_000, "bucket_dense_bytes": 200_000}
    receiver = Receiver(relay, RUN, tensors=tensors_of(spec), folder=tmp_path, buffers=buffers, **RECEIVE)
    settings = EngineSettings(kv_memory_mb=64, max_context_tokens=256)
    engine = EmbeddedEngine.load(model_folder, settings)
    with Publisher(weights, relay, **options) as publisher:
        for step in (1, 2, 3):
            for array in weights.values():
                array *= np.float32(1.01)
            publisher.publish(step).result()
            received = receiver.fetch()
            tensors = open_tensors(received.folder)
            check(tensors, spec)
            assert all(np.array_equal(tensors.bits16(name), to_bf16(array)) for name, array in weights.items())
            from_folder = engine.stage(str(step), received.folder)
            from_memory = engine.stage(str(step), MemoryTensors(received.tensors))
            assert np.array_equal(from_folder.floats.view(np.uint32), from_memory.floats.view(np.uint32))
            engine.swap(from_folder)
            receiver.installed(received, pause_s=0.0001)
            assert engine.facts().version == str(step)
    engine.close()


def test_metrics_tell_what_came_in_and_how_far_behind_we_are():
    relay, metrics = MemoryRelay(), Metrics(process_facts=False)
    trainer, receiver = Trainer(relay), Receiver(relay, RUN, metrics=ReceiveMetrics(metrics), **RECEIVE)
    trainer.go_on(2)
    received = receiver.fetch()
    assert "rose_weights_lag_versions 2.0" in metrics.exposition().decode()
    receiver.installed(received, pause_s=0.002)
    said = metrics.exposition().decode()
    assert "rose_weights_lag_versions 0.0" in said and "rose_weights_version 2.0" in said
    assert "rose_weights_pause_seconds_count 1.0" in said
    assert f"rose_weights_received_bytes_total {float(received.size_bytes)}" in said
