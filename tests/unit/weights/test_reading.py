"""Who joins late: what is fetched in which order, how far ahead, and the memory that is taken meanwhile."""

from __future__ import annotations

import itertools
import re
import threading
import weakref
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from tests.contract.chain_ends import (
    QUICK,
    RUN,
    SECRET,
    Member,
    Story,
    Trainer,
    equal,
    random_weights,
    stepped,
)
from tests.contract.faulty_relay import Fault, FaultyRelay

from rose.core.versions import VersionId
from rose.errors import RoseError
from rose.weights import reading, weight_buffers
from rose.weights.coding import SparseCodec
from rose.weights.manifest import WeightsRefused
from rose.weights.publish import Publisher
from rose.weights.reading import ChainReader
from rose.weights.receive import Receiver
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.shards import Tensor

TENSORS = [Tensor("down", (40, 6)), Tensor("up", (40, 6))]
VERSIONS = 4
JOIN = {"secret": SECRET, "retry": QUICK}


class Recorded(MemoryRelay):
    """Which payloads are read, and how many bytes of them somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads: list[str] = []
        self.sizes: list[int] = []
        self.held_bytes = self.held_bytes_max = 0
        self._counting = threading.RLock()

    def get(self, key, start=0, stop=None):
        data = super().get(key, start, stop)
        if ".b" not in key:
            return data
        copy = np.frombuffer(bytes(data), np.uint8)
        self.payloads.append(key)
        self.sizes.append(copy.nbytes)
        self._hold(copy.nbytes)
        weakref.finalize(copy, self._hold, -copy.nbytes)
        return copy.data

    def _hold(self, size_bytes: int) -> None:
        with self._counting:
            self.held_bytes += size_bytes
            self.held_bytes_max = max(self.held_bytes_max, self.held_bytes)


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-")]


@pytest.fixture
def relay():
    return Recorded()


@pytest.fixture
def weights(relay):
    """The newest of some versions in the relay: an anchor, and deltas after it."""
    live = {name: array & 0x7EFF for name, array in random_weights(0, TENSORS).items()}
    options = {"run": RUN, "chunk_elements_max": 60, "bucket_dense_bytes": 240, "anchor_every": 100, **JOIN}
    with Publisher(live, relay, **options) as publisher:
        for version in range(1, VERSIONS + 1):
            publisher.publish(version).result()
            newest = {name: array.copy() for name, array in live.items()}
            for name, array in stepped(live, version).items():
                live[name][...] = array
    return newest


class Patient(SparseCodec):
    """Applies nothing until something has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.happened = threading.Event()

    def apply(self, payload, destination):
        assert self.happened.wait(timeout=30)
        super().apply(payload, destination)


class OtherCodec(SparseCodec):
    name = "other-1"


def test_a_piece_takes_all_its_links_before_the_next_one_does(relay, weights):
    assert equal(Receiver(relay, RUN, **JOIN).fetch().tensors, weights)
    read = [re.search(r"/v0*(\d+)/.*\.b(\d+)\.", key).groups() for key in relay.payloads]
    by_bucket = [(bucket, [int(v) for v, _ in group]) for bucket, group in itertools.groupby(read, lambda one: one[1])]
    assert len(by_bucket) == len({bucket for bucket, _ in by_bucket}) > 2
    assert all(versions == list(range(1, VERSIONS + 1)) for _, versions in by_bucket)


@pytest.mark.parametrize("ahead_bytes", [1, 300, 1 << 20])
def test_what_is_read_ahead_is_bounded(relay, weights, monkeypatch, ahead_bytes):
    monkeypatch.setattr(reading, "AHEAD_BYTES_MAX", ahead_bytes)
    assert equal(Receiver(relay, RUN, **JOIN).fetch().tensors, weights)
    largest = max(relay.sizes)
    assert 0 < relay.held_bytes_max <= largest + max(ahead_bytes, largest)
    assert relay.held_bytes == 0


@pytest.mark.parametrize("ahead_bytes, ahead", [(9, 1), (10, 1), (35, 3)])
def test_as_much_is_under_way_as_may_be_from_the_first_to_the_last(monkeypatch, ahead_bytes, ahead):
    class Pool:
        submitted = 0

        def submit(self, get, range_):
            self.submitted += 1
            done = Future()
            done.set_result(get(range_))
            return done

    monkeypatch.setattr(reading, "AHEAD_BYTES_MAX", ahead_bytes)
    pool, ranges = Pool(), [SimpleNamespace(size_bytes=10, number=number) for number in range(20)]
    under_way = []
    for range_, number in reading._ahead(pool, lambda range_: range_.number, ranges):
        assert range_.number == number == len(under_way)
        under_way.append(pool.submitted - 1 - number)
    assert under_way == [min(ahead, 19 - number) for number in range(20)]


def test_a_damaged_link_halfway_is_told_and_harms_nobody_else(relay, weights):
    faulty = FaultyRelay(relay, lambda name, key: Fault.CORRUPT if "v0000000003" in key and ".b" in key else Fault.NONE)
    damaged = Receiver(faulty, RUN, **JOIN)
    with pytest.raises(RoseError):
        damaged.fetch()
    assert damaged.version is None and not running()
    assert equal(Receiver(relay, RUN, **JOIN).fetch().tensors, weights)


def test_memory_that_nobody_wrote_is_not_read(relay, weights, monkeypatch):
    hashed = []
    monkeypatch.setattr(
        weight_buffers,
        "content_hash",
        lambda bits, dtype, of=weight_buffers.content_hash: hashed.append(1) or of(bits, dtype),
    )
    receiver = Receiver(relay, RUN, **JOIN)
    received = receiver.fetch()
    chunks = receiver.reader.manifest_of(received.version).chunks
    assert equal(received.tensors, weights) and len(hashed) == len(chunks)


def test_several_small_ranges_are_fetched_while_one_is_applied(relay, weights):
    class Telling(FaultyRelay):
        def get(self, key, start=0, stop=None):
            if len(relay.payloads) >= VERSIONS:
                codec.happened.set()
            return super().get(key, start, stop)

    codec = Patient()
    telling = Telling(relay, lambda name, key: Fault.NONE)
    assert equal(Receiver(telling, RUN, codec=codec, **JOIN).fetch().tensors, weights)
    assert codec.happened.is_set()


def test_new_memory_is_touched_while_it_is_written_and_only_then(relay, monkeypatch):
    def touch_and_tell(address: int, size_bytes: int) -> bool:
        touched.append((address, address + size_bytes))
        codec.happened.set()
        return True

    touched: list[tuple[int, int]] = []
    codec = Patient()
    monkeypatch.setattr(weight_buffers, "PREFAULT_BYTES_MIN", 0)
    monkeypatch.setattr(weight_buffers, "touch", touch_and_tell)
    live = {"one": np.zeros(3 << 20, np.uint16), "two": np.zeros(3 << 20, np.uint16)}
    with Publisher(live, relay, run=RUN, **JOIN) as publisher:
        publisher.publish(1).result()
        receiver = Receiver(relay, RUN, codec=codec, **JOIN)
        received = receiver.fetch()
        assert set(running()) <= {"weights-publish_0"}
        begin = received.tensors["two"].ctypes.data
        assert begin <= touched[0][0] < touched[0][1] <= begin + received.tensors["two"].nbytes
        receiver.installed(received)
        touched.clear()
        live["one"][7] = 1
        publisher.publish(2).result()
        assert receiver.fetch().tensors["one"][7] == 1 and not touched


def test_the_thread_ends_with_a_fetch_that_fails(relay, weights, monkeypatch):
    monkeypatch.setattr(weight_buffers, "PREFAULT_BYTES_MIN", 0)
    faulty = FaultyRelay(relay, lambda name, key: Fault.CORRUPT if ".b" in key else Fault.NONE)
    with pytest.raises(RoseError):
        Receiver(faulty, RUN, **JOIN).fetch()
    assert not running()


def test_a_member_follows_every_version_and_one_that_joins_late_catches_up():
    story = Story()
    early = Member(story.relay)
    assert early.sync() == VersionId(1, 1) and equal(early.arrays, story.weights)
    story.go_on(3)
    late = Member(story.relay)
    assert early.sync() == late.sync() == VersionId(1, 4)
    assert equal(early.arrays, story.weights) and equal(late.arrays, story.weights)
    assert early.manifest.version_hash == late.manifest.version_hash


def test_a_member_in_step_reads_deltas_only():
    story = Story(relay=FaultyRelay(MemoryRelay(), lambda name, key: Fault.NONE))
    member = Member(story.relay)
    member.sync()
    story.go_on(1)
    story.go_on(1, anchor=True)
    story.trainer.republish()
    story.relay.calls.clear()
    story.go_on(1)
    member.sync()
    assert equal(member.arrays, story.weights)
    read = [key for name, key, _ in story.relay.calls if name == "get" and ".b" in key]
    assert read and all("/delta." in key or "v0000000003" in key for key in read)


def test_a_member_that_loaded_the_same_weights_elsewhere_reads_no_payload():
    story = Story(relay=FaultyRelay(MemoryRelay(), lambda name, key: Fault.NONE))
    member = Member(story.relay, weights=story.weights)
    story.relay.calls.clear()
    assert member.sync() == VersionId(1, 1)
    assert not [key for name, key, _ in story.relay.calls if name == "get" and ".b" in key]


def test_an_older_version_can_be_had_while_it_is_kept():
    story = Story(4)
    member = Member(story.relay)
    member.reader.refresh()
    member.reader.bring(member.staging, VersionId(1, 3))
    assert equal(member.arrays, story.published[3])
    with pytest.raises(WeightsRefused, match="newest is 4"):
        member.reader.bring(member.staging, VersionId(1, 9))


def test_a_reader_never_goes_back_to_a_lower_epoch():
    story = Story()
    successor = Trainer(story.relay)
    successor.publish(5, story.weights)
    member = Member(story.relay)
    member.sync()
    for entry in story.relay.list(f"{RUN}/epochs"):
        if entry.key.endswith("2"):
            story.relay.delete(entry.key)
    assert member.sync() == VersionId(2, 5)
    assert Member(story.relay).sync() == VersionId(1, 1)  # who has not seen it cannot know


def test_a_lost_bucket_makes_its_link_unusable_and_the_trainer_sees_it():
    story = Story(2)
    story.go_on(1, anchor=True)
    bucket = next(entry.key for entry in story.relay.list() if "v0000000003" in entry.key and ".b" in entry.key)
    story.relay.delete(bucket)
    member = Member(story.relay)
    assert member.sync() == VersionId(1, 2) and equal(member.arrays, story.published[2])
    assert not story.trainer.writer.check_relay()
    story.trainer.republish()
    assert member.sync() == VersionId(1, 3) and equal(member.arrays, story.weights)


def test_no_way_is_told_and_the_next_anchor_helps():
    story = Story(2)
    for entry in list(story.relay.list()):
        if "v0000000001" in entry.key:
            story.relay.delete(entry.key)
    member = Member(story.relay)
    assert member.sync() is None
    with pytest.raises(WeightsRefused, match="no way leads"):
        member.reader.bring(member.staging, VersionId(1, 2))
    story.go_on(1, anchor=True)
    assert member.sync() == VersionId(1, 3) and equal(member.arrays, story.weights)


@pytest.mark.parametrize(
    "tensors, told",
    [
        ([Tensor("embed", (11, 7))], "as published"),
        ([Tensor("embed", (11, 6), "F16")], "as published"),
        ([Tensor("head", (11, 6))], "lack"),
    ],
)
def test_other_shapes_are_refused_and_nothing_is_written(tensors, told):
    story = Story()
    reader = ChainReader(story.relay, run=RUN, secret=SECRET, tensors=tensors, retry=QUICK)
    assert reader.refresh() is None
    assert [told in why for why in reader.refused.values()] == [True]


def test_another_codec_is_refused():
    story = Story()
    member = Member(story.relay, codec=OtherCodec())
    assert member.sync() is None
    assert "encoded with" in next(iter(member.reader.refused.values()))


def test_any_flipped_bit_of_a_bucket_is_seen_and_another_way_is_taken():
    story = Story(1)
    story.go_on(1)
    story.trainer.republish()  # an anchor of version 2 beside its delta
    bucket = next(e.key for e in story.relay.list() if "v0000000002/delta" in e.key and ".b" in e.key)
    whole = bytes(story.relay.get(bucket))
    for bit in range(0, len(whole) * 8, 5):
        member = Member(story.relay, weights=story.published[1])
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        story.relay.delete(bucket)
        story.relay.put_new(bucket, [damaged])
        assert member.sync() == VersionId(1, 2) and equal(member.arrays, story.weights)
        assert [key for key in member.reader.refused if "/delta." in key]


def test_damage_without_another_way_is_an_error():
    story = Story()
    for entry in list(story.relay.list()):
        if ".b" in entry.key:
            data = bytearray(story.relay.get(entry.key))
            data[-1] ^= 1
            story.relay.delete(entry.key)
            story.relay.put_new(entry.key, [data])
    member = Member(story.relay)
    with pytest.raises(WeightsRefused, match="not in the relay"):
        member.sync()


def test_a_wrong_base_is_never_built_on():
    story = Story(2)
    member = Member(story.relay)
    member.sync()
    member.arrays["up"][0, 0] ^= 1  # something wrote to the staging
    member.staging.forget_all()
    story.go_on(1)
    assert member.sync() == VersionId(1, 3) and equal(member.arrays, story.weights)


def test_a_codec_that_is_wrong_is_caught_by_the_hash():
    class Sloppy(SparseCodec):
        def apply(self, payload, destination):
            super().apply(payload, destination)
            destination.reshape(-1)[-1] ^= 1

    story = Story()
    member = Member(story.relay, codec=Sloppy())
    with pytest.raises(WeightsRefused, match="not in the relay"):
        member.sync()
    assert "did not come to the numbers" in next(iter(member.reader.refused.values()))


def test_special_numbers_keep_their_bits():
    story = Story()
    special = np.array([0x7FC0, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x7FC1], np.uint16)  # nan, inf, -inf, -0.0, denormal
    weights = dict(story.weights, embed=np.tile(special, (11, 1)))
    story.trainer.publish(2, weights)
    member = Member(story.relay)
    member.sync()
    assert np.array_equal(member.arrays["embed"], weights["embed"])
