"""Losses of group-relative policy optimisation, as rows of a table (docs/trainer.md compares them).

    loss = - sum over tokens of  weight x importance x surrogate(ratio, advantage)
           + kl_beta x sum over tokens of  weight x ratio x divergence(reference, new)

A token has four log-probabilities: *new*, of the weights being changed; *old*, of the trainer's weights when the batch
began (ratio = new / old); *rollout*, reported by the engine (importance = old / rollout, truncated); and *reference*,
of the model the job began with. Clipping looks at the ratio, which is 1 with one update per batch and so misses what
several batches from the same weights do together. The drift guard does not: a token whose old / rollout probability
is already outside the clipping range, on the side its advantage pushes it to, is pushed no further.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rose.errors import ConfigError
from rose.train.train_settings import LossSettings


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The tokens the model wrote, one entry each; `sequences` counts the micro-batch's sequences from 0."""

    new: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    weights: Tensor
    sequences: Tensor
    reference: Tensor | None = None


@dataclass(slots=True)
class LossSums:
    """Sums over the trained tokens of micro-batches."""

    loss: float = 0.0
    entropy: float = 0.0
    importance: float = 0.0
    gap: float = 0.0  # |old - rollout|, in nats
    gap_max: float = 0.0
    rollout_divergence: float = 0.0  # of the trainer's distribution from the engine's
    reference_divergence: float = 0.0
    truncated: int = 0
    left_out: int = 0  # with their sequences
    clipped: int = 0
    drifted: int = 0
    trained_tokens: int = 0
    computed_tokens: int = 0  # context and padding included

    def add(self, other: LossSums) -> None:
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(ours, theirs) if field.name == "gap_max" else ours + theirs)

    def report_fields(self) -> dict[str, Any]:
        """Return the fields of a step's report; means and shares are over the trained tokens."""
        tokens = max(1, self.trained_tokens)
        return {
            "trained_tokens": self.trained_tokens,
            "computed_tokens": self.computed_tokens,
            "loss": self.loss,
            "entropy": self.entropy / tokens,
            "importance_mean": self.importance / tokens,
            "truncated_share": self.truncated / tokens,
            "left_out_share": self.left_out / tokens,
            "clipped_share": self.clipped / tokens,
            "drifted_share": self.drifted / tokens,
            "logprob_gap_mean": self.gap / tokens,
            "logprob_gap_max": self.gap_max,
            "rollout_kl": self.rollout_divergence / tokens,
            "reference_kl": self.reference_divergence / tokens,
        }


@dataclass(frozen=True, slots=True)
class ClipRange:
    """How far below and above 1 a ratio counts."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Loss:
    """One row of the table."""

    ratio: Callable[[ScoredTokens], Tensor]
    surrogate: Callable[[Tensor, ScoredTokens, ClipRange], Tensor]
    weigh: Callable[[Sequence[int]], list[float]]  # tokens of each sequence -> the weight of each of its tokens
    clip_range: Callable[[LossSettings], ClipRange]
    drift_range: Callable[[LossSettings], ClipRange] | None  # how far a token may have drifted since it was drawn


def token_ratio(tokens: ScoredTokens) -> Tensor:
    return (tokens.new - tokens.old).exp()


def sequence_ratio(tokens: ScoredTokens) -> Tensor:
    """Return the geometric mean over each sequence, for each of its tokens."""
    return sequence_means(tokens.new - tokens.old, tokens.sequences).exp()[tokens.sequences]


def sequence_means(values: Tensor, sequences: Tensor) -> Tensor:
    counts = torch.bincount(sequences)
    return torch.zeros(len(counts), dtype=values.dtype).index_add(0, sequences, values) / counts


def clipped_product(ratio: Tensor, tokens: ScoredTokens, clip: ClipRange) -> Tensor:
    """Return PPO's surrogate: no more to gain than at the edge of the clipping range."""
    inside = ratio.clamp(1 - clip.low, 1 + clip.high)
    return torch.minimum(ratio * tokens.advantages, inside * tokens.advantages)


def clipped_weight(ratio: Tensor, tokens: ScoredTokens, clip: ClipRange) -> Tensor:
    """Return CISPO's surrogate: the gradient of the log-probability, weighted by the clipped ratio."""
    return ratio.detach().clamp(1 - clip.low, 1 + clip.high) * tokens.advantages * tokens.new


def divergence(log_ratio: Tensor) -> Tensor:
    """Return Schulman's k3 estimate per token, r - log r - 1: never negative, and right on average."""
    return log_ratio.exp() - log_ratio - 1


def by_sequence(lengths: Sequence[int]) -> list[float]:
    """Return weights for the mean over sequences of the mean over their tokens."""
    return [1 / (len(lengths) * length) for length in lengths]


def by_token(lengths: Sequence[int]) -> list[float]:
    """Return weights for the mean over all tokens."""
    return [1 / sum(lengths)] * len(lengths)


def symmetric_range(settings: LossSettings) -> ClipRange:
    return ClipRange(settings.clip_low, settings.clip_low)


def clip_higher_range(settings: LossSettings) -> ClipRange:
    return ClipRange(settings.clip_low, settings.clip_high)


def sequence_range(settings: LossSettings) -> ClipRange:
    return ClipRange(settings.sequence_clip_low, settings.sequence_clip_high)


def weight_range(settings: LossSettings) -> ClipRange:
    return ClipRange(1.0, settings.weight_max - 1)


LOSSES: dict[str, Loss] = {
    "grpo": Loss(token_ratio, clipped_product, by_sequence, symmetric_range, symmetric_range),
    "dapo": Loss(token_ratio, clipped_product, by_token, clip_higher_range, clip_higher_range),
    "gspo": Loss(sequence_ratio, clipped_product, by_sequence, sequence_range, clip_higher_range),
    "cispo": Loss(token_ratio, clipped_weight, by_token, weight_range, None),
}


def find_loss(name: str) -> Loss:
    """Return the loss of this name, or raise a ConfigError that names the nearest one."""
    if name in LOSSES:
        return LOSSES[name]
    near = difflib.get_close_matches(name, LOSSES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"there is no loss {name!r}", hint=f"{hint}there are {', '.join(LOSSES)}")


def compute_loss(tokens: ScoredTokens, settings: LossSettings) -> tuple[Tensor, LossSums]:
    """Return the micro-batch's part of the batch's loss, with its gradient, and its sums. Parts add up."""
    loss = find_loss(settings.name)
    clip = loss.clip_range(settings)
    ratio = loss.ratio(tokens)
    gap = (tokens.old - tokens.rollout).detach()
    importance = gap.exp()
    truncated = importance.clamp(max=settings.importance_max)
    sums = LossSums(
        importance=float(importance.sum()),
        gap=float(gap.abs().sum()),
        gap_max=float(gap.abs().max()) if len(gap) else 0.0,
        rollout_divergence=float(divergence(gap).sum()),
        truncated=int((importance > settings.importance_max).sum()),
        clipped=int(_is_clipped(ratio.detach(), tokens.advantages, clip).sum()),
        trained_tokens=len(tokens.new),
    )
    if settings.sequence_importance_max:
        # Leave out sequences that the trainer finds too much likelier or unlikelier than the engine did.
        means = sequence_means(gap, tokens.sequences).exp()
        is_out = (means < settings.sequence_importance_min) | (means > settings.sequence_importance_max)
        left_out = is_out[tokens.sequences]
        truncated, sums.left_out = truncated.masked_fill(left_out, 0.0), int(left_out.sum())
    if settings.stops_drifted and loss.drift_range is not None:
        has_drifted = _is_clipped(importance, tokens.advantages, loss.drift_range(settings))
        truncated, sums.drifted = truncated.masked_fill(has_drifted, 0.0), int(has_drifted.sum())
    value = -(tokens.weights * truncated * loss.surrogate(ratio, tokens, clip)).sum()
    if tokens.reference is not None:
        away = divergence(tokens.reference - tokens.new)
        # The gradient of k3 is right on average only with the ratio, which has one even where it is 1 (DeepSeek-V3.2).
        weights = tokens.weights * ratio if settings.kl_is_unbiased else tokens.weights
        value = value + settings.kl_beta * (weights * away).sum()
        sums.reference_divergence = float(away.detach().sum())
    sums.loss = float(value.detach())
    return value, sums


def _is_clipped(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Return which tokens are beyond the range on the side that they are pushed to."""
    up = (ratio > 1 + clip.high) & (advantages > 0)
    down = (ratio < 1 - clip.low) & (advantages < 0)
    return up | down
