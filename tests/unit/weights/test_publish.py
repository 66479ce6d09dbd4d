"""The publisher: from live tensors to versions in a relay, whatever the loop around it does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.contract.chain_ends import QUICK, RUN, SECRET, Member, equal
from tests.contract.faulty_relay import Fault, FaultyRelay
from torch import nn

from rose.core.versions import VersionId
from rose.errors import ConfigError, ModelError, RequestRefused, RoseError, Unavailable
from rose.models.tensors import to_bf16
from rose.observe.metrics import Metrics
from rose.weights.chain import RetryPolicy
from rose.weights.coding import SparseCodec
from rose.weights.layouts import Rule, row_shards, tensor_parallel
from rose.weights.live_tensors import LiveTensors
from rose.weights.manifest import Fenced
from rose.weights.publish import Publisher
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.shards import LayoutError, Tensor
from rose.weights.weight_metrics import PublishMetrics

OPTIONS = {"run": RUN, "secret": SECRET, "retry": QUICK, "chunk_elements_max": 40, "bucket_dense_bytes": 200}


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
    options = OPTIONS | {"retry": RetryPolicy(limit_s=0.0), "optimizer": optimizer}
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
    with Publisher(Model(), relay, **(OPTIONS | {"retry": RetryPolicy(limit_s=0.0)})) as publisher:
        with pytest.raises(Unavailable):
            publisher.publish(1).result()
        relay.faults = lambda name, key: Fault.NONE
        assert publisher.publish(2).result().version.version == 2


def test_leaving_is_no_way_to_miss_a_failure():
    relay = FaultyRelay(MemoryRelay(), lambda name, key: Fault.REQUEST_LOST if key.endswith("manifest") else Fault.NONE)
    optimizer = torch.optim.SGD(Model().parameters(), lr=0.1)
    options = OPTIONS | {"retry": RetryPolicy(limit_s=0.0), "optimizer": optimizer}
    with pytest.raises(Unavailable), Publisher(Model(), relay, **options) as publisher:
        publisher.publish(1)


def test_two_buckets_are_under_way_however_slow_the_relay_is():
    """Nothing more is encoded until the first is in the relay: a slow record costs time and not memory."""

    class Slow(MemoryRelay):
        def put_new(self, key, buffers):
            held = list(buffers)
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


def test_a_run_needs_a_secret(monkeypatch, tmp_path):
    monkeypatch.delenv("ROSE_RELAY_SECRET", raising=False)
    monkeypatch.delenv("ROSE_RELAY_SECRET_FILE", raising=False)
    with pytest.raises(ConfigError, match="secret is not known"):
        Publisher(Model(), MemoryRelay(), run=RUN)
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    monkeypatch.setenv("ROSE_RELAY_SECRET_FILE", str(file))
    with Publisher(Model(), str(tmp_path / "relay"), run=RUN, retry=QUICK) as publisher:
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
    options = OPTIONS | {"retry": RetryPolicy(limit_s=0.0)}
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


def streamed(model: nn.Module, stop: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters one by one, against the order of their names, each as a copy that does not last."""
    for name, value in sorted(model.named_parameters(), reverse=True):
        if name == stop:
            raise OSError("a rank is gone")
        yield name, value.detach().clone()


def stream_publisher(relay, model: nn.Module, **more) -> Publisher:
    tensors = [Tensor(name, tuple(value.shape)) for name, value in model.named_parameters()]
    return Publisher(None, relay, tensors=tensors, **(OPTIONS | more))


def test_a_stream_of_tensors_publishes_what_resident_tensors_would():
    relay, other, model = MemoryRelay(), MemoryRelay(), Model()
    with stream_publisher(relay, model, anchor_every=2) as publisher, Publisher(model, other, **OPTIONS) as resident:
        kinds = []
        for step in range(1, 5):
            nudge(model)
            published, expected = publisher.publish_stream(step, streamed(model)), resident.publish(step).result()
            assert (published.hash, published.size_bytes) == (expected.hash, expected.size_bytes)
            kinds.append(published.kind)
        publisher.wait()
    assert kinds == ["anchor", "delta", "delta", "delta"]
    assert equal(held_by(relay, publisher.tensors).arrays, bits_of(model))
    assert any("v0000000003/anchor" in entry.key for entry in relay.list())  # the one that was due


def test_a_stream_that_raises_publishes_nothing_and_the_next_version_is_whole():
    relay, model = MemoryRelay(), Model()
    with stream_publisher(relay, model) as publisher:
        first = publisher.publish_stream(1, streamed(model))
        nudge(model)
        with pytest.raises(OSError, match="a rank is gone"):
            publisher.publish_stream(2, streamed(model, stop="embed.weight"))
        assert held_by(relay, publisher.tensors).manifest.version_hash == first.hash
        assert publisher.publish_stream(3, streamed(model)).kind == "anchor"
    assert equal(held_by(relay, publisher.tensors).arrays, bits_of(model))


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda found: found[:-1], r"without 1 tensors, `embed\.weight`"),
        (lambda found: [*found, found[0]], "twice"),
        (lambda found: [*found, ("head.weight", found[0][1])], r"`head\.weight` twice, or it is no tensor"),
        (lambda found: [(name, value[:-1]) for name, value in found], "shape"),
        (lambda found: [(name, value.int()) for name, value in found], "int32"),
        (lambda found: [(name, value * float("inf")) for name, value in found], "not finite"),
    ],
)
def test_a_stream_of_other_tensors_is_refused(change, reason):
    relay, model = MemoryRelay(), Model()
    with stream_publisher(relay, model) as publisher:
        publisher.publish_stream(1, streamed(model))
        with pytest.raises(RoseError, match=reason):
            publisher.publish_stream(2, change(list(streamed(model))))
        assert held_by(relay, publisher.tensors).manifest.version == 1
        with pytest.raises(RequestRefused, match="not later"):
            publisher.publish_stream(1, streamed(model))


def test_a_stream_is_read_one_tensor_at_a_time():
    relay, model = MemoryRelay(), Model()
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, value in model.named_parameters():
            most = max(most, sum(known() is not None for known in alive))
            own = [value.detach().clone()]
            alive.append(weakref.ref(own[0]))
            yield name, own.pop()

    with stream_publisher(relay, model) as publisher:
        publisher.publish_stream(1, counted())
    assert len(alive) == 3 and most == 0
