"""The chain when the relay misbehaves: calls lost, late, doubled or damaged; relays that stay away or are full."""

from __future__ import annotations

import pytest
from tests.contract.chain_ends import Member, Story, Trainer, equal, random_weights, stepped
from tests.contract.faulty_relay import Fault, FaultyRelay

from rose.core.versions import VersionId
from rose.errors import Unavailable
from rose.weights.chain import Patience
from rose.weights.relay.base import RelayFull
from rose.weights.relay.memory import MemoryRelay

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
    story = Story(2, relay=relay, patience=Patience(limit_s=0.0))
    relay.faults = lambda called, key: Fault.REQUEST_LOST if called == name else Fault.NONE
    member = Member(relay, patience=Patience(limit_s=0.0))

    def a_day() -> None:
        story.go_on(1)
        member.sync()
        story.trainer.republish()
        story.trainer.writer.sweep(1)

    with pytest.raises(Unavailable):
        a_day()


def test_after_a_publication_that_failed_the_next_is_an_anchor_and_all_is_well():
    relay = FaultyRelay(MemoryRelay(), lambda called, key: Fault.NONE)
    story = Story(2, relay=relay, patience=Patience(limit_s=0.0))
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
    story = Story(1, relay=relay, patience=Patience(limit_s=0.0))
    member = Member(relay)
    with pytest.raises(RelayFull):
        story.go_on(100)
    assert member.sync() is not None
    assert equal(member.arrays, story.published[member.manifest.version])


def test_patience_waits_longer_and_longer_and_not_forever():
    now_s, waits = [0.0], []

    def sleep_s(seconds: float) -> None:
        waits.append(seconds)
        now_s[0] += seconds

    patience = Patience(limit_s=10, first_wait_s=1, wait_s_max=4, now_s=lambda: now_s[0], sleep_s=sleep_s)
    trials = []

    def trial(number: int) -> None:
        trials.append(number)
        raise Unavailable("no")

    with pytest.raises(Unavailable):
        patience.call(trial)
    assert waits == [1, 2, 4] and trials == [0, 1, 2, 3]
