"""Errors say what happened and what to do."""

from __future__ import annotations

import inspect
import re

import pytest

from rose import errors
from rose.errors import ConfigError, ContextTooLong, JournalCorrupt, ModelError, QueueFull, RoseError, Unavailable

ALL = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, RoseError)]


@pytest.mark.parametrize("error", ALL)
def test_what_happened_comes_first_and_the_hint_after_it(error):
    assert str(error("it broke", hint="mend it")) == "it broke\n  try: mend it"
    assert str(error("it broke")) == "it broke"


@pytest.mark.parametrize("error, code", [(ConfigError, 2), (ModelError, 2), (JournalCorrupt, 1), (ContextTooLong, 1)])
def test_exit_codes(error, code):
    assert error("").exit_code == code


@pytest.mark.parametrize("error", [QueueFull, Unavailable])
def test_what_passes_says_when_to_come_back(error):
    assert error("busy", retry_after_s=3.0).retry_after_s == 3.0
    assert error("busy").retry_after_s > 0


def test_the_tree_at_the_top_of_the_module_is_the_tree():
    drawn = re.findall(r"^\W*([A-Z]\w+)(?=\s{2,}|\n)", errors.__doc__, re.MULTILINE)
    assert set(drawn) == {error.__name__ for error in ALL}
