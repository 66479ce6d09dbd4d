"""The record of an episode: one entry per token in every sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.core.trajectory import NO_VERSION, Trajectory

EPISODE = Trajectory(
    "t", "g", (1, 2, 3, 4, 5), (False, True, True, False, True), (0.0, -0.1, -0.2, 0.0, -0.3),
    (NO_VERSION, "7", "7", NO_VERSION, "8"), 1.0,
)  # fmt: skip


def test_only_generated_tokens_count_and_carry_a_version() -> None:
    assert EPISODE.generated_tokens == 3
    assert EPISODE.versions_used() == ("7", "8")


def test_versions_are_in_order_of_appearance_and_named_once() -> None:
    assert replace(EPISODE, versions=("9", "8", "9", "10", "8")).versions_used() == ("9", "8", "10")


@pytest.mark.parametrize("sequence", ["token_ids", "loss_mask", "logprobs", "versions"])
def test_a_sequence_of_another_length_is_a_bug(sequence: str) -> None:
    with pytest.raises(AssertionError, match="trajectory t has sequences of lengths"):
        replace(EPISODE, **{sequence: getattr(EPISODE, sequence)[:-1]})
