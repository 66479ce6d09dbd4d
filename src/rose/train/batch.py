"""Trajectories cut into micro-batches of tensors.

Rows are sorted by length, so that the rows of a micro-batch are padded little, and padded on the right, so that
causal attention needs no mask. A micro-batch is bounded in rows and in tokens: on a CPU a batch that leaves the
caches is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.core.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory with its advantage, and what each of its tokens weighs in the batch's loss."""

    trajectory: Trajectory
    advantage: float
    token_weight: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`token_ids` and `scored` are (rows, length); the rest is flat, one entry per scored token, row by row."""

    token_ids: Tensor
    scored: Tensor
    rollout: Tensor
    advantages: Tensor
    weights: Tensor
    sequences: Tensor

    @property
    def tokens(self) -> int:
        return self.token_ids.numel()


def micro_batches(samples: Sequence[Sample], rows_max: int, tokens_max: int) -> list[MicroBatch]:
    """All samples, shortest first; at least one row each, however long it is."""
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: len(sample.trajectory.token_ids)):
        rows = len(batches[-1]) + 1 if batches else 1
        if not batches or rows > rows_max or rows * len(sample.trajectory.token_ids) > tokens_max:
            batches.append([])
        batches[-1].append(sample)
    return [_collate(batch) for batch in batches]


def _collate(samples: Sequence[Sample]) -> MicroBatch:
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
