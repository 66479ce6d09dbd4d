"""Trajectories as micro-batches of tensors.

Rows are sorted by length, so that they are padded little, and padded on the right, so that causal attention needs no
mask. A micro-batch is bounded in rows and in tokens: on a CPU a batch that leaves the caches is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rose.core.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory with its advantage, and the weight of each of its tokens in the batch's loss."""

    trajectory: Trajectory
    advantage: float
    token_weight: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of a few rows: `token_ids` and `scored` are (rows, length), the rest has one entry per scored token."""

    token_ids: Tensor
    scored: Tensor
    rollout: Tensor
    advantages: Tensor
    weights: Tensor
    sequences: Tensor

    def to(self, device: str) -> MicroBatch:
        return MicroBatch(*(getattr(self, field.name).to(device) for field in fields(self)))


def micro_batches(samples: Sequence[Sample], rows_max: int, tokens_max: int) -> list[MicroBatch]:
    """Return all samples in bounded micro-batches, shortest first; a sample alone may be longer."""
    return [collate(batch) for batch in bounded(samples, rows_max, tokens_max)]


def bounded(samples: Sequence[Sample], rows_max: int, tokens_max: int) -> list[list[Sample]]:
    """Return the samples of each micro-batch."""
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: len(sample.trajectory.token_ids)):
        rows = len(batches[-1]) + 1 if batches else 1
        if not batches or rows > rows_max or rows * len(sample.trajectory.token_ids) > tokens_max:
            batches.append([])
        batches[-1].append(sample)
    return batches


def split(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the sequences of each rank, by number, in order: each once, and the ranks' tokens about equal.

    The longest sequences are dealt first, each to the rank with the fewest tokens so far.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for number in sorted(range(len(tokens)), key=lambda number: (-tokens[number], number)):
        rank = min(range(ranks), key=lambda rank: (load[rank], rank))
        shares[rank].append(number)
        load[rank] += tokens[number]
    return [sorted(share) for share in shares]


def empty_batch() -> MicroBatch:
    """Return a micro-batch that scores no token: a rank computes it while others have one more than itself."""
    none = torch.zeros(0)
    return MicroBatch(
        token_ids=torch.zeros(1, 2, dtype=torch.long),
        scored=torch.zeros(1, 2, dtype=torch.bool),
        rollout=none,
        advantages=none,
        weights=none,
        sequences=none.long(),
    )


def collate(samples: Sequence[Sample]) -> MicroBatch:
    length = max(len(sample.trajectory.token_ids) for sample in samples)
    token_ids = torch.zeros(len(samples), length, dtype=torch.long)
    scored = torch.zeros(len(samples), length, dtype=torch.bool)
    rollout: list[float] = []
    for row, sample in enumerate(samples):
        trajectory = sample.trajectory
        token_ids[row, : len(trajectory.token_ids)] = torch.tensor(trajectory.token_ids)
        scored[row, : len(trajectory.token_ids)] = torch.tensor(trajectory.loss_mask)
        rollout += [value for value, is_own in zip(trajectory.logprobs, trajectory.loss_mask) if is_own]
    sequences = scored.nonzero()[:, 0]
    return MicroBatch(
        token_ids=token_ids,
        scored=scored,
        rollout=torch.tensor(rollout),
        advantages=torch.tensor([sample.advantage for sample in samples])[sequences],
        weights=torch.tensor([sample.token_weight for sample in samples])[sequences],
        sequences=sequences,
    )
