"""The writer: epochs and fences, sweeping, a relay that misbehaves, and programs without the secret."""

from __future__ import annotations

import time

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
    random_weights,
    stepped,
)
from tests.contract.faulty_relay import Fault, FaultyRelay
from tests.unit.weights.test_chain import writer_at
from tests.unit.weights.test_manifest import NAMES, signed_claim

from rose.core.versions import VersionId
from rose.errors import ConfigError, Unavailable
from rose.weights.chain import CLAIM_AHEAD_S_MAX, EPOCH_MAX, Folder, Names, RetryPolicy
from rose.weights.manifest import (
    Claim,
    Fenced,
    seal,
)
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.relay_base import KeyExists, RelayFull
from rose.weights.writing import ChainWriter


def payload_bytes(relay) -> int:
    return sum(entry.size_bytes for entry in relay.list() if ".b" in entry.key)


def test_what_did_not_change_is_not_sent():
    story = Story()
    before = payload_bytes(story.relay)
    story.trainer.publish(2, story.weights)
    assert payload_bytes(story.relay) == before
    member = Member(story.relay)
    assert member.sync() == VersionId(1, 2) and equal(member.arrays, story.weights)


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


def test_a_stranger_cannot_publish_nor_claim():
    story = Story(2)
    stranger = ChainWriter(story.relay, run=RUN, secret=b"another secret altogether", tensors=TENSORS, retry=QUICK)
    assert stranger.claim(at_least=2) == 2
    member = Member(story.relay)
    assert member.sync() == VersionId(1, 2)
    assert "signature" in member.reader.refused[Names(RUN).claim(2)]
    story.go_on(1)  # nor is the trainer fenced by it
    assert member.sync() == VersionId(1, 3)


def test_a_short_secret_is_refused():
    with pytest.raises(ConfigError, match="secret"):
        ChainWriter(MemoryRelay(), run=RUN, secret=b"short", tensors=TENSORS)


def test_two_writers_of_one_epoch_are_told():
    story = Story()
    twin = Trainer(story.relay, epoch=1)
    with pytest.raises((Fenced, KeyExists)):
        twin.publish(1, story.weights)


JUNK = b"anything at all"
STRANGER = b"another secret altogether"


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


def test_a_trainer_whose_epoch_would_be_ahead_of_the_clock_is_told() -> None:
    for at_least in (1001 + CLAIM_AHEAD_S_MAX, EPOCH_MAX + 1):
        with pytest.raises(ConfigError, match="ahead of the clock"):
            writer_at(MemoryRelay(), 1000.0).claim(at_least=at_least)
    with pytest.raises(ConfigError, match="not an epoch"):
        NAMES.claim(EPOCH_MAX + 1)


def test_a_manifest_that_a_stranger_wrote_first_is_replaced_and_readers_take_the_right_one() -> None:
    story = Story()
    member = Member(story.relay)
    key = NAMES.manifest(Folder(VersionId(1, 2), "delta", 0))
    story.relay.put_new(key, [JUNK])
    assert member.sync() == VersionId(1, 1) and key in member.reader.refused
    story.go_on(1)
    assert member.sync() == VersionId(1, 2) and equal(member.arrays, story.weights)
    assert key not in member.reader.refused


FAULTS = [Fault.REQUEST_LOST, Fault.REPLY_LOST, Fault.LATE, Fault.CORRUPT]


def calls_of_a_day(faults) -> int:
    """Claim, publish, follow, sweep and publish again on a relay with these faults; everything must come out right."""
    relay = FaultyRelay(MemoryRelay(), faults)
    trainer = Trainer(relay)
    weights = random_weights(0)
    member = Member(relay)
    for number in range(1, 4):
        weights = stepped(weights, number)
        trainer.publish(number, weights)
        while member.sync() != VersionId(trainer.writer.epoch, number):
            assert member.reader.refresh() is None, "a version that is not the newest"
        assert equal(member.arrays, weights)
    trainer.republish()
    trainer.writer.sweep(1)
    joined = Member(relay)
    assert joined.sync() == VersionId(trainer.writer.epoch, 3)
    assert equal(joined.arrays, weights)
    return len(relay.calls)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.lower())
def test_every_single_call_may_fail_once(fault):
    count = calls_of_a_day(lambda name, key: Fault.NONE)
    for broken in range(count):
        numbers = iter(range(10**6))
        calls_of_a_day(lambda name, key: fault if next(numbers) == broken else Fault.NONE)  # noqa: B023


@pytest.mark.parametrize("name", ["put_new", "get", "list", "delete"])
def test_a_relay_that_stays_away_is_an_error_in_time(name):
    relay = FaultyRelay(MemoryRelay(), lambda called, key: Fault.NONE)
    story = Story(2, relay=relay, retry=RetryPolicy(limit_s=0.0))
    relay.faults = lambda called, key: Fault.REQUEST_LOST if called == name else Fault.NONE
    member = Member(relay, retry=RetryPolicy(limit_s=0.0))

    def a_day() -> None:
        story.go_on(1)
        member.sync()
        story.trainer.republish()
        story.trainer.writer.sweep(1)

    with pytest.raises(Unavailable):
        a_day()


def test_after_a_publication_that_failed_the_next_is_an_anchor_and_all_is_well():
    relay = FaultyRelay(MemoryRelay(), lambda called, key: Fault.NONE)
    story = Story(2, relay=relay, retry=RetryPolicy(limit_s=0.0))
    member = Member(relay)
    member.sync()
    relay.faults = lambda called, key: Fault.REQUEST_LOST if "b00001" in key else Fault.NONE
    with pytest.raises(Unavailable):
        story.go_on(1)
    relay.faults = lambda called, key: Fault.NONE
    assert member.sync() == VersionId(1, 2)
    story.published[3] = story.weights
    story.go_on(1)
    assert member.sync() == VersionId(1, 4) and equal(member.arrays, story.weights)
    assert story.trainer.writer.sweep(1) > 0
    assert not [entry.key for entry in relay.list() if "v0000000003" in entry.key]


def test_a_full_relay_is_told_and_what_is_there_still_works():
    relay = MemoryRelay(capacity_bytes=3000)
    story = Story(1, relay=relay, retry=RetryPolicy(limit_s=0.0))
    member = Member(relay)
    with pytest.raises(RelayFull):
        story.go_on(100)
    assert member.sync() is not None
    assert equal(member.arrays, story.published[member.manifest.version])
