"""The batch model of one rollout worker."""

from __future__ import annotations

import math

import pytest

from rose.core.facts import StepFeatures
from rose.engines.profiles import load_profile
from rose.sim.batch_worker import BatchTurn, BatchWorker
from rose.sim.lent_timeline import SEQUENCES

PROFILE = load_profile("h800-qwen3-8b")


def worker() -> BatchWorker:
    return BatchWorker("w", PROFILE, None)


def run(batch: BatchWorker) -> list[BatchTurn]:
    ended: list[BatchTurn] = []
    while (next_s := batch.next_s()) < math.inf:
        ended += batch.advance(next_s)
    return ended


def test_a_turn_takes_the_time_of_its_steps() -> None:
    batch = worker()
    batch.add(BatchTurn("a", "t", 100, 50))
    [turn] = run(batch)
    decode_s = PROFILE.step_s(StepFeatures(1, 125, 125, 1))
    assert turn.turn_id == "a" and batch.busy_s == pytest.approx(50 * decode_s, rel=0.1)
    assert not batch.turns


def test_the_next_turn_of_a_trajectory_finds_its_prefix() -> None:
    batch = worker()
    for turn_id, trajectory in (("a", "t"), ("b", "t"), ("c", "other")):
        batch.add(BatchTurn(turn_id, trajectory, 1000, 50))
        run(batch)
    batch.add(second := BatchTurn("d", "t", 1200, 10))
    assert second.cached_tokens == 1050
    batch.add(stranger := BatchTurn("e", "new", 1200, 10))
    assert stranger.cached_tokens == 0


def test_an_evicted_turn_reports_what_it_generated() -> None:
    batch = worker()
    batch.add(turn := BatchTurn("a", "t", 100, 1000))
    batch.advance(batch.next_s())
    assert turn.begun_at is not None
    batch.advance(batch.next_s() / 2)
    assert 300 < batch.evict("a") < 700
    assert not batch.turns and batch.next_s() == math.inf


def test_turns_wait_for_memory_and_a_smaller_limit_evicts() -> None:
    batch = worker()
    batch.kv_tokens = 3000
    for name in "abc":
        batch.add(BatchTurn(name, name, 1000, 200))
    assert batch.shrink(3000) == [], "the third turn waits"
    batch.advance(batch.next_s())
    assert batch.shrink(1500) == ["b"], "the turn with the least computed prompt leaves first"
    assert batch.shrink(0) == ["b", "a"]


def test_a_worker_runs_a_bounded_number_of_sequences() -> None:
    batch = worker()
    for number in range(SEQUENCES + 3):
        batch.add(BatchTurn(str(number), str(number), 10, 10))
    ended = batch.advance(batch.next_s())
    while not ended:
        ended = batch.advance(batch.next_s())
    assert len(ended) <= SEQUENCES
    assert len(ended) + len(run(batch)) == SEQUENCES + 3
