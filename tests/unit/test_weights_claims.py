"""A program that may write to the relay's storage, but does not hold the secret, can do nothing to a run that lasts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import msgspec
import pytest
from tests.contract.chain_ends import QUICK, RUN, SECRET, TENSORS, Member, Story, Trainer, equal, random_weights

from rose.core.versions import VersionId
from rose.errors import ConfigError
from rose.weights import manifest as manifests
from rose.weights.chain import CLAIM_AHEAD_S_MAX, CLAIM_UNUSED_S_MAX, EPOCH_MAX, Folder, Names
from rose.weights.inventory import take_stock
from rose.weights.keys import write_key
from rose.weights.manifest import (
    MAGIC,
    Claim,
    Fenced,
    Manifest,
    WeightsRefused,
    check_manifest,
    read_signed,
    seal,
    size_in,
    unseal,
)
from rose.weights.reading import ChainReader
from rose.weights.relay.base import Buffer, Entry
from rose.weights.relay.memory import MemoryRelay
from rose.weights.writing import ChainWriter

NAMES = Names(RUN)
JUNK = b"anything at all"
STRANGER = b"another secret altogether"


def writer_at(relay: MemoryRelay, unix_s: float) -> ChainWriter:
    return ChainWriter(relay, run=RUN, secret=SECRET, tensors=TENSORS, patience=QUICK, unix_s=lambda: unix_s)


def reader_at(relay: MemoryRelay, unix_s: float) -> ChainReader:
    return ChainReader(relay, run=RUN, secret=SECRET, tensors=TENSORS, patience=QUICK, unix_s=lambda: unix_s)


def signed_claim(epoch: int, at_s: int) -> bytes:
    return seal(SECRET, NAMES.claim(epoch), Claim(RUN, epoch, "another trainer", at_s))


# Claims


@pytest.mark.parametrize("ahead_s", [1, 3600, CLAIM_AHEAD_S_MAX - 5, CLAIM_AHEAD_S_MAX + 60, None], ids=str)
@pytest.mark.parametrize("is_junk", [True, False], ids=["junk", "signed with another secret"])
def test_a_claim_of_a_stranger_stops_neither_trainer_nor_readers(ahead_s: int | None, is_junk: bool) -> None:
    relay = MemoryRelay()
    epoch = EPOCH_MAX if ahead_s is None else int(time.time()) + ahead_s
    claim = Claim(RUN, epoch, "a stranger", int(time.time()))
    relay.put_new(NAMES.claim(epoch), [JUNK if is_junk else seal(STRANGER, NAMES.claim(epoch), claim)])
    trainer = Trainer(relay, at_least=int(time.time()))
    weights = random_weights(1)
    trainer.publish(1, weights)
    member = Member(relay)
    assert member.sync() == VersionId(trainer.writer.epoch, 1) and equal(member.arrays, weights)
    successor = Trainer(relay, at_least=int(time.time()))
    assert trainer.writer.epoch < successor.writer.epoch < int(time.time()) + 60


def test_a_claim_that_is_not_signed_is_swept() -> None:
    story = Story()
    for epoch in (2, EPOCH_MAX):
        story.relay.put_new(NAMES.claim(epoch), [JUNK])
    story.trainer.writer.sweep()
    assert [entry.key for entry in story.relay.list(f"{RUN}/epochs")] == [NAMES.claim(1)]


def test_a_later_trainer_s_claim_is_never_swept() -> None:
    story = Story()
    relay = story.relay
    relay.put_new(NAMES.claim(2), [signed_claim(2, int(time.time()))])
    story.trainer.writer.sweep()
    assert relay.get(NAMES.claim(2))


def test_epochs_that_a_stranger_occupied_in_advance_are_taken_anyway() -> None:
    relay = MemoryRelay()
    for epoch in range(1, 50):
        relay.put_new(NAMES.claim(epoch), [JUNK])
    assert writer_at(relay, 10.0).claim() == 10


def test_a_signed_claim_more_than_a_day_ahead_of_the_clock_does_not_count() -> None:
    relay, now_s = MemoryRelay(), 1000.0
    ahead = int(now_s) + CLAIM_AHEAD_S_MAX + 1
    relay.put_new(NAMES.claim(ahead), [signed_claim(ahead, ahead)])
    writer = writer_at(relay, now_s)
    assert writer.claim() == 1000
    writer.check_fence()
    reader = reader_at(relay, now_s)
    reader.refresh()
    assert reader.epoch == 1000 and "ahead of the clock" in reader.refused[NAMES.claim(ahead)]


def test_a_trainer_whose_epoch_would_be_ahead_of_the_clock_is_told() -> None:
    for at_least in (1001 + CLAIM_AHEAD_S_MAX, EPOCH_MAX + 1):
        with pytest.raises(ConfigError, match="ahead of the clock"):
            writer_at(MemoryRelay(), 1000.0).claim(at_least=at_least)
    with pytest.raises(ConfigError, match="not an epoch"):
        NAMES.claim(EPOCH_MAX + 1)


def test_a_claim_under_which_nothing_was_published_expires() -> None:
    story = Story()
    story.relay.put_new(NAMES.claim(2), [signed_claim(2, 1000)])
    fresh_s, late_s = 1000.0, 1001.0 + CLAIM_UNUSED_S_MAX
    story.trainer.writer._unix_s = lambda: fresh_s
    with pytest.raises(Fenced):
        story.trainer.writer.check_fence()
    reader = reader_at(story.relay, fresh_s)
    assert reader.refresh() is None and reader.epoch == 2
    story.trainer.writer._unix_s = reader._unix_s = lambda: late_s
    story.trainer.writer.check_fence()
    assert reader.refresh() == VersionId(1, 1) and reader.epoch == 1


def test_a_claim_under_which_something_was_published_never_expires() -> None:
    story = Story()
    reader = reader_at(story.relay, time.time() + 100 * CLAIM_UNUSED_S_MAX)
    assert reader.refresh() == VersionId(1, 1)


def test_the_inventory_counts_signed_claims_only() -> None:
    story = Story()
    story.relay.put_new(NAMES.claim(7), [JUNK])
    assert take_stock(story.relay, RUN, SECRET).epochs == (1,)


# Manifests and buckets


def test_a_manifest_that_a_stranger_wrote_first_is_replaced_and_readers_take_the_right_one() -> None:
    story = Story()
    member = Member(story.relay)
    key = NAMES.manifest(Folder(VersionId(1, 2), "delta", 0))
    story.relay.put_new(key, [JUNK])
    assert member.sync() == VersionId(1, 1) and key in member.reader.refused
    story.go_on(1)
    assert member.sync() == VersionId(1, 2) and equal(member.arrays, story.weights)
    assert key not in member.reader.refused


def test_the_key_of_a_bucket_is_a_new_one_each_time() -> None:
    folder = Folder(VersionId(1, 1), "anchor", 0)
    assert len({NAMES.bucket(folder, 0, 0) for _ in range(100)}) == 100


def test_a_record_of_an_earlier_rose_is_refused_by_name() -> None:
    with pytest.raises(WeightsRefused, match="earlier ROSE"):
        unseal(SECRET, "run/key", b"ROSE1" + bytes(200), Claim)


BODIES = [b"\x84\xa3run\xa1\xff", b"\xc1", b"\x91" * 5000, msgspec.msgpack.encode({"run": "r"}), b""]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_signed_record_that_cannot_be_decoded_is_refused(body: bytes) -> None:
    hashed = hashlib.sha256(body).digest()
    data = MAGIC + write_key(SECRET).sign(manifests._signed("run/key", hashed)) + hashed + body
    with pytest.raises(WeightsRefused, match="unreadable"):
        unseal(SECRET, "run/key", data, Claim)


# Sizes


class CountedRelay(MemoryRelay):
    """Counts what is read, and lists one key with a size of its own choice."""

    read_bytes = 0
    listed: Entry | None = None

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        data = super().get(key, start, stop)
        self.read_bytes += len(data)
        return data

    def list(self, prefix: str = "") -> Sequence[Entry]:
        return [
            self.listed if self.listed and entry.key == self.listed.key else entry for entry in super().list(prefix)
        ]


def test_a_record_without_a_signature_is_not_read_whole() -> None:
    relay = CountedRelay()
    relay.put_new("run/key", [bytes(1 << 20)])
    with pytest.raises(WeightsRefused):
        read_signed(relay, SECRET, "run/key", 1 << 20, Claim)
    assert relay.read_bytes <= manifests.FIRST_READ_BYTES


def test_a_record_that_is_listed_as_too_large_is_not_read_at_all() -> None:
    relay = CountedRelay()
    relay.put_new(NAMES.claim(1), [signed_claim(1, 0)])
    relay.listed = Entry(NAMES.claim(1), manifests.RECORD_BYTES_MAX + 1)
    reader = reader_at(relay, 10.0)
    reader.refresh()
    assert reader.epoch == 0 and relay.read_bytes == 0 and "at most" in reader.refused[NAMES.claim(1)]


def test_a_record_that_is_longer_than_the_first_read_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(2)
    monkeypatch.setattr(manifests, "FIRST_READ_BYTES", manifests.HEAD_BYTES)
    member = Member(story.relay)
    assert member.sync() == VersionId(1, 2) and equal(member.arrays, story.weights)


def test_weights_beyond_any_model_are_refused_before_memory_is_taken() -> None:
    story = Story()
    key = NAMES.manifest(Folder(VersionId(1, 1), "anchor", 0))
    found = read_signed(story.relay, SECRET, key, size_in(story.relay, key), Manifest)
    huge = msgspec.structs.replace(found.tensors[0], shape=(1 << 31, 1 << 31))
    with pytest.raises(WeightsRefused, match="at most"):
        check_manifest(msgspec.structs.replace(found, tensors=[huge, *found.tensors[1:]]), run=RUN, expected=None)
