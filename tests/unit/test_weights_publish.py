"""The publisher: from live tensors to versions in a relay, whatever the loop around it does."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tests.contract.chain_ends import QUICK, RUN, SECRET, Member, equal
from tests.contract.faulty_relay import Fault, FaultyRelay
from torch import nn

from rose.core.versions import VersionId
from rose.errors import ConfigError, ModelError, RequestRefused, Unavailable
from rose.models.bits import to_bf16
from rose.observe.metrics import Metrics
from rose.weights.chain import Patience
from rose.weights.coding import SparseCodec
from rose.weights.layouts import Rule, row_shards, tensor_parallel
from rose.weights.live import LiveTensors
from rose.weights.manifest import Fenced
from rose.weights.metrics import PublishMetrics
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver
from rose.weights.relay.memory import MemoryRelay
from rose.weights.shards import LayoutError, Tensor

OPTIONS = {"run": RUN, "secret": SECRET, "patience": QUICK, "piece_elements_max": 40, "bucket_dense_bytes": 200}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 8)
        self.up = nn.Linear(8, 20)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight  # tied


def bits_of(model: nn.Module) -> dict[str, np.ndarray]:
    """The parameters as bf16 bits, each once."""
    return {name: to_bf16(value.detach().float().numpy()) for name, value in model.named_parameters()}


def held_by(relay, tensors) -> Member:
    member = Member(relay, tensors=tensors)
    member.sync()
    return member


def nudge(model: nn.Module, amount: float = 0.01) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value += amount


def test_three_lines_from_a_training_loop():
    relay, model = MemoryRelay(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Publisher(model, relay, optimizer=optimizer, **OPTIONS) as publisher:
        for step in range(1, 6):
            model.up(model.embed(torch.arange(13))).square().mean().backward()
            optimizer.step()
            publisher.publish(step)
        published = publisher.wait()
    assert published is not None and published.version.version == 5 and published.kind == "delta"
    member = held_by(relay, publisher.tensors)
    assert equal(member.arrays, bits_of(model))
    assert member.manifest.version_hash == published.hash


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_any_floating_type_is_published_as_bf16(kind):
    relay, model = MemoryRelay(), Model().to(kind)
    with Publisher(model, relay, **OPTIONS) as publisher:
        publisher.publish(1).result()
    assert equal(held_by(relay, publisher.tensors).arrays, bits_of(model))


def test_or_each_tensor_in_its_own_type():
    relay = MemoryRelay()
    state = {"a": torch.randn(6, 5), "b": torch.randn(9).half(), "c": torch.randn(4, 4).bfloat16()}
    with Publisher(state, relay, dtype=None, **OPTIONS) as publisher:
        publisher.publish(1).result()
    member = held_by(relay, publisher.tensors)
    assert [tensor.dtype for tensor in publisher.tensors] == ["F32", "F16", "BF16"]
    assert np.array_equal(member.arrays["a"].view(np.float32), state["a"].numpy())
    assert np.array_equal(member.arrays["b"].view(np.float16), state["b"].numpy())


def test_numpy_arrays_that_do_not_lie_in_one_block():
    relay = MemoryRelay()
    whole = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)
    state = {
        "turned": whole.T,
        "bits": to_bf16(whole),
        "turned_bits": to_bf16(whole).T,
    }
    with Publisher(state, relay, **OPTIONS) as publisher:
        publisher.publish(1).result()
    member = held_by(relay, publisher.tensors)
    assert np.array_equal(member.arrays["turned"], to_bf16(whole).T)
    assert np.array_equal(member.arrays["turned_bits"], to_bf16(whole).T)


def test_the_thread_reads_while_the_loop_goes_on_and_the_optimizer_waits_for_it(monkeypatch):
    relay, model = MemoryRelay(), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    may_read = threading.Event()
    reads = LiveTensors.bits

    def slowly(self, *arguments):
        may_read.wait(30)
        return reads(self, *arguments)

    monkeypatch.setattr(LiveTensors, "bits", slowly)
    with Publisher(model, relay, optimizer=optimizer, **OPTIONS) as publisher:
        before = bits_of(model)
        publication = publisher.publish(1)
        assert not publication.is_done  # and yet we are here
        model.up(model.embed(torch.arange(13))).square().mean().backward()
        threading.Timer(0.1, may_read.set).start()
        optimizer.step()
        publication.result()
    assert not equal(before, bits_of(model))
    assert equal(held_by(relay, publisher.tensors).arrays, before)


def test_weights_that_change_under_the_reader_are_an_error_and_not_a_mixture(monkeypatch):
    relay, model = MemoryRelay(), Model()
    ends = LiveTensors.check_unchanged

    def late(self):
        nudge(model)
        ends(self)

    with Publisher(model, relay, **OPTIONS) as publisher:
        publisher.publish(1).result()
        monkeypatch.setattr(LiveTensors, "check_unchanged", late)
        with pytest.raises(RequestRefused, match="changed while they were read"):
            publisher.publish(2)
        monkeypatch.undo()
        assert held_by(relay, publisher.tensors).manifest.version == 1
        assert publisher.publish(3).result().kind == "anchor"
    assert equal(held_by(relay, publisher.tensors).arrays, bits_of(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_and_the_old_version_stays(value):
    relay, model = MemoryRelay(), Model()
    with Publisher(model, relay, **OPTIONS) as publisher:
        publisher.publish(1).result()
        with torch.no_grad():
            model.up.bias[7] = value
        with pytest.raises(ModelError, match=r"up\.bias"):
            publisher.publish(2)
        assert held_by(relay, publisher.tensors).manifest.version == 1


def test_minus_zero_and_denormals_keep_their_bits():
    relay = MemoryRelay()
    bits = np.array([0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F], np.uint16)
    with Publisher({"a": bits}, relay, **OPTIONS) as publisher:
        publisher.publish(1).result()
    assert np.array_equal(held_by(relay, publisher.tensors).arrays["a"], bits)


def test_two_trainers_the_first_is_fenced_off_loudly_and_for_good():
    relay, first_model, second_model = MemoryRelay(), Model(), Model()
    with Publisher(first_model, relay, **OPTIONS) as first:
        first.publish(1).result()
        with Publisher(second_model, relay, **OPTIONS) as second:
            nudge(second_model)
            second.publish(1).result()
            for step in (2, 3):
                with pytest.raises(Fenced, match="another trainer"):
                    first.publish(step).result()
            member = held_by(relay, second.tensors)
            assert member.manifest.epoch == second.epoch > first.epoch
            assert equal(member.arrays, bits_of(second_model))


def test_a_failure_is_raised_by_the_next_publish_and_the_one_after_is_whole():
    relay = FaultyRelay(MemoryRelay(), lambda name, key: Fault.NONE)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without it, publish itself may be in time to raise it
    options = OPTIONS | {"patience": Patience(limit_s=0.0), "optimizer": optimizer}
    with Publisher(model, relay, **options) as publisher:
        publisher.publish(1).result()
        relay.faults = lambda name, key: Fault.REQUEST_LOST if key.endswith("manifest") else Fault.NONE
        nudge(model)
        publisher.publish(2)
        with pytest.raises(Unavailable):
            publisher.publish(3)
        relay.faults = lambda name, key: Fault.NONE
        assert held_by(relay, publisher.tensors).manifest.version == 1
        assert publisher.publish(4).result().kind == "anchor"
    assert equal(held_by(relay, publisher.tensors).arrays, bits_of(model))


def test_a_failure_that_somebody_heard_of_is_not_raised_twice():
    relay = FaultyRelay(
        MemoryRelay(), lambda name, key: Fault.REQUEST_LOST if name == "put_new" and "v0" in key else Fault.NONE
    )
    with Publisher(Model(), relay, **(OPTIONS | {"patience": Patience(limit_s=0.0)})) as publisher:
        with pytest.raises(Unavailable):
            publisher.publish(1).result()
        relay.faults = lambda name, key: Fault.NONE
        assert publisher.publish(2).result().version.version == 2


def test_leaving_is_no_way_to_miss_a_failure():
    relay = FaultyRelay(MemoryRelay(), lambda name, key: Fault.REQUEST_LOST if key.endswith("manifest") else Fault.NONE)
    optimizer = torch.optim.SGD(Model().parameters(), lr=0.1)
    options = OPTIONS | {"patience": Patience(limit_s=0.0), "optimizer": optimizer}
    with pytest.raises(Unavailable), Publisher(Model(), relay, **options) as publisher:
        publisher.publish(1)


def test_two_buckets_are_under_way_however_slow_the_relay_is():
    """Nothing more is encoded until the first is in the relay: a slow link costs time and not memory."""

    class Slow(MemoryRelay):
        def put_new(self, key, chunks):
            held = list(chunks)
            if ".b" in key:
                under_way.append(len(held))
                arrived.release()
                assert gate.wait(timeout=30)
            return super().put_new(key, held)

    class Counting(SparseCodec):
        encoded = 0

        def encode_full(self, new, dtype):
            if len(under_way) == 2 and not gate.is_set():
                too_many.set()
            self.encoded += 1
            return super().encode_full(new, dtype)

    under_way: list[int] = []
    arrived, gate, too_many = threading.Semaphore(0), threading.Event(), threading.Event()
    codec, model = Counting(), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Publisher(model, Slow(), codec=codec, optimizer=optimizer, **OPTIONS) as publisher:
        publication = publisher.publish(1)
        try:
            assert arrived.acquire(timeout=30) and arrived.acquire(timeout=30)
            assert not too_many.wait(timeout=0.2) and codec.encoded == sum(under_way)
        finally:
            gate.set()
        publication.result()
    assert len(under_way) > 2 and codec.encoded == sum(under_way)


def test_a_relay_that_lost_everything_is_filled_again_by_the_next_version():
    relay, model = MemoryRelay(), Model()
    with Publisher(model, relay, **OPTIONS) as publisher:
        publisher.publish(1)
        publisher.wait()
        for entry in relay.list():
            relay.delete(entry.key)
        nudge(model)
        publisher.publish(2)
        publisher.wait()
    assert equal(held_by(relay, publisher.tensors).arrays, bits_of(model))


def test_everything_can_be_published_again_on_request():
    relay, model = MemoryRelay(), Model()
    with Publisher(model, relay, **OPTIONS) as publisher:
        with pytest.raises(RequestRefused, match="no version"):
            publisher.republish()
        publisher.publish(1).result()
        published = bits_of(model)
        nudge(model)  # the live weights are ahead; what was published is published again
        for entry in relay.list():
            relay.delete(entry.key)
        again = publisher.republish().result()
        assert again.kind == "anchor" and again.version.version == 1
        assert equal(held_by(relay, publisher.tensors).arrays, published)


def test_anchors_come_when_they_are_due_and_old_versions_go():
    relay, model = MemoryRelay(), Model()
    with Publisher(model, relay, anchor_every=3, keep_versions=2, **OPTIONS) as publisher:
        for step in range(1, 9):
            nudge(model)
            publisher.publish(step)
        publisher.wait()
    kinds = {
        entry.key.split("/")[-2:][0] + entry.key.split("/")[2] for entry in relay.list() if "manifest" in entry.key
    }
    assert "anchor.0000v0000000007" in kinds
    assert not any("v0000000001" in kind for kind in kinds)
    assert equal(held_by(relay, publisher.tensors).arrays, bits_of(model))


def test_what_did_not_change_costs_nothing():
    relay, model = MemoryRelay(), Model()
    with Publisher(model, relay, **OPTIONS) as publisher:
        publisher.publish(1).result()
        assert publisher.publish(2).result().size_bytes == 0
        with torch.no_grad():
            model.up.bias += 1
        published = publisher.publish(3).result()
    assert 0 < published.size_bytes < published.dense_bytes


def test_versions_go_up_and_models_stay_the_same():
    state = {"a": np.zeros((4, 4), np.float32)}
    with Publisher(state, MemoryRelay(), **OPTIONS) as publisher:
        publisher.publish(5).result()
        with pytest.raises(RequestRefused, match="not later"):
            publisher.publish(5)
        state["a"] = np.zeros((4, 5), np.float32)
        with pytest.raises(RequestRefused, match="tensors are not those"):
            publisher.publish(6)


@pytest.mark.parametrize(
    "source, words",
    [
        ({}, "no weights"),
        ({"a": np.zeros(3, np.int64)}, "int64"),
        ({"a": torch.zeros(3, dtype=torch.long)}, "int64"),
        ([1, 2], "holds no weights"),
    ],
)
def test_what_cannot_be_published_is_said_at_once(source, words):
    with pytest.raises(ConfigError, match=words):
        Publisher(source, MemoryRelay(), **OPTIONS)


@pytest.mark.parametrize("make", [torch.tensor, np.float32], ids=["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["BF16", None])
def test_a_single_number_is_a_tensor_too(make, dtype):
    single = make(1.0) if make is torch.tensor else np.array(1.0, make)
    relay, weights = MemoryRelay(), {"scale": single, "up": np.ones((3, 2), np.float32)}
    receiver = Receiver(relay, RUN, secret=SECRET, patience=QUICK)
    with Publisher(weights, relay, dtype=dtype, **OPTIONS) as publisher:
        for version in (1, 2, 3):
            single += 1
            publisher.publish(version).result()
            received = receiver.fetch()
            found = received.tensors["scale"]
            assert found.shape == () and found == (to_bf16(np.array(version + 1.0)) if dtype else version + 1)
            receiver.installed(received)


def test_a_run_needs_a_secret(monkeypatch, tmp_path):
    monkeypatch.delenv("ROSE_RELAY_SECRET", raising=False)
    monkeypatch.delenv("ROSE_RELAY_SECRET_FILE", raising=False)
    with pytest.raises(ConfigError, match="secret is not known"):
        Publisher(Model(), MemoryRelay(), run=RUN)
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    monkeypatch.setenv("ROSE_RELAY_SECRET_FILE", str(file))
    with Publisher(Model(), str(tmp_path / "relay"), run=RUN, patience=QUICK) as publisher:
        assert publisher.publish(1).result().kind == "anchor"


def test_ranks_publish_their_own_shards_and_the_relay_joins_them():
    relay = MemoryRelay()
    tensors = [Tensor("up", (22, 6)), Tensor("norm", (6,))]
    layout = row_shards(tensor_parallel(tensors, {"up": Rule(0, 22)}, 2), 2)
    random = np.random.default_rng(0)
    whole = {tensor.name: random.integers(0, 0x7F00, tensor.shape, np.uint16) for tensor in tensors}

    def share(rank: int) -> dict:
        from tests.contract.chain_ends import shard

        return shard(whole, layout[rank])

    with pytest.raises(LayoutError, match="without the tensors"):
        Publisher(share(0), relay, layout=layout, **OPTIONS)
    with pytest.raises(LayoutError, match="only rank 0"):
        Publisher(share(1), relay, layout=layout, tensors=tensors, rank=1, **OPTIONS)
    states = [share(rank) for rank in range(4)]
    ranks: list[Publisher] = []
    for rank in range(4):
        epoch = ranks[0].epoch if rank else None
        ranks.append(Publisher(states[rank], relay, layout=layout, tensors=tensors, rank=rank, epoch=epoch, **OPTIONS))
    for version in (1, 2):
        publications = [publisher.publish(version) for publisher in reversed(ranks)]
        assert {publication.result().version for publication in publications} == {VersionId(ranks[0].epoch, version)}
        assert equal(held_by(relay, tensors).arrays, whole)
        whole["up"][3:17] ^= 1
        for rank, state in enumerate(states):
            for name, array in share(rank).items():
                state[name][...] = array
    for publisher in ranks:
        publisher.close()


def test_metrics_tell_what_went_out():
    metrics, model = Metrics(process_facts=False), Model()
    relay = FaultyRelay(MemoryRelay(), lambda name, key: Fault.NONE)
    options = OPTIONS | {"patience": Patience(limit_s=0.0)}
    with Publisher(model, relay, metrics=PublishMetrics(metrics), **options) as publisher:
        publisher.publish(1).result()
        nudge(model)
        publisher.publish(2).result()
        relay.faults = lambda name, key: Fault.REQUEST_LOST
        with pytest.raises(Unavailable):
            publisher.publish(3).result()
    said = metrics.exposition().decode()
    assert 'rose_weights_published_bytes_total{kind="anchor"}' in said
    assert 'rose_weights_published_bytes_total{kind="delta"}' in said
    assert 'rose_weights_seconds_count{phase="encode"} 2.0' in said
    assert "rose_weights_version 2.0" in said
    assert 'rose_weights_failures_total{kind="Unavailable"} 1.0' in said
