"""The chain between a trainer and workers: stories, and everything that must be refused."""

from __future__ import annotations

import time

import pytest
from tests.contract.chain_ends import (
    QUICK,
    RUN,
    SECRET,
    TENSORS,
    Story,
)
from tests.unit.weights.test_manifest import NAMES, reader_at, signed_claim

from rose.core.versions import VersionId
from rose.errors import ConfigError, Unavailable
from rose.weights.chain import CLAIM_AHEAD_S_MAX, CLAIM_UNUSED_S_MAX, Folder, Names, RetryPolicy
from rose.weights.manifest import (
    Fenced,
)
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.writing import ChainWriter


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


def writer_at(relay: MemoryRelay, unix_s: float) -> ChainWriter:
    return ChainWriter(relay, run=RUN, secret=SECRET, tensors=TENSORS, retry=QUICK, unix_s=lambda: unix_s)


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


def test_the_key_of_a_bucket_is_a_new_one_each_time() -> None:
    folder = Folder(VersionId(1, 1), "anchor", 0)
    assert len({NAMES.bucket(folder, 0, 0) for _ in range(100)}) == 100


def test_retry_waits_longer_each_time_until_its_limit():
    now_s, waits = [0.0], []

    def sleep_s(seconds: float) -> None:
        waits.append(seconds)
        now_s[0] += seconds

    retry = RetryPolicy(limit_s=10, first_wait_s=1, wait_s_max=4, now_s=lambda: now_s[0], sleep_s=sleep_s)
    trials = []

    def trial() -> None:
        trials.append(now_s[0])
        raise Unavailable("no")

    with pytest.raises(Unavailable):
        retry.call(trial)
    assert waits == [1, 2, 4] and trials == [0, 1, 3, 7]
