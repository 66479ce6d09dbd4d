"""Losses of group-relative policy optimisation, as rows of a table.

A loss is made of three choices: what the probability ratio is taken over (a token, or later a sequence: GSPO), what
is maximised given ratio and advantage (PPO's clipped product, or later CISPO's clipped weight), and how tokens are
averaged.

    loss = - sum over tokens of  weight x importance x surrogate(ratio, advantage)

Three log-probabilities of a token are at play. *new*: the weights being changed. *old*: the trainer's weights when
the batch began; ratio = new / old, and clipping keeps one batch from moving the model too far. *rollout*: what the
engine reported when it drew the token, under its own arithmetic and perhaps older weights. importance = old /
rollout corrects for that difference, truncated from above so that no single token rules a batch.

With one update per batch new equals old, the ratio is 1 with the gradient of the log-probability, and nothing is
clipped.

    grpo   clipped alike on both sides; every trajectory weighs the same, however long it is
    dapo   clipped later upwards than downwards, which keeps rare good tokens alive; every token weighs the same
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


@dataclass(frozen=True, slots=True)
class LossResult:
    """`value` has the gradient; the sums are over the micro-batch's tokens."""

    value: Tensor
    importance_sum: float
    truncated: int
    clipped: int


def token_ratio(tokens: ScoredTokens) -> Tensor:
    return (tokens.new - tokens.old).exp()


def clipped_product(ratio: Tensor, tokens: ScoredTokens, clipping: Clipping) -> Tensor:
    """PPO: never more to gain than at the edge of the clipping range."""
    inside = ratio.clamp(1 - clipping.low, 1 + clipping.high)
    return torch.minimum(ratio * tokens.advantages, inside * tokens.advantages)


def by_sequence(lengths: Sequence[int]) -> list[float]:
    """The mean over sequences of the mean over their tokens."""
    return [1 / (len(lengths) * length) for length in lengths]


def by_token(lengths: Sequence[int]) -> list[float]:
    """The mean over all tokens."""
    return [1 / sum(lengths)] * len(lengths)


LOSSES: dict[str, Loss] = {
    "grpo": Loss(token_ratio, clipped_product, by_sequence, lambda s: Clipping(s.clip_low, s.clip_low)),
    "dapo": Loss(token_ratio, clipped_product, by_token, lambda s: Clipping(s.clip_low, s.clip_high)),
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
    importance = (tokens.old - tokens.rollout).exp().detach()
    truncated = importance.clamp(max=settings.importance_max)
    value = -(tokens.weights * truncated * loss.surrogate(ratio, tokens, clipping)).sum()
    return LossResult(
        value=value,
        importance_sum=float(importance.sum()),
        truncated=int((importance > settings.importance_max).sum()),
        clipped=int(_is_clipped(ratio.detach(), tokens.advantages, clipping).sum()),
    )


def _is_clipped(ratio: Tensor, advantages: Tensor, clipping: Clipping) -> Tensor:
    """Tokens whose gradient clipping has cut off."""
    up = (ratio > 1 + clipping.high) & (advantages > 0)
    down = (ratio < 1 - clipping.low) & (advantages < 0)
    return up | down
