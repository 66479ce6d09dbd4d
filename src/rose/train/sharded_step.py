"""A step of learning on several ranks.

Every rank gets the whole batch, and computes advantages and weights of tokens from it: so the loss is normalised over
the batch, not over a rank's share, and any number of ranks has the same gradient up to rounding. Each then computes its
share of the sequences (`batch.split`), and gradients and figures are summed. A rank whose share has fewer micro-batches
computes empty ones, because gathering weights takes all ranks. What decides about a step (loss, length of the gradient,
finite or not) is the same number on every rank, so all decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from rose.train.batch import MicroBatch, Sample, bounded, collate, empty_batch, split
from rose.train.losses import LossSums
from rose.train.module_model import own_part, whole
from rose.train.policy_model import PolicyModel, are_finite
from rose.train.ranks import Ranks, others_ended
from rose.train.step import Trainer
from rose.train.train_settings import TrainSettings


class ShardedTrainer(Trainer):
    """The trainer of one rank. Every rank calls the same methods with the same groups."""

    def __init__(self, model: PolicyModel, settings: TrainSettings, ranks: Ranks) -> None:
        super().__init__(model, settings)
        self.ranks, self.rank, self.rank_count = ranks, ranks.rank, ranks.count

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        lengths = [len(sample.trajectory.token_ids) for sample in samples]
        limits = self.settings.rows_max, self.settings.tokens_max
        planned = [
            bounded([samples[number] for number in share], *limits) for share in split(lengths, self.ranks.count)
        ]
        own = [collate(batch) for batch in planned[self.ranks.rank]]
        own += [empty_batch() for _ in range(max(map(len, planned)) - len(own))]
        return [batch.to(self.settings.device) for batch in own]

    def _accumulate(
        self, batches: Sequence[MicroBatch], old: Sequence[Tensor] | None, reference: Sequence[Tensor] | None
    ) -> LossSums:
        with others_ended():
            own = super()._accumulate(batches, old, reference)
        names = [field.name for field in fields(LossSums)]
        total = LossSums()
        for values in self.ranks.all_values([float(getattr(own, name)) for name in names]):
            kinds = [type(getattr(total, name)) for name in names]
            total.add(LossSums(**{name: kind(value) for name, kind, value in zip(names, kinds, values)}))
        return total

    def _clip(self) -> float:
        parameters, longest = self.model.parameters(), self.settings.gradient_norm_max
        with others_ended():
            return float(whole(torch.nn.utils.clip_grad_norm_(parameters, longest)))

    def _is_finite(self) -> bool:
        moments = (own_part(value) for state in self.moments().values() for value in state.values())
        return self.agree(self.model.is_finite() and are_finite(moments))

    def agree(self, is_so: bool) -> bool:
        """Return whether it is so on every rank."""
        return all(value for [value] in self.ranks.all_values([float(is_so)]))
