"""The batch model of one rollout worker."""

from __future__ import annotations

import math

import pytest

from rose.core.facts import StepFeatures
from rose.engines.profiles import load_profile
from rose.sim.batch_worker import BatchTurn, BatchWorker
from rose.sim.lent_timeline import SEQUENCES, STEP_TOKENS

PROFILE = load_profile("h800-qwen3-8b")
GROWTH_UNSEEN = 0.035  # contexts grow between two events, and the model takes them as they were at the first


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


def token_by_token_s(turns: list[BatchTurn]) -> float:
    """Return the time of the same turns, simulated one engine step after another."""
    seconds, prompts = 0.0, [[turn.prompt_tokens, 0, turn.output_tokens] for turn in turns]  # left, done, to generate
    decoding: list[list[int]] = []  # context, to generate
    while prompts or decoding:
        room, chunk, by_context, depth, begun = STEP_TOKENS - len(decoding), 0, 0, 0, []
        for prompt in prompts:
            part = min(room - chunk, prompt[0])
            if not part:
                break
            chunk, depth, by_context = (
                chunk + part,
                depth + prompt[1] + part,
                by_context + part * (prompt[1] + part // 2),
            )
            prompt[:2] = [prompt[0] - part, prompt[1] + part]
            begun.append(prompt)
        context = sum(one[0] for one in decoding) + len(decoding)
        features = StepFeatures(
            len(decoding) + chunk, context + depth, context + by_context, len(decoding) + len(begun)
        )
        seconds += PROFILE.step_s(features)
        decoding = [[context + 1, left - 1] for context, left in decoding if left > 1]
        decoding += [[done, output] for left, done, output in begun if not left]
        prompts = [prompt for prompt in prompts if prompt[0]]
    return seconds


@pytest.mark.parametrize("count, prompt, output", [(1, 3000, 400), (16, 1500, 300), (48, 900, 500), (60, 4000, 80)])
def test_steps_between_two_events_agree_with_token_by_token(count: int, prompt: int, output: int) -> None:
    turns = [
        BatchTurn(f"{number}", f"t{number}", prompt + 37 * (number % 7), output + 11 * (number % 5))
        for number in range(count)
    ]
    expected_s = token_by_token_s(turns)
    batch = worker()
    batch.kv_tokens = 10**9
    for turn in turns:
        batch.add(turn)
    assert len(run(batch)) == count
    assert 1 - GROWTH_UNSEEN <= batch.busy_s / expected_s <= 1.01
