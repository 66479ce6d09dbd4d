"""Micro-batches: sorted by length, bounded and complete."""

from __future__ import annotations

import random

import pytest
import torch

from rose.core.trajectory import Trajectory
from rose.train.batch import Sample, empty_batch, micro_batches, split
from rose.train.losses import LOSSES, ScoredTokens, compute_loss
from rose.train.train_settings import LossSettings


def trajectory(name: str, own: list[int], reward: float, logprob: float = -4.7, version: str = "0") -> Trajectory:
    context = [10, 11, 12, 13]
    return Trajectory(
        trajectory_id=name,
        group_id="0",
        token_ids=tuple(context + own),
        loss_mask=(False,) * 4 + (True,) * len(own),
        logprobs=(0.0,) * 4 + (logprob,) * len(own),
        versions=("",) * 4 + (version,) * len(own),
        reward=reward,
    )


def test_micro_batches_are_sorted_bounded_and_complete():
    lengths = [5, 1, 9, 3, 7, 2, 8]
    samples = [Sample(trajectory(str(length), [20] * length, 0.0), float(length), 1.0) for length in lengths]
    batches = micro_batches(samples, rows_max=3, tokens_max=24)
    assert [tuple(batch.token_ids.shape) for batch in batches] == [(3, 7), (2, 11), (1, 12), (1, 13)]
    assert [int(batch.scored.sum()) for batch in batches] == [6, 12, 8, 9]
    assert batches[0].advantages.tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert batches[0].sequences.tolist() == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_sequence_is_on_one_rank_and_tokens_are_balanced(ranks):
    dice = random.Random(ranks)
    for count in (1, 2, 5, 64, 200):
        tokens = [dice.randint(1, 300) for _ in range(count)]
        shares = split(tokens, ranks)
        assert sorted(number for share in shares for number in share) == list(range(count))
        assert all(share == sorted(share) for share in shares) and shares == split(tokens, ranks)
        loads = [sum(tokens[number] for number in share) for share in shares]
        assert max(loads) - min(loads) <= max(tokens), "the rank with most has at most one sequence more"


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_batch_adds_nothing_to_any_loss(name):
    batch = empty_batch()
    new = torch.zeros(0, requires_grad=True)
    tokens = ScoredTokens(new, new.detach(), batch.rollout, batch.advantages, batch.weights, batch.sequences, new)
    value, sums = compute_loss(tokens, LossSettings(name=name, kl_beta=0.1))
    value.backward()
    assert float(value.detach()) == 0.0 and new.grad is not None
    assert (sums.loss, sums.trained_tokens, sums.gap_max) == (0.0, 0, 0.0)
