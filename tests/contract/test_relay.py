"""What every relay promises, whatever lies behind it. Nothing here names a backend."""

from __future__ import annotations

import signal
import threading

import pytest
from tests.contract.relays import KINDS, ROOM_BYTES, Store, run_elsewhere

from rose.errors import RequestRefused, Unavailable
from rose.weights.relay.relay_base import KeyExists, KeyMissing, RangeRefused, Relay, RelayEntry, RelayFull

BLOB = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module", params=KINDS)
def running(request, tmp_path_factory):
    """One store for all tests: servers take longer to start than to be tested."""
    opened: Store = request.param(tmp_path_factory.mktemp("store"))
    yield opened
    opened.close()


@pytest.fixture
def store(running):
    """Empty, and without clients."""
    yield running
    running.leave()
    relay = running.open()
    for entry in relay.list():
        relay.delete(entry.key)
    running.leave()


@pytest.fixture
def relay(store) -> Relay:
    return store.open()


def read(relay: Relay, key: str, start: int = 0, stop: int | None = None) -> bytes:
    return bytes(relay.get(key, start, stop))


def test_what_was_put_is_read_whole_and_in_ranges(relay):
    assert relay.put_new("run/a", [BLOB[:1000], bytearray(BLOB[1000:2000]), memoryview(BLOB)[2000:]]) == len(BLOB)
    assert read(relay, "run/a") == BLOB
    assert read(relay, "run/a", 1000, 1256) == BLOB[1000:1256]
    assert read(relay, "run/a", len(BLOB) - 3) == BLOB[-3:]
    assert read(relay, "run/a", 77, 77) == b""
    assert read(relay, "run/a", len(BLOB), len(BLOB)) == b""


def test_wide_items_are_stored_as_bytes(relay):
    numbers = memoryview(b"\1\0\2\0\3\0").cast("H")
    assert relay.put_new("numbers", [numbers]) == 6
    assert read(relay, "numbers") == b"\1\0\2\0\3\0"


def test_overwriting_is_refused_and_changes_nothing(store, relay):
    relay.put_new("run/a", [b"first"])
    with pytest.raises(KeyExists):
        relay.put_new("run/a", [b"second"])
    with pytest.raises(KeyExists):
        store.open().put_new("run/a", [b"first"])
    assert read(relay, "run/a") == b"first"


def test_missing_is_told_from_empty(relay):
    relay.put_new("run/empty", [])
    assert read(relay, "run/empty") == b""
    assert relay.list("run") == [RelayEntry("run/empty", 0)]
    for call in (lambda: relay.get("run/nothing"), lambda: relay.get("run/nothing", 0, 0), lambda: relay.get("run")):
        with pytest.raises(KeyMissing):
            call()


@pytest.mark.parametrize("start, stop", [(0, 6), (6, None), (6, 7), (3, 2), (-1, 2), (5, 100)])
def test_a_range_outside_is_refused_not_cut_short(relay, start, stop):
    relay.put_new("a", [b"12345"])
    with pytest.raises(RequestRefused) as told:
        relay.get("a", start, stop)
    assert not isinstance(told.value, KeyMissing) and "5 bytes" in str(told.value)
    assert isinstance(told.value, RangeRefused) or type(told.value) is RequestRefused


def test_listing_is_by_folder_and_in_order(relay):
    for key in ("run/b/2", "run/a/1", "runner/a", "run/b/10", "other"):
        relay.put_new(key, [key.encode()])
    assert [entry.key for entry in relay.list("run")] == ["run/a/1", "run/b/10", "run/b/2"]
    assert relay.list("run/b") == relay.list("run/b/") == [RelayEntry("run/b/10", 8), RelayEntry("run/b/2", 7)]
    assert [entry.key for entry in relay.list()] == sorted(["run/b/2", "run/a/1", "runner/a", "run/b/10", "other"])
    assert list(relay.list("nobody")) == []
    assert list(relay.list("run/a/1")) == []


def test_a_deleted_key_is_missing_and_may_be_written_anew(relay):
    relay.put_new("run/a/1", [b"old"])
    relay.put_new("run/a/2", [b"stays"])
    assert relay.delete("run/a/1") is True
    assert relay.delete("run/a/1") is False
    with pytest.raises(KeyMissing):
        relay.get("run/a/1")
    relay.put_new("run/a/1", [b"new one"])
    assert read(relay, "run/a/1") == b"new one"
    assert relay.list("run") == [RelayEntry("run/a/1", 7), RelayEntry("run/a/2", 5)]


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a/.b", "a b", "a\n", "ä", "x" * 600]
)
def test_a_key_that_is_none_is_refused(relay, key):
    for call in (lambda: relay.put_new(key, [b"x"]), lambda: relay.get(key), lambda: relay.delete(key)):
        with pytest.raises(RequestRefused) as told:
            call()
        assert not isinstance(told.value, KeyMissing | KeyExists)


def test_chunks_that_fail_leave_nothing(relay):
    def buffers():
        yield BLOB
        raise ConnectionError("the tensor went away")

    with pytest.raises(ConnectionError, match="tensor"):
        relay.put_new("run/a", buffers())
    assert list(relay.list()) == []
    relay.put_new("run/a", [b"works"])
    assert read(relay, "run/a") == b"works"


def test_nothing_is_visible_before_the_last_chunk(store, relay):
    reader = store.open()

    def buffers():
        yield BLOB
        with pytest.raises(KeyMissing):
            reader.get("run/a")
        assert list(reader.list()) == []
        yield b"end"

    relay.put_new("run/a", buffers())
    assert read(reader, "run/a") == BLOB + b"end"


def test_one_of_many_writers_wins(store):
    outcomes: list[str] = []
    start = threading.Barrier(4)

    def write(mark: bytes) -> None:
        relay = store.open()
        start.wait()
        try:
            relay.put_new("run/a", [mark * 1000, mark * 1000])
            outcomes.append("won " + mark.decode())
        except KeyExists:
            outcomes.append("refused")

    threads = [threading.Thread(target=write, args=(mark,)) for mark in (b"a", b"b", b"c", b"d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 3
    winner = next(outcome for outcome in outcomes if outcome.startswith("won"))
    assert read(store.open(), "run/a") == winner[-1].encode() * 2000


def test_readers_beside_a_writer_see_whole_values_only(store):
    """Each value is one byte repeated; a mixture would be a torn read."""
    done = threading.Event()
    bad: list[str] = []

    def watch() -> None:
        relay = store.open()
        while not done.is_set():
            for entry in relay.list("run"):
                try:
                    data = read(relay, entry.key)
                except KeyMissing:
                    continue  # deleted since it was listed
                if len(data) != 300_000 or data != data[:1] * len(data):
                    bad.append(entry.key)

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        writer = store.open()
        for number in range(12):
            writer.put_new(f"run/{number:02}", [bytes([number + 1]) * 100_000] * 3)
            if number % 3 == 2:
                writer.delete(f"run/{number - 1:02}")
    finally:
        done.set()
        for watcher in watchers:
            watcher.join()
    assert bad == []


def test_no_room_is_told_and_nothing_is_lost(store):
    with store.small() as relay:
        relay.put_new("run/fits", [bytes(1000)])
        with pytest.raises(RelayFull) as told:
            relay.put_new("run/big", [bytes(ROOM_BYTES // 2), bytes(ROOM_BYTES), bytes(ROOM_BYTES)])
        assert told.value.retry_after_s > 0
        assert "run/big" not in [entry.key for entry in relay.list("run")]
        assert read(relay, "run/fits") == bytes(1000)
        relay.put_new("run/also", [b"fits"])
        assert read(relay, "run/also") == b"fits"


def needs_processes(store: Store) -> None:
    if store.address is None:
        pytest.skip("lives in one process")


def test_a_writer_that_dies_midway_leaves_nothing_visible(store, relay):
    needs_processes(store)
    writer = run_elsewhere(
        "def buffers():\n"
        "    yield bytes(3_000_000)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "    yield b'never'\n"
        "relay.put_new('run/a', buffers())\n",
        store,
    )
    assert writer.wait(timeout=60) == -signal.SIGKILL
    assert list(relay.list()) == []
    with pytest.raises(KeyMissing):
        relay.get("run/a")
    relay.put_new("run/a", [b"the next writer"])
    assert read(store.open(), "run/a") == b"the next writer"


def test_a_reader_that_dies_disturbs_nobody(store, relay):
    needs_processes(store)
    relay.put_new("run/a", [BLOB] * 8)
    code = "print('go', flush=True)\nwhile True: relay.get('run/a')\n"
    reader = run_elsewhere(code, store)
    assert reader.stdout is not None and reader.stdout.readline() == "go\n"
    assert read(relay, "run/a", 0, 1000) == BLOB[:1000]
    reader.kill()
    reader.wait()
    assert read(relay, "run/a") == BLOB * 8
    relay.put_new("run/b", [b"goes on"])
    assert relay.delete("run/a") is True


def test_a_restart_keeps_what_was_acknowledged(store, relay):
    if not store.can_restart:
        pytest.skip("what it holds does not outlive it")
    relay.put_new("run/a", [BLOB])
    store.restart()
    for _ in range(3):  # the connection it had is gone; a call or two may say so
        try:
            assert read(relay, "run/a") == BLOB
            break
        except Unavailable:
            continue
    assert read(store.open(), "run/a") == BLOB
    with pytest.raises(KeyExists):
        store.open().put_new("run/a", [b"again"])


def test_a_slow_reader_and_a_slow_writer_hold_up_nobody(store):
    slow, quick = store.open(), store.open()
    slow_began, quick_is_done = threading.Event(), threading.Event()

    def buffers():
        yield b"slow "
        slow_began.set()
        assert quick_is_done.wait(timeout=60)
        yield b"end"

    writer = threading.Thread(target=slow.put_new, args=("run/slow", buffers()))
    writer.start()
    assert slow_began.wait(timeout=60)
    quick.put_new("run/quick", [BLOB])
    held = quick.get("run/quick")  # taken now, looked at after its key is gone
    assert quick.delete("run/quick")
    quick_is_done.set()
    writer.join()
    assert bytes(held) == BLOB
    assert read(quick, "run/slow") == b"slow end"
