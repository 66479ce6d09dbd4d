"""The chain between a trainer and workers: stories, and everything that must be refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.contract.chain_ends import (
    QUICK,
    RUN,
    SECRET,
    TENSORS,
    Member,
    Story,
    Trainer,
    equal,
    stepped,
)
from tests.contract.faulty_relay import Fault, FaultyRelay

from rose.core.versions import VersionId
from rose.errors import ConfigError
from rose.weights.chain import Folder, Names
from rose.weights.coding import PlainCodec
from rose.weights.manifest import Claim, Fenced, Manifest, WeightsRefused, check_manifest, seal, unseal
from rose.weights.reading import ChainReader
from rose.weights.relay.base import KeyExists
from rose.weights.relay.memory import MemoryRelay
from rose.weights.shards import LayoutError, Tensor
from rose.weights.writing import ChainWriter


def payload_bytes(relay) -> int:
    return sum(entry.size_bytes for entry in relay.list() if ".b" in entry.key)


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


def test_what_did_not_change_is_not_sent():
    story = Story()
    before = payload_bytes(story.relay)
    story.trainer.publish(2, story.weights)
    assert payload_bytes(story.relay) == before
    member = Member(story.relay)
    assert member.sync() == VersionId(1, 2) and equal(member.arrays, story.weights)


def test_an_older_version_can_be_had_while_it_is_kept():
    story = Story(4)
    member = Member(story.relay)
    member.reader.refresh()
    member.reader.bring(member.shadow, VersionId(1, 3))
    assert equal(member.arrays, story.published[3])
    with pytest.raises(WeightsRefused, match="newest is 4"):
        member.reader.bring(member.shadow, VersionId(1, 9))


def test_a_new_trainer_takes_over_and_the_old_one_is_fenced():
    story = Story(2)
    member = Member(story.relay)
    member.sync()
    taken = stepped(story.published[1], 77)
    successor = Trainer(story.relay)
    assert member.sync() is None  # claimed, nothing published: what runs stays
    with pytest.raises(Fenced, match="taken over"):
        story.go_on(1)
    successor.publish(2, taken)
    assert member.sync() == VersionId(2, 2) and equal(member.arrays, taken)


def test_a_manifest_that_the_old_trainer_still_gets_in_is_ignored():
    story = Story(2)
    draft = story.trainer.push(3, story.weights, anchor=True)
    story.trainer.writer.check_fence = lambda: None  # it looked just before the other one came
    successor = Trainer(story.relay)
    successor.publish(1, story.published[1])
    draft.commit()
    member = Member(story.relay)
    assert member.sync() == VersionId(2, 1) and equal(member.arrays, story.published[1])
    assert member.reader.versions() == [VersionId(2, 1)]


def test_a_trainer_after_a_relay_that_forgot_even_the_claims_still_outranks_the_one_before():
    story = Story()
    first = ChainWriter(story.relay, run=RUN, secret=SECRET, tensors=TENSORS)
    assert first.claim() > 1_700_000_000
    member = Member(story.relay)
    member.sync()
    for entry in list(story.relay.list()):
        story.relay.delete(entry.key)
    assert ChainWriter(story.relay, run=RUN, secret=SECRET, tensors=TENSORS).claim() >= first.epoch
    assert ChainWriter(story.relay, run=RUN, secret=SECRET, tensors=TENSORS).claim() > first.epoch


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


@pytest.mark.parametrize("keep", [1, 2, 5, 100])
def test_sweeping_keeps_what_members_need(keep):
    story = Story(2)
    members = [Member(story.relay)]
    for _ in range(6):
        members[-1].sync()
        members.append(Member(story.relay))
        story.go_on(1, anchor=len(story.published) % 4 == 3)
        story.trainer.writer.sweep(keep)
    for member in members:
        assert member.sync() == VersionId(1, 8) and equal(member.arrays, story.weights)


def test_sweeping_removes_superseded_links_old_epochs_and_rubbish():
    story = Story(3)
    story.trainer.push(4, story.weights, anchor=False)  # and then the trainer died
    successor = Trainer(story.relay)
    assert successor.writer.sweep() == 0  # nothing of its own to stand on yet
    successor.publish(4, story.weights)
    under_way = successor.writer.begin(5, None)
    under_way.push([])
    assert successor.writer.sweep(1) > 0
    assert all("e0000000002" in entry.key for entry in story.relay.list())
    assert Member(story.relay).sync() == VersionId(2, 4)
    assert successor.writer.sweep(1) == 0


def test_a_relay_that_lost_everything_is_filled_again():
    story = Story(3)
    member = Member(story.relay)
    member.sync()
    assert story.trainer.writer.check_relay()
    for entry in list(story.relay.list()):
        story.relay.delete(entry.key)
    assert not story.trainer.writer.check_relay()
    assert member.sync() is None and equal(member.arrays, story.weights)
    story.trainer.republish()
    assert story.trainer.writer.check_relay()
    joined = Member(story.relay)
    assert joined.sync() == member.sync() == VersionId(1, 3)
    story.go_on(1)
    assert joined.sync() == member.sync() == VersionId(1, 4)
    assert equal(joined.arrays, story.weights) and equal(member.arrays, story.weights)


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
        member.reader.bring(member.shadow, VersionId(1, 2))
    story.go_on(1, anchor=True)
    assert member.sync() == VersionId(1, 3) and equal(member.arrays, story.weights)


# Strangers and damage


def test_a_stranger_cannot_publish_nor_claim():
    story = Story(2)
    stranger = ChainWriter(story.relay, run=RUN, secret=b"another secret altogether", tensors=TENSORS, patience=QUICK)
    assert stranger.claim(at_least=2) == 2
    member = Member(story.relay)
    assert member.sync() == VersionId(1, 2)
    assert "signature" in member.reader.refused[Names(RUN).claim(2)]
    story.go_on(1)  # nor is the trainer fenced by it
    assert member.sync() == VersionId(1, 3)


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
    reader = ChainReader(story.relay, run=RUN, secret=SECRET, tensors=tensors, patience=QUICK)
    assert reader.refresh() is None
    assert [told in why for why in reader.refused.values()] == [True]


def test_another_codec_is_refused():
    story = Story()
    member = Member(story.relay, codec=PlainCodec())
    assert member.sync() is None
    assert "encoded with" in next(iter(member.reader.refused.values()))


CHANGES = [
    ({"version_hash": "0" * 32}, WeightsRefused),
    ({"format": 1}, WeightsRefused),
    ({"pieces": []}, LayoutError),
    ({"buckets": []}, WeightsRefused),
    ({"base": (1, 0)}, WeightsRefused),
]


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
        check_manifest(msgspec.structs.replace(manifest, pieces=manifest.pieces * 2), run=RUN, expected=TENSORS)


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
    member.arrays["up"][0, 0] ^= 1  # something wrote to the shadow
    member.shadow.forget_all()
    story.go_on(1)
    assert member.sync() == VersionId(1, 3) and equal(member.arrays, story.weights)


def test_a_codec_that_is_wrong_is_caught_by_the_hash():
    class Sloppy(PlainCodec):
        def apply(self, payload, destination):
            super().apply(payload, destination)
            destination.reshape(-1)[-1] ^= 1

    story = Story(codec=PlainCodec())
    member = Member(story.relay, codec=Sloppy())
    with pytest.raises(WeightsRefused, match="not in the relay"):
        member.sync()
    assert "did not come to the numbers" in next(iter(member.reader.refused.values()))


# Names


def test_names_can_be_read_back():
    names = Names("run.1")
    folder = Folder(VersionId(3, 17), "delta", 2)
    place = names.place_of(names.bucket(folder, 4, 5))
    assert place is not None and place[0] == folder and place[1].startswith("r00004.b00005.")
    assert names.place_of(names.manifest(folder)) == (folder, "manifest")
    assert names.epoch_of(names.claim(12)) == 12
    assert names.place_of(names.claim(12)) is None and names.epoch_of(names.manifest(folder)) is None
    assert names.place_of("run.1/readme") is None


@pytest.mark.parametrize("run", ["", "a/b", "..", "a b", "x" * 101])
def test_a_run_needs_a_name(run):
    with pytest.raises(ConfigError, match="cannot name a run"):
        Names(run)


def test_a_short_secret_is_refused():
    with pytest.raises(ConfigError, match="secret"):
        ChainWriter(MemoryRelay(), run=RUN, secret=b"short", tensors=TENSORS)


def test_special_numbers_keep_their_bits():
    story = Story()
    special = np.array([0x7FC0, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x7FC1], np.uint16)  # nan, inf, -inf, -0.0, denormal
    weights = dict(story.weights, embed=np.tile(special, (11, 1)))
    story.trainer.publish(2, weights)
    member = Member(story.relay)
    member.sync()
    assert np.array_equal(member.arrays["embed"], weights["embed"])


def test_two_writers_of_one_epoch_are_told():
    story = Story()
    twin = Trainer(story.relay, epoch=1)
    with pytest.raises((Fenced, KeyExists)):
        twin.publish(1, story.weights)
