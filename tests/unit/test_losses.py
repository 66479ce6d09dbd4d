"""Losses and advantages against values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rose.errors import ConfigError
from rose.train.advantages import group_advantages
from rose.train.losses import LOSSES, Loss, ScoredTokens, by_sequence, by_token, compute_loss, find_loss
from rose.train.settings import LossSettings

GRPO = LossSettings(name="grpo", clip_low=0.2, clip_high=0.28)
DAPO = LossSettings(name="dapo", clip_low=0.2, clip_high=0.28)


def tokens(ratios, advantages, importance=None, weights=None, sequences=None):
    """Tokens with the given new / old and old / rollout probabilities; the old probability is a half."""
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
    )


def test_advantages_by_hand():
    # mean 0.25, differences -0.25 -0.25 -0.25 0.75, variance (3/16 + 9/16) / 3 = 1/4, spread 0.5
    found = group_advantages([0.0, 0.0, 0.0, 1.0])
    assert found == pytest.approx([-0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, 0.75 / 0.5001])
    assert group_advantages([0.0, 0.0, 0.0, 1.0], "none") == pytest.approx([-0.25, -0.25, -0.25, 0.75])
    assert group_advantages([2.0, 2.0]) == [0.0, 0.0]
    assert sum(group_advantages([0.3, -0.1, 1.0, 0.9])) == pytest.approx(0.0)


def test_grpo_by_hand():
    # Clipped to [0.8, 1.2]:
    #   ratio 1.5, A +2: min(3.0, 2.4) = 2.4, clipped    ratio 0.5, A +2: min(1.0, 1.6) = 1.0
    #   ratio 1.5, A -1: min(-1.5, -1.2) = -1.5          ratio 0.5, A -1: min(-0.5, -0.8) = -0.8, clipped
    given = tokens([1.5, 0.5, 1.5, 0.5], [2.0, 2.0, -1.0, -1.0])
    found = compute_loss(given, GRPO)
    assert found.value.item() == pytest.approx(-(2.4 + 1.0 - 1.5 - 0.8) / 4)
    assert found.clipped == 2
    found.value.backward()
    # d(ratio)/d(new) = ratio; clipped tokens have no gradient.
    assert given.new.grad.tolist() == pytest.approx([0.0, -0.5 * 2 / 4, 1.5 / 4, 0.0])


def test_dapo_clips_later_upwards():
    given = tokens([1.25, 1.5], [1.0, 1.0])
    assert compute_loss(given, DAPO).value.item() == pytest.approx(-(1.25 + 1.28) / 2)
    assert compute_loss(given, GRPO).value.item() == pytest.approx(-(1.2 + 1.2) / 2)


def test_importance_is_truncated_and_has_no_gradient():
    given = tokens([1.0, 1.0, 1.0], [1.0, 1.0, -1.0], importance=[3.0, 0.5, 1.0])
    found = compute_loss(given, DAPO)
    assert found.value.item() == pytest.approx(-(2.0 * 1 + 0.5 * 1 + 1.0 * -1) / 3)
    assert (found.truncated, found.importance_sum) == (1, pytest.approx(4.5))
    found.value.backward()
    assert given.new.grad.tolist() == pytest.approx([-2 / 3, -0.5 / 3, 1 / 3])


def test_weights_of_tokens():
    # Two trajectories of 1 and 3 tokens: by sequence each counts a half, by token a quarter per token.
    assert by_sequence([1, 3]) == pytest.approx([1 / 2, 1 / 6])
    assert by_token([1, 3]) == pytest.approx([1 / 4, 1 / 4])


@pytest.mark.parametrize("name, expected", [("grpo", -(1.0 / 2 - 1.0 / 2)), ("dapo", -(1.0 - 3.0) / 4)])
def test_a_long_and_a_short_trajectory(name, expected):
    short, long = LOSSES[name].weigh([1, 3])
    given = tokens([1.0] * 4, [1.0, -1.0, -1.0, -1.0], weights=[short, long, long, long], sequences=[0, 1, 1, 1])
    assert compute_loss(given, LossSettings(name=name)).value.item() == pytest.approx(expected)


def test_parts_of_a_batch_add_up():
    whole = tokens([1.1, 0.9, 1.4, 0.7], [1.0, -1.0, 0.5, -2.0])
    parts = [
        ScoredTokens(*(getattr(whole, name)[part] for name in ScoredTokens.__slots__))
        for part in (slice(0, 1), slice(1, 4))
    ]
    added = sum(compute_loss(part, DAPO).value.item() for part in parts)
    assert compute_loss(whole, DAPO).value.item() == pytest.approx(added)


def test_a_sequence_ratio_is_one_more_row(monkeypatch):
    """GSPO: the geometric mean of a sequence's ratios stands for each of its tokens."""

    def sequence_ratio(given: ScoredTokens) -> torch.Tensor:
        difference = given.new - given.old
        rows = int(given.sequences.max()) + 1
        sums = torch.zeros(rows, dtype=difference.dtype).index_add(0, given.sequences, difference)
        counts = torch.bincount(given.sequences, minlength=rows)
        return (sums / counts).exp()[given.sequences]

    row = replace(LOSSES["grpo"], ratio=sequence_ratio)
    monkeypatch.setitem(LOSSES, "gspo", row)
    given = tokens([1.21, 1.0, 0.9], [1.0, 1.0, 1.0], sequences=[0, 0, 1])
    found = compute_loss(given, LossSettings(name="gspo"))
    assert found.value.item() == pytest.approx(-(1.1 + 1.1 + 0.9) / 3)


def test_a_weight_that_is_clipped_is_one_more_row(monkeypatch):
    """CISPO: the ratio, clipped and without gradient, weighs the log-probability."""

    def clipped_weight(ratio, given, clipping):
        return ratio.detach().clamp(max=1 + clipping.high) * given.advantages * given.new

    monkeypatch.setitem(LOSSES, "cispo", replace(LOSSES["dapo"], surrogate=clipped_weight))
    given = tokens([2.0, 0.5], [1.0, 1.0])
    compute_loss(given, LossSettings(name="cispo", clip_high=0.5)).value.backward()
    assert given.new.grad.tolist() == pytest.approx([-1.5 / 2, -0.5 / 2]), "no token's gradient is cut off"


def test_an_unknown_loss_names_the_nearest():
    assert isinstance(find_loss("dapo"), Loss)
    with pytest.raises(ConfigError, match="did you mean grpo"):
        find_loss("gropo")
