"""Orders and answers of ranks, which are played one after the other in this process."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.integration.ranked_trainer import drawn_groups

from rose.core.groups import StepGroups
from rose.errors import ModelError, Unavailable
from rose.run.trainer_ranks import Answer, FinishOrder, LearnOrder, Order, RankWorker


class Others:
    """The other ranks, who say what a test wants; None are gone."""

    rank, count = 0, 3

    def __init__(self, *answers: Answer | None) -> None:
        self._answers = answers

    def exchange(self, word: bytes) -> list[bytes]:
        if None in self._answers:
            raise Unavailable("another rank of the trainer ended")
        return [word, *map(msgspec.json.encode, self._answers)]


def worker(*answers: Answer | None, error: Exception | None = None) -> RankWorker:
    others: Any = Others(*answers)
    made = RankWorker(others)
    made.trainer = others

    def wait() -> None:
        if error is not None:
            raise error

    made.wait = wait
    return made


def test_an_order_survives_the_wire():
    groups = drawn_groups(1)
    order = LearnOrder(groups, StepGroups(drawn=3, kept=3), "7-abc")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Order) == order


def test_words_of_all_ranks_are_returned():
    assert worker(Answer(word="a"), Answer(word="b")).obey(FinishOrder()) == (None, ["", "a", "b"])


def test_the_failure_of_any_rank_is_raised_with_its_number():
    with pytest.raises(Unavailable, match="rank 2 of the trainer: the disk is full"):
        worker(Answer(), Answer(error="the disk is full")).obey(FinishOrder())


def test_the_failure_of_this_rank_goes_first():
    failing = worker(Answer(error="other"), error=ModelError("mine"))
    with pytest.raises(ModelError, match="mine"):
        failing.obey(FinishOrder())
    assert not failing.is_alone


def test_a_rank_that_is_gone_is_an_error_and_remembered():
    left = worker(None)
    with pytest.raises(Unavailable, match="another rank of the trainer ended"):
        left.obey(FinishOrder())
    assert left.is_alone
