"""Losses of group-relative policy optimisation, as rows of a table.

A loss is made of three choices: what the probability ratio is taken over (a token or a sequence), what is maximised
given ratio and advantage (PPO's clipped product, or a log-probability with a clipped weight), and how tokens are
averaged.

    loss = - sum over tokens of  weight x importance x surrogate(ratio, advantage)
           + kl_beta x sum over tokens of  weight x ratio x divergence(reference, new)

Four log-probabilities of a token are at play. *new*: the weights being changed. *old*: the trainer's weights when
the batch began; ratio = new / old, and clipping keeps one batch from moving the model too far. *rollout*: what the
engine reported when it drew the token, under its own arithmetic and perhaps older weights. importance = old /
rollout corrects for that difference, truncated from above so that no single token rules a batch; a whole sequence
whose tokens differ too much, by their geometric mean, is left out. *reference*: the model the job began with, if the
loss is to keep near it; the divergence is estimated by r - log r - 1 with r = reference / new (Schulman's k3), which is
never negative and right on average. Its gradient is right on average only with the ratio before it, which has one of
its own even where it is 1 (DeepSeek-V3.2); `kl_is_unbiased` says whether it stands there.

With one update per batch new equals old, the ratio is 1 with the gradient of the log-probability, and its clipping
stops nothing. What several batches that were drawn from the same weights do together it does not see at all: each of
them pushes as far as one may, and a model that learns from old tokens overshoots until it has unlearnt what it knew.
So a token that has *drifted*, whose old / rollout probability is already outside the clipping range on the side that
its advantage pushes it to, is pushed no further.

    grpo   clipped alike on both sides; every trajectory weighs the same, however long it is
    dapo   clipped later upwards than downwards, which keeps rare good tokens alive; every token weighs the same
    gspo   one ratio for a whole sequence, the geometric mean of its tokens', clipped closely
    cispo  no token is cut off, drifted or not: the ratio is a weight without gradient, and it is the weight that is
           clipped
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.errors import ConfigError
from rose.train.settings import LossSettings


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Flat, one entry per token the model wrote; `sequences` says whose it is, counted from 0 in the micro-batch."""

    new: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    weights: Tensor
    sequences: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Clipping:
    low: float
    high: float


Ratio = Callable[[ScoredTokens], Tensor]
Surrogate = Callable[[Tensor, ScoredTokens, Clipping], Tensor]
Weigh = Callable[[Sequence[int]], list[float]]


@dataclass(frozen=True, slots=True)
class Loss:
    ratio: Ratio
    surrogate: Surrogate
    weigh: Weigh  # tokens of each sequence of a batch -> the weight of each of its tokens
    clipping: Callable[[LossSettings], Clipping]
    drifting: Callable[[LossSettings], Clipping] | None  # how far a token may have gone since it was drawn


@dataclass(frozen=True, slots=True)
class LossResult:
    """`value` has the gradient; sums and counts are over the micro-batch's tokens."""

    value: Tensor
    importance_sum: float
    truncated: int
    clipped: int
    left_out: int  # with their sequences
    drifted: int
    gap_sum: float  # |old - rollout|, in nats
    gap_max: float
    rollout_divergence_sum: float  # of the trainer's distribution from the one that was drawn from
    reference_divergence_sum: float


def token_ratio(tokens: ScoredTokens) -> Tensor:
    return (tokens.new - tokens.old).exp()


def sequence_ratio(tokens: ScoredTokens) -> Tensor:
    """The geometric mean over each sequence stands for each of its tokens."""
    return sequence_means(tokens.new - tokens.old, tokens.sequences).exp()[tokens.sequences]


def sequence_means(values: Tensor, sequences: Tensor) -> Tensor:
    """One per sequence."""
    counts = torch.bincount(sequences)
    sums = torch.zeros(len(counts), dtype=values.dtype).index_add(0, sequences, values)
    return sums / counts


def clipped_product(ratio: Tensor, tokens: ScoredTokens, clipping: Clipping) -> Tensor:
    """PPO: never more to gain than at the edge of the clipping range."""
    inside = ratio.clamp(1 - clipping.low, 1 + clipping.high)
    return torch.minimum(ratio * tokens.advantages, inside * tokens.advantages)


def clipped_weight(ratio: Tensor, tokens: ScoredTokens, clipping: Clipping) -> Tensor:
    """CISPO: the gradient is that of the log-probability, however far the ratio has gone."""
    return ratio.detach().clamp(1 - clipping.low, 1 + clipping.high) * tokens.advantages * tokens.new


def divergence(log_ratio: Tensor) -> Tensor:
    """Of the distribution that tokens came from, estimated per token; `log_ratio` is log other - log theirs."""
    return log_ratio.exp() - log_ratio - 1


def by_sequence(lengths: Sequence[int]) -> list[float]:
    """The mean over sequences of the mean over their tokens."""
    return [1 / (len(lengths) * length) for length in lengths]


def by_token(lengths: Sequence[int]) -> list[float]:
    """The mean over all tokens."""
    return [1 / sum(lengths)] * len(lengths)


def alike(settings: LossSettings) -> Clipping:
    return Clipping(settings.clip_low, settings.clip_low)


def later_upwards(settings: LossSettings) -> Clipping:
    return Clipping(settings.clip_low, settings.clip_high)


def closely(settings: LossSettings) -> Clipping:
    return Clipping(settings.sequence_clip_low, settings.sequence_clip_high)


def weight_only(settings: LossSettings) -> Clipping:
    return Clipping(1.0, settings.weight_max - 1)


LOSSES: dict[str, Loss] = {
    "grpo": Loss(token_ratio, clipped_product, by_sequence, alike, alike),
    "dapo": Loss(token_ratio, clipped_product, by_token, later_upwards, later_upwards),
    "gspo": Loss(sequence_ratio, clipped_product, by_sequence, closely, later_upwards),
    "cispo": Loss(token_ratio, clipped_weight, by_token, weight_only, None),
}


def find_loss(name: str) -> Loss:
    """The loss of this name, or a ConfigError that names the nearest one."""
    if name in LOSSES:
        return LOSSES[name]
    near = difflib.get_close_matches(name, LOSSES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"there is no loss {name!r}", hint=f"{hint}there are {', '.join(LOSSES)}")


def compute_loss(tokens: ScoredTokens, settings: LossSettings) -> LossResult:
    """The part of the batch's loss that this micro-batch is; parts add up."""
    loss = find_loss(settings.name)
    clipping = loss.clipping(settings)
    ratio = loss.ratio(tokens)
    gap = (tokens.old - tokens.rollout).detach()
    importance = gap.exp()
    truncated = importance.clamp(max=settings.importance_max)
    left_out = _left_out(gap, tokens.sequences, settings)
    if left_out is not None:
        truncated = truncated.masked_fill(left_out, 0.0)
    drifted = 0
    if settings.stops_drifted and loss.drifting is not None:
        has_drifted = _is_clipped(importance, tokens.advantages, loss.drifting(settings))
        truncated, drifted = truncated.masked_fill(has_drifted, 0.0), int(has_drifted.sum())
    value = -(tokens.weights * truncated * loss.surrogate(ratio, tokens, clipping)).sum()
    reference_divergence = 0.0
    if tokens.reference is not None:
        away = divergence(tokens.reference - tokens.new)
        weights = tokens.weights * ratio if settings.kl_is_unbiased else tokens.weights
        value = value + settings.kl_beta * (weights * away).sum()
        reference_divergence = float(away.detach().sum())
    return LossResult(
        value=value,
        importance_sum=float(importance.sum()),
        truncated=int((importance > settings.importance_max).sum()),
        clipped=int(_is_clipped(ratio.detach(), tokens.advantages, clipping).sum()),
        left_out=0 if left_out is None else int(left_out.sum()),
        drifted=drifted,
        gap_sum=float(gap.abs().sum()),
        gap_max=float(gap.abs().max()) if len(gap) else 0.0,
        rollout_divergence_sum=float(divergence(gap).sum()),
        reference_divergence_sum=reference_divergence,
    )


def _left_out(gap: Tensor, sequences: Tensor, settings: LossSettings) -> Tensor | None:
    """Tokens of sequences that the trainer finds too much likelier or unlikelier than the engine did."""
    if not settings.sequence_importance_max:
        return None
    means = sequence_means(gap, sequences).exp()
    is_out = (means < settings.sequence_importance_min) | (means > settings.sequence_importance_max)
    return is_out[sequences]


def _is_clipped(ratio: Tensor, advantages: Tensor, clipping: Clipping) -> Tensor:
    """Tokens beyond the range on the side that they are pushed to: clipping cuts their gradient off or, where it is a
    weight, makes it smaller."""
    up = (ratio > 1 + clipping.high) & (advantages > 0)
    down = (ratio < 1 - clipping.low) & (advantages < 0)
    return up | down
