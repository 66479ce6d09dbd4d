"""Who joins late: what is fetched in which order, how far ahead, and the memory that is taken meanwhile."""

from __future__ import annotations

import itertools
import re
import resource
import threading
import weakref
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from tests.contract.chain_ends import QUICK, RUN, SECRET, equal, random_weights, stepped
from tests.contract.faulty_relay import Fault, FaultyRelay

from rose.errors import RoseError
from rose.weights import reading, shadow, touching
from rose.weights.coding import SparseCodec
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver
from rose.weights.relay.memory import MemoryRelay
from rose.weights.shards import Tensor
from rose.weights.slots import Local, in_folder, in_memory
from rose.weights.touching import Touching, steps, touch

TENSORS = [Tensor("down", (40, 6)), Tensor("up", (40, 6))]
VERSIONS = 4
JOIN = {"secret": SECRET, "patience": QUICK}


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
    options = {"run": RUN, "piece_elements_max": 60, "bucket_dense_bytes": 240, "anchor_every": 100, **JOIN}
    with Publisher(live, relay, **options) as publisher:
        for version in range(1, VERSIONS + 1):
            publisher.publish(version).result()
            newest = {name: array.copy() for name, array in live.items()}
            for name, array in stepped(live, version).items():
                live[name][...] = array
    return newest


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
        shadow, "content_hash", lambda bits, dtype, of=shadow.content_hash: hashed.append(1) or of(bits, dtype)
    )
    receiver = Receiver(relay, RUN, **JOIN)
    received = receiver.fetch()
    pieces = receiver.reader.manifest_of(received.version).pieces
    assert equal(received.tensors, weights) and len(hashed) == len(pieces)


class Patient(SparseCodec):
    """Applies nothing until something has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.happened = threading.Event()

    def apply(self, payload, destination):
        assert self.happened.wait(timeout=30)
        super().apply(payload, destination)


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
    monkeypatch.setattr(touching, "BYTES_MIN", 0)
    monkeypatch.setattr(touching, "touch", touch_and_tell)
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
    monkeypatch.setattr(touching, "BYTES_MIN", 0)
    faulty = FaultyRelay(relay, lambda name, key: Fault.CORRUPT if ".b" in key else Fault.NONE)
    with pytest.raises(RoseError):
        Receiver(faulty, RUN, **JOIN).fetch()
    assert not running()


def test_touching_stops_when_it_is_left_and_not_later(monkeypatch):
    def until_stopped(address: int, size_bytes: int) -> bool:
        begun.set()
        ended.append(entered._is_stopping.wait(timeout=30))
        return True

    begun, ended = threading.Event(), []
    monkeypatch.setattr(touching, "BYTES_MIN", 0)
    monkeypatch.setattr(touching, "touch", until_stopped)
    entered = Touching([np.zeros(16 << 20, np.uint16)])
    with entered:
        assert begun.wait(timeout=30)
    assert ended == [True] and not running()


def test_pages_are_taken_from_the_last_to_the_first_and_all_of_them():
    arrays = [np.zeros(size, np.uint8) for size in (10 << 20, 100, 5000, 9 << 20)]
    found = list(steps(arrays))
    assert all(start % 4096 == size % 4096 == 0 and 0 < size <= touching.STEP_BYTES for start, size in found)
    for array in arrays:
        begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
        mine = [(start, start + size) for start, size in found if begin <= start < end]
        assert mine == sorted(mine, reverse=True) and all(stop <= end for _, stop in mine)
        assert array.nbytes - sum(stop - start for start, stop in mine) < 2 * 4096
    last = arrays[-1].ctypes.data
    assert last <= found[0][0] < last + arrays[-1].nbytes


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_touched_pages_are_there_and_nothing_is_changed(tmp_path, place):
    local = [Local("weights", (8 << 20,), "BF16")]
    array = (in_memory(local) if place == "memory" else in_folder(local, tmp_path))["weights"]
    array[:100] = 7
    if not all(touch(*step) for step in steps([array])):
        pytest.skip("this system cannot take pages before they are written: Linux 5.14 can")
    assert array[:100].tolist() == [7] * 100 and not array[100:].any()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array[::1024] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 16


def test_touching_while_somebody_writes_changes_nothing(monkeypatch):
    monkeypatch.setattr(touching, "BYTES_MIN", 0)
    array = np.zeros(16 << 20, np.uint16)
    with Touching([array]):
        for start in range(0, len(array), 1 << 16):
            array[start : start + (1 << 16)] = start >> 16
    assert np.array_equal(array, np.repeat(np.arange(256, dtype=np.uint16), 1 << 16))


def test_a_system_that_cannot_is_no_error(monkeypatch):
    monkeypatch.setattr(touching, "BYTES_MIN", 0)
    monkeypatch.setattr(touching, "_madvise", None)
    with Touching([np.zeros(8 << 20, np.uint16)]) as entered:
        assert entered is not None
    assert touch(0, 4096) is False
