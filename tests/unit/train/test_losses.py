"""Losses and advantages against values computed by hand."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from rose.errors import ConfigError
from rose.train.losses import LOSSES, Loss, ScoredTokens, by_sequence, by_token, compute_loss, find_loss
from rose.train.train_settings import LossSettings

GRPO = LossSettings(name="grpo", clip_low=0.2, clip_high=0.28)
DAPO = LossSettings(name="dapo", clip_low=0.2, clip_high=0.28)


def tokens(ratios, advantages, importance=None, weights=None, sequences=None, reference=None):
    """Tokens with the given new / old, old / rollout and reference / new probabilities; the old one is a half."""
    count = len(ratios)
    old = torch.full((count,), math.log(0.5), dtype=torch.float64)
    new = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    rollout = old - torch.tensor(importance or [1.0] * count, dtype=torch.float64).log()
    return ScoredTokens(
        new=new,
        old=old,
        rollout=rollout,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights or [1.0 / count] * count, dtype=torch.float64),
        sequences=torch.tensor(sequences or [0] * count),
        reference=None if reference is None else new.detach() + torch.tensor(reference, dtype=torch.float64).log(),
    )


def test_grpo_by_hand():
    # Clipped to [0.8, 1.2]:
    #   ratio 1.5, A +2: min(3.0, 2.4) = 2.4, clipped    ratio 0.5, A +2: min(1.0, 1.6) = 1.0
    #   ratio 1.5, A -1: min(-1.5, -1.2) = -1.5          ratio 0.5, A -1: min(-0.5, -0.8) = -0.8, clipped
    given = tokens([1.5, 0.5, 1.5, 0.5], [2.0, 2.0, -1.0, -1.0])
    value, found = compute_loss(given, GRPO)
    assert value.item() == pytest.approx(-(2.4 + 1.0 - 1.5 - 0.8) / 4)
    assert found.clipped == 2
    value.backward()
    # d(ratio)/d(new) = ratio; clipped tokens have no gradient.
    assert given.new.grad.tolist() == pytest.approx([0.0, -0.5 * 2 / 4, 1.5 / 4, 0.0])


def test_dapo_clips_higher_upwards():
    given = tokens([1.25, 1.5], [1.0, 1.0])
    assert compute_loss(given, DAPO)[0].item() == pytest.approx(-(1.25 + 1.28) / 2)
    assert compute_loss(given, GRPO)[0].item() == pytest.approx(-(1.2 + 1.2) / 2)


def test_importance_is_truncated_and_has_no_gradient():
    given = tokens([1.0, 1.0, 1.0], [1.0, 1.0, -1.0], importance=[3.0, 0.5, 1.0])
    value, found = compute_loss(given, replace(DAPO, stops_drifted=False))
    assert value.item() == pytest.approx(-(2.0 * 1 + 0.5 * 1 + 1.0 * -1) / 3)
    assert (found.truncated, found.importance) == (1, pytest.approx(4.5))
    value.backward()
    assert given.new.grad.tolist() == pytest.approx([-2 / 3, -0.5 / 3, 1 / 3])


def test_weights_of_tokens():
    # Two trajectories of 1 and 3 tokens: by sequence each counts a half, by token a quarter per token.
    assert by_sequence([1, 3]) == pytest.approx([1 / 2, 1 / 6])
    assert by_token([1, 3]) == pytest.approx([1 / 4, 1 / 4])


@pytest.mark.parametrize("name, expected", [("grpo", -(1.0 / 2 - 1.0 / 2)), ("dapo", -(1.0 - 3.0) / 4)])
def test_a_long_and_a_short_trajectory(name, expected):
    short, long = LOSSES[name].weigh([1, 3])
    given = tokens([1.0] * 4, [1.0, -1.0, -1.0, -1.0], weights=[short, long, long, long], sequences=[0, 1, 1, 1])
    assert compute_loss(given, LossSettings(name=name))[0].item() == pytest.approx(expected)


@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_batch_add_up(name):
    whole = tokens([1.1, 0.9, 1.4, 0.7], [1.0, -1.0, 0.5, 0.5], sequences=[0, 1, 2, 2], reference=[1.0, 2.0, 0.5, 1.0])
    settings = LossSettings(name=name, kl_beta=0.1)
    added = sum(compute_loss(part, settings)[0].item() for part in (_part(whole, 0, 1), _part(whole, 1, 4)))
    assert compute_loss(whole, settings)[0].item() == pytest.approx(added)


def _part(whole: ScoredTokens, begin: int, end: int) -> ScoredTokens:
    found = {field.name: getattr(whole, field.name)[begin:end] for field in fields(whole)}
    return ScoredTokens(**found | {"sequences": found["sequences"] - found["sequences"][0]})


def test_gspo_by_hand():
    """The geometric mean of a sequence's ratios stands for each of its tokens, and is clipped as one."""
    # Sequence 0: sqrt(1.21 x 1) = 1.1, clipped to 1.05 where that is less; sequence 1: 0.9, clipped to 0.98 likewise.
    settings = LossSettings(name="gspo", sequence_clip_low=0.02, sequence_clip_high=0.05)
    weights = [1 / 4, 1 / 4, 1 / 2]
    given = tokens([1.21, 1.0, 0.9], [2.0, 2.0, 1.0], sequences=[0, 0, 1], weights=weights)
    value, found = compute_loss(given, settings)
    assert value.item() == pytest.approx(-(1.05 * 2.0 + 0.9 * 1.0) / 2), "the mean over sequences"
    assert found.clipped == 2, "both tokens of the first"
    value.backward()
    assert given.new.grad.tolist() == pytest.approx([0.0, 0.0, -0.9 / 2])
    given = tokens([1.21, 1.0, 0.9], [-2.0, -2.0, -1.0], sequences=[0, 0, 1], weights=weights)
    compute_loss(given, settings)[0].backward()
    # d(mean ratio)/d(new of a token) = ratio / 2 for each of the two, times the weight of both tokens.
    assert given.new.grad.tolist() == pytest.approx([1.1 * 2 / 4, 1.1 * 2 / 4, 0.0])


def test_cispo_by_hand():
    """The ratio is a weight without gradient; no token is cut off, however far it has gone."""
    settings = LossSettings(name="cispo", weight_max=1.5)
    given = tokens([2.0, 0.5, 2.0], [1.0, 1.0, -1.0])
    value, found = compute_loss(given, settings)
    logprobs = [math.log(0.5 * ratio) for ratio in (2.0, 0.5, 2.0)]
    assert value.item() == pytest.approx(-(1.5 * logprobs[0] + 0.5 * logprobs[1] - 1.5 * logprobs[2]) / 3)
    assert found.clipped == 1
    value.backward()
    assert given.new.grad.tolist() == pytest.approx([-1.5 / 3, -0.5 / 3, 1.5 / 3])


def test_a_sequence_far_from_what_the_engine_reported_has_no_loss():
    # Geometric means of old / rollout: sqrt(4 x 1) = 2, sqrt(0.5 x 2) = 1, 0.4.
    importance = [4.0, 1.0, 0.5, 2.0, 0.4]
    given = tokens([1.0] * 5, [1.0] * 5, importance, weights=[1.0] * 5, sequences=[0, 0, 1, 1, 2])
    limits = {"sequence_importance_max": 1.9, "importance_max": 1.5}
    settings = LossSettings(sequence_importance_min=0.5, **limits, stops_drifted=False)
    value, found = compute_loss(given, settings)
    assert value.item() == pytest.approx(-(0.5 + 1.5)), "and what is kept is truncated by the token"
    assert (found.left_out, found.truncated) == (3, 2)
    value.backward()
    assert given.new.grad.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.5, 0.0])
    _, kept = compute_loss(given, LossSettings(sequence_importance_min=0.5, sequence_importance_max=0.0))
    assert kept.left_out == 0, "0 keeps all"


def test_stale_tokens_are_corrected_twice_over():
    """Three sequences drawn by older weights, which push them as far as the weights of importance say.

    Sequence 0, old / rollout 3 and 1/2: the mean is sqrt(1.5) = 1.22, and it stays; its first token counts 2, not 3.
    Sequence 1, 1/4 and 1/2: the mean is sqrt(1/8) = 0.35, and it is left out. Sequence 2, 1 and 1: nothing to correct.
    """
    importance = [3.0, 0.5, 0.25, 0.5, 1.0, 1.0]
    given = tokens([1.0] * 6, [1.0] * 6, importance, weights=[1.0] * 6, sequences=[0, 0, 1, 1, 2, 2])
    value, found = compute_loss(given, LossSettings(stops_drifted=False))
    assert value.item() == pytest.approx(-(2.0 + 0.5 + 1.0 + 1.0))
    assert (found.truncated, found.left_out, found.clipped, found.drifted) == (1, 2, 0, 0)
    value.backward()
    assert given.new.grad.tolist() == pytest.approx([-2.0, -0.5, 0.0, 0.0, -1.0, -1.0])


@pytest.mark.parametrize(
    "name, counts",
    [
        pytest.param("grpo", [1, 0, 0, 0, 1, 1, 0, 1], id="grpo"),
        pytest.param("dapo", [1, 1, 0, 0, 1, 1, 0, 1], id="dapo: later upwards"),
        pytest.param("gspo", [1, 1, 0, 0, 1, 1, 0, 1], id="gspo: by the token too"),
        pytest.param("cispo", [1] * 8, id="cispo cuts nobody off"),
    ],
)
def test_a_drifted_token_is_pushed_no_further(name, counts):
    """Where it has gone the other way, it may come back."""
    importance = [1.1, 1.25, 1.3, 1.9, 0.5, 0.9, 0.7, 1.9]
    advantages = [1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    given = tokens([1.0] * 8, advantages, importance, weights=[1.0] * 8)
    value, found = compute_loss(given, LossSettings(name=name, sequence_importance_max=0.0))
    assert found.drifted == 8 - sum(counts)
    value.backward()
    expected = [-i * a * c for i, a, c in zip(importance, advantages, counts)]
    if name == "gspo":  # one ratio stands for all: what is left is shared
        expected = [sum(expected) / 8] * 8
    assert given.new.grad.tolist() == pytest.approx(expected)


def test_a_token_is_judged_by_where_the_batch_began():
    """What the batch's own updates do to it is left to the clipping of the ratio."""
    given = tokens([1.25], [1.0], importance=[1.25], weights=[1.0])
    value, found = compute_loss(given, DAPO)
    assert (found.drifted, found.clipped) == (0, 0)
    assert value.item() == pytest.approx(-1.25 * 1.25)


def test_divergence_from_the_reference_by_hand():
    # r - log r - 1 with r = reference / new: 0 at 1, 1 - log 2 at 2, log 2 - 0.5 at a half.
    given = tokens([1.0] * 3, [0.0] * 3, reference=[1.0, 2.0, 0.5])
    value, found = compute_loss(given, LossSettings(kl_beta=0.3, kl_is_unbiased=False))
    expected = (1 - math.log(2)) + (math.log(2) - 0.5)
    assert found.reference_divergence == pytest.approx(expected)
    assert value.item() == pytest.approx(0.3 * expected / 3)
    value.backward()
    assert given.new.grad.tolist() == pytest.approx([0.0, 0.3 * (1 - 2) / 3, 0.3 * (1 - 0.5) / 3])


def test_the_gradient_of_the_divergence_is_right_on_average():
    # d(ratio x k3)/d(new) at a ratio of 1 is k3 + 1 - r = -log r, whose mean is the gradient of the divergence itself.
    given = tokens([1.0] * 3, [0.0] * 3, reference=[1.0, 2.0, 0.5])
    value, _ = compute_loss(given, LossSettings(kl_beta=0.3))
    assert value.item() == pytest.approx(0.3 * 0.5 / 3), "the value is the same"
    value.backward()
    assert given.new.grad.tolist() == pytest.approx([0.0, -0.1 * math.log(2), 0.1 * math.log(2)])
    # A token that has become twice as likely counts twice.
    given = tokens([2.0], [0.0], reference=[2.0])
    assert compute_loss(given, LossSettings(kl_beta=1.0))[0].item() == pytest.approx(2 * (1 - math.log(2)))


def test_the_gap_between_trainer_and_engine():
    _, found = compute_loss(tokens([1.0] * 3, [1.0] * 3, importance=[1.0, 2.0, 0.5]), DAPO)
    assert found.gap == pytest.approx(2 * math.log(2)) and found.gap_max == pytest.approx(math.log(2))
    assert found.rollout_divergence == pytest.approx(0.5)


def test_an_unknown_loss_names_the_nearest():
    assert isinstance(find_loss("dapo"), Loss)
    with pytest.raises(ConfigError, match="did you mean grpo"):
        find_loss("gropo")
