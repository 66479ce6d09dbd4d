"""Errors that cross a socket come out as the class they went in as, with bounded texts."""

from __future__ import annotations

import pytest

from rose.api.faults import Fault, error_of, fault_of
from rose.bounds import TEXT_CHARACTERS_MAX
from rose.errors import ConfigError, ContextTooLong, ModelError, QueueFull, RequestRefused, RoseError, Unavailable


class SpecialRefusal(RequestRefused):
    """A class that the other side does not know."""


@pytest.mark.parametrize(
    "error",
    [
        RoseError("a"),
        ConfigError("a", hint="b"),
        ModelError("a"),
        RequestRefused("a"),
        ContextTooLong("a", hint="b"),
        QueueFull("a", retry_after_s=3.0),
        Unavailable("a", hint="b", retry_after_s=7.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_rose_keeps_its_class_and_words(error: RoseError) -> None:
    received = error_of(fault_of(error))
    assert type(received) is type(error) and vars(received) == vars(error)


def test_a_class_that_does_not_travel_becomes_its_nearest_parent() -> None:
    assert type(error_of(fault_of(SpecialRefusal("no")))) is RequestRefused
    assert type(error_of(Fault("OfALaterVersion", "no"))) is Unavailable


def test_a_foreign_error_becomes_unavailable_with_its_name() -> None:
    received = error_of(fault_of(ZeroDivisionError("oops")))
    assert isinstance(received, Unavailable) and "ZeroDivisionError: oops" in received.what


def test_texts_are_cut_to_what_the_receiver_accepts() -> None:
    fault = fault_of(ModelError("x" * 9999, hint="y" * 9999))
    assert len(fault.what) == len(fault.hint or "") == TEXT_CHARACTERS_MAX
    assert len(fault_of(ValueError("x" * 9999)).what) == TEXT_CHARACTERS_MAX
