"""What a Mooncake Store does that no other relay does: its client dies, its master forgets everything, it fills up."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.contract.chain_ends import Member, Trainer, equal, random_weights, stepped
from tests.contract.relays import mooncake_is_missing

from rose.core.versions import VersionId
from rose.errors import Unavailable
from rose.weights.chain import RetryPolicy
from rose.weights.relay.mooncake import HOLDER_BYTES_MIN, MooncakeCluster, MooncakeRelay
from rose.weights.relay.relay_base import KeyExists, KeyMissing, RelayFull

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def _installed():
    if why := mooncake_is_missing():
        pytest.skip(why)


@pytest.fixture
def cluster(tmp_path):
    with MooncakeCluster(holders=1, holder_bytes=64 << 20, log_folder=tmp_path) as running:
        yield running


@pytest.fixture
def relay(cluster):
    opened = MooncakeRelay(cluster.address)
    yield opened
    opened.close()


def test_a_client_that_crashes_takes_nobody_along(relay):
    relay.put_new("a", [b"1"])
    assert relay.process_id is not None
    os.kill(relay.process_id, signal.SIGSEGV)
    deadline_s = time.monotonic() + 30
    while True:
        try:
            assert bytes(relay.get("a")) == b"1"
            break
        except Unavailable:  # the next client process is starting
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    with pytest.raises(KeyExists):
        relay.put_new("a", [b"2"])
    assert bytes(relay.get("a")) == b"1"


def test_pinned_values_are_never_evicted_and_a_full_store_says_so(tmp_path):
    with MooncakeCluster(holders=1, holder_bytes=HOLDER_BYTES_MIN, log_folder=tmp_path) as cluster:
        relay = MooncakeRelay(cluster.address)
        stored: list[int] = []

        def fill() -> None:
            for number in range(100):
                relay.put_new(f"v/{number:03}", [bytes([number]) * (2 << 20)])
                stored.append(number)

        with pytest.raises(RelayFull):
            fill()
        assert len(stored) >= 5
        assert [int(entry.key[2:]) for entry in relay.list("v")] == stored
        assert bytes(relay.get("v/000", 0, 10)) == bytes(10)
        assert relay.delete("v/000")  # although it was just read, and is leased
        relay.put_new("v/new", [bytes(1 << 20)])
        relay.close()


def test_a_store_that_lost_everything_is_filled_again_by_the_trainer(tmp_path):
    """The only holder is killed: values are gone, and the trainer's next anchor brings everybody back."""
    retry = RetryPolicy(limit_s=30)
    with MooncakeCluster(holders=1, holder_bytes=64 << 20, log_folder=tmp_path) as cluster:
        relay = MooncakeRelay(cluster.address)
        trainer = Trainer(relay, retry=retry)
        weights = random_weights(0)
        trainer.publish(1, weights)
        member = Member(relay, retry=retry)
        assert member.sync() == VersionId(1, 1) and equal(member.arrays, weights)
        cluster.processes[1].kill()
        cluster.processes[1].wait()
        cluster.start_holder(1, 64 << 20)
        retry.call(lambda: _gone(relay))
        assert not trainer.writer.check_relay()
        trainer.republish()
        weights = stepped(weights, 2)
        trainer.publish(2, weights)
        joined = Member(relay, retry=retry)
        assert joined.sync() == member.sync() == VersionId(1, 2)
        assert equal(joined.arrays, weights) and equal(member.arrays, weights)
        relay.close()


def _gone(relay: MooncakeRelay) -> None:
    """The store needs some seconds to notice that its holder is dead."""
    keys = [entry.key for entry in relay.list()]
    if keys:
        try:
            relay.get(keys[0])
        except KeyMissing:
            return
        raise Unavailable("still there")
