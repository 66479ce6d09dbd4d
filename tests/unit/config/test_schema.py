"""Described settings: their limits, their types in words, and the table of docs/settings.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from rose.config.schema import METADATA_KEY, SettingLimits, describe_type, markdown, setting, setting_rows


@dataclass(frozen=True, slots=True)
class Nested:
    share: float = setting(0.5, "part of it", minimum=0, maximum=1)


@dataclass(frozen=True, slots=True)
class Example:
    name: str | None = setting(None, "what it is called")
    count: int = setting(1, "how many", minimum=1)
    options: Mapping[str, int] = setting({"a": 1}, "of a plugin")
    nested: Nested = field(default_factory=Nested)


@pytest.mark.parametrize(
    "annotation, words",
    [
        (bool, "true or false"),
        (int | None, "a whole number or null"),
        (Literal["idle", "decode"], "one of idle, decode"),
        (tuple[str, ...], "a list, each text"),
        (Mapping[str, float], "a group of names, each with a number"),
    ],
)
def test_types_are_described_in_words(annotation: Any, words: str) -> None:
    assert describe_type(annotation) == words


@pytest.mark.parametrize(
    "limits, words",
    [
        (SettingLimits("", 0, 1), "between 0 and 1"),
        (SettingLimits("", minimum=1), "at least 1"),
        (SettingLimits("", maximum=9), "at most 9"),
    ],
)
def test_limits_are_described_in_words(limits: SettingLimits, words: str) -> None:
    assert str(limits) == words


def test_a_default_of_names_is_not_shared_between_instances() -> None:
    assert Example().options == {"a": 1} and Example().options is not Example().options
    assert Example.__dataclass_fields__["options"].metadata[METADATA_KEY].what == "of a plugin"


def test_a_page_has_one_row_per_setting_with_its_dotted_key() -> None:
    assert markdown("rose example", setting_rows(Example())).splitlines() == [
        "## rose example",
        "",
        "| setting | takes | default | |",
        "|---|---|---|---|",
        "| `name` | text or null | `null` | what it is called |",
        "| `count` | a whole number at least 1 | `1` | how many |",
        '| `options` | a group of names, each with a whole number | `{"a": 1}` | of a plugin |',
        "| `nested.share` | a number between 0 and 1 | `0.5` | part of it |",
    ]
