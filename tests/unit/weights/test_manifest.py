"""A program that may write to the relay's storage, but does not hold the secret, can do nothing to a run that lasts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import pytest
from tests.contract.chain_ends import (
    QUICK,
    RUN,
    SECRET,
    TENSORS,
    Member,
    Story,
    equal,
)

from rose.core.versions import VersionId
from rose.weights import manifest as manifests
from rose.weights.chain import Folder, Names
from rose.weights.keys import write_key
from rose.weights.manifest import (
    MAGIC,
    Claim,
    Manifest,
    WeightsRefused,
    check_manifest,
    read_signed,
    seal,
    size_in,
    unseal,
)
from rose.weights.reading import ChainReader
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.relay_base import Buffer, RelayEntry
from rose.weights.shards import LayoutError

NAMES = Names(RUN)


def reader_at(relay: MemoryRelay, unix_s: float) -> ChainReader:
    return ChainReader(relay, run=RUN, secret=SECRET, tensors=TENSORS, retry=QUICK, unix_s=lambda: unix_s)


def signed_claim(epoch: int, at_s: int) -> bytes:
    return seal(SECRET, NAMES.claim(epoch), Claim(RUN, epoch, "another trainer", at_s))


BODIES = [b"\x84\xa3run\xa1\xff", b"\xc1", b"\x91" * 5000, msgspec.msgpack.encode({"run": "r"}), b""]


class CountedRelay(MemoryRelay):
    """Counts what is read, and lists one key with a size of its own choice."""

    read_bytes = 0
    listed: RelayEntry | None = None

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        data = super().get(key, start, stop)
        self.read_bytes += len(data)
        return data

    def list(self, prefix: str = "") -> Sequence[RelayEntry]:
        return [
            self.listed if self.listed and entry.key == self.listed.key else entry for entry in super().list(prefix)
        ]


CHANGES = [
    ({"version_hash": "0" * 32}, WeightsRefused),
    ({"format": 1}, WeightsRefused),
    ({"chunks": []}, LayoutError),
    ({"buckets": []}, WeightsRefused),
    ({"base": (1, 0)}, WeightsRefused),
]


def test_a_record_of_an_earlier_rose_is_refused_by_name() -> None:
    with pytest.raises(WeightsRefused, match="earlier ROSE"):
        unseal(SECRET, "run/key", b"ROSE1" + bytes(200), Claim)


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_signed_record_that_cannot_be_decoded_is_refused(body: bytes) -> None:
    hashed = hashlib.sha256(body).digest()
    data = MAGIC + write_key(SECRET).signing.sign(manifests._signed("run/key", hashed)) + hashed + body
    with pytest.raises(WeightsRefused, match="unreadable"):
        unseal(SECRET, "run/key", data, Claim)


def test_a_record_without_a_signature_is_not_read_whole() -> None:
    relay = CountedRelay()
    relay.put_new("run/key", [bytes(1 << 20)])
    with pytest.raises(WeightsRefused):
        read_signed(relay.get, SECRET, "run/key", 1 << 20, Claim)
    assert relay.read_bytes <= manifests.FIRST_READ_BYTES


def test_a_record_that_is_listed_as_too_large_is_not_read_at_all() -> None:
    relay = CountedRelay()
    relay.put_new(NAMES.claim(1), [signed_claim(1, 0)])
    relay.listed = RelayEntry(NAMES.claim(1), manifests.RECORD_BYTES_MAX + 1)
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
    found = read_signed(story.relay.get, SECRET, key, size_in(story.relay, key), Manifest)
    huge = msgspec.structs.replace(found.tensors[0], shape=(1 << 31, 1 << 31))
    with pytest.raises(WeightsRefused, match="at most"):
        check_manifest(msgspec.structs.replace(found, tensors=[huge, *found.tensors[1:]]), run=RUN, expected=None)


def test_a_manifest_under_another_key_is_refused():
    story = Story(2)
    names = Names(RUN)
    old = bytes(story.relay.get(names.manifest(Folder(VersionId(1, 2), "delta", 0))))
    forged = names.manifest(Folder(VersionId(1, 3), "delta", 0))
    story.relay.put_new(forged, [old])
    member = Member(story.relay)
    assert member.sync() == VersionId(1, 2)
    assert "signature" in member.reader.refused[forged]


def test_a_manifest_of_another_run_with_the_same_secret_is_refused():
    story = Story()
    names = Names(RUN)
    key = names.manifest(Folder(VersionId(1, 1), "anchor", 0))
    manifest = unseal(SECRET, key, story.relay.get(key), Manifest)
    with pytest.raises(WeightsRefused, match="run `run-2`"):
        check_manifest(msgspec.structs.replace(manifest, run="run-2"), run=RUN, expected=TENSORS)


@pytest.mark.parametrize("change, error", CHANGES, ids=[next(iter(change)) for change, _ in CHANGES])
def test_a_manifest_that_does_not_add_up_is_refused(change, error):
    story = Story()
    key = Names(RUN).manifest(Folder(VersionId(1, 1), "anchor", 0))
    manifest = unseal(SECRET, key, story.relay.get(key), Manifest)
    with pytest.raises(error):
        check_manifest(msgspec.structs.replace(manifest, **change), run=RUN, expected=TENSORS)


def test_pieces_twice_are_refused():
    story = Story()
    key = Names(RUN).manifest(Folder(VersionId(1, 1), "anchor", 0))
    manifest = unseal(SECRET, key, story.relay.get(key), Manifest)
    with pytest.raises(LayoutError, match="overlap"):
        check_manifest(msgspec.structs.replace(manifest, chunks=manifest.chunks * 2), run=RUN, expected=TENSORS)


def test_any_flipped_bit_of_a_record_is_seen():
    key = Names(RUN).claim(1)
    record = seal(SECRET, key, Claim(RUN, 1, "me", 0))
    assert unseal(SECRET, key, record, Claim).owner == "me"
    for bit in range(len(record) * 8):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WeightsRefused):
            unseal(SECRET, key, damaged, Claim)
    for length in range(len(record)):
        with pytest.raises(WeightsRefused):
            unseal(SECRET, key, record[:length], Claim)
