"""YAML text of settings: what is read, refused and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.config import yaml_text as text
from rose.errors import ConfigError


@given(st.text(max_size=20) | st.integers() | st.booleans() | st.none())
def test_a_value_goes_through_an_override_unchanged(value):
    keys, found = text.parse_override(text.as_override("a.b", value))
    assert keys == ["a", "b"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "written, value",
    [
        ("yes", "yes"),
        ("off", "off"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("010", 10),
        ("1e-3", 0.001),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("~", None),
        ("true", True),
        ("[1, a, .5]", [1, "a", 0.5]),
    ],
)
def test_values_are_read_by_the_core_of_yaml_1_2(written: str, value: object) -> None:
    found = text.parse(f"key: {written}", "here")["key"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value", ["yes", "010", "1e5", "null", "a: b", "\x85", " ", "é", "'", "#", 3, 0.5, True, None])
def test_what_is_written_is_read_back_equal(value: object) -> None:
    found = text.parse(text.write({"key": value}), "here")["key"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("a: 1\na: 2", "here: `a` is written twice, in lines 1 and 2"),
        ("a: [", "here is not valid YAML (line 1)"),
        ("!!python/object/apply:os.getcwd []", "here is not valid YAML (line 1)"),
    ],
)
def test_wrong_text_is_refused_with_its_place(wrong: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        text.parse(wrong, "here")
    assert str(refused.value).startswith(words) and "\n  try: " in str(refused.value)


@pytest.mark.parametrize("override", ["count", "=1", "a..b=1"])
def test_an_override_is_a_key_and_a_value(override: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form key=value"):
        text.parse_override(override)
