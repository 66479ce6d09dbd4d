"""Predicted lengths of trajectories and answers, learned from those that ended."""

from __future__ import annotations

import math
import random

import pytest

from rose.core.lengths import Answers, Lengths


def test_nothing_is_predicted_before_some_have_finished() -> None:
    lengths = Lengths()
    assert lengths.remaining("g", 0) is None
    for _ in range(8):
        lengths.on_finished("g", 100)
    assert lengths.remaining("g", 0) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("alike, expected", [(0.0, 0.0), (0.5, 0.5), (0.9, 0.9)])
def test_likeness_of_groups_is_learned(alike: float, expected: float) -> None:
    chance, lengths = random.Random(3), Lengths()
    for group in range(200):
        shared = chance.gauss(0, 1)
        for _ in range(8):
            value = 7 + math.sqrt(alike) * shared + math.sqrt(1 - alike) * chance.gauss(0, 1)
            lengths.on_finished(f"{group}", int(math.exp(value)))
    assert lengths.likeness == pytest.approx(expected, abs=0.1)


def test_finished_siblings_inform_and_long_ones_are_expected_to_continue() -> None:
    chance, lengths = random.Random(3), Lengths()
    for group in range(50):
        for _ in range(8):
            lengths.on_finished(f"{group}", int((5000 if group % 2 else 300) * chance.lognormvariate(0, 0.2)))
    short, long, unknown = (lengths.remaining(group, 0) for group in ("0", "1", "another"))
    assert short is not None and long is not None and unknown is not None
    assert short < 600 < unknown < long and long > 3500
    late = [lengths.remaining("0", done) for done in (0, 300, 3000, 10**9)]
    assert all(value is not None and value > 0 for value in late) and late[2] > late[1]  # type: ignore[operator]


def test_answers_count_as_max_tokens_until_some_are_known() -> None:
    answers = Answers()
    assert (answers.mean(500), answers.high(500)) == (500.0, 500)
    for number in range(1000):
        answers.add(number % 100)
    assert answers.mean(500) == pytest.approx(49.5, abs=3) and 90 <= answers.high(500) <= 99
    assert (answers.mean(20), answers.high(20)) == (20, 20)
