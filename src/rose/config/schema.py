"""Describes settings: fields of frozen dataclasses, each with a sentence for people and the limits of its value.

    @dataclass(frozen=True, slots=True)
    class FrontSettings:
        port: int = setting(8000, "TCP port of the HTTP server", minimum=0, maximum=65535)

A settings class holds plain values (bool, int, float, str, `X | None`, `Literal`, `tuple[X, ...]`), other settings
classes, and `Mapping[str, X]` where the keys belong to a plugin. Every field has a default, so an empty file is valid.
`rose.config.loading` checks values against this. `rose settings` and docs/settings.md print it (`setting_rows`), so the
page cannot differ from what a command accepts.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_type_hints

METADATA_KEY = "rose"

_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", types.NoneType: "null"}


@dataclass(frozen=True, slots=True)
class SettingLimits:
    """The sentence about a setting, and the limits of its value; None means no limit."""

    what: str
    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None
    example: str | None = None  # shown when `pattern` does not match

    def __str__(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f"between {self.minimum} and {self.maximum}"
        return f"at least {self.minimum}" if self.minimum is not None else f"at most {self.maximum}"


def setting(
    default: Any,
    what: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    pattern: str | None = None,
    example: str | None = None,
) -> Any:
    """Return a dataclass field with its sentence and limits. `pattern` must match the whole text."""
    metadata = {METADATA_KEY: SettingLimits(what, minimum, maximum, pattern, example)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def describe_type(annotation: Any) -> str:
    """Return in words what a setting of this type takes."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe_type, arguments))
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        return f"a list, each {describe_type(arguments[0])}"
    if origin is Mapping:
        return f"a group of names, each with {describe_type(arguments[1])}"
    return _TYPE_NAMES[annotation]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting: its dotted key, what it takes, its default as JSON, and a sentence about it."""

    key: str
    kind: str
    default: str
    what: str


def setting_rows(settings: Any, prefix: str = "") -> Iterator[SettingRow]:
    """Yield a row for every setting of an instance of a settings class, in the order of the class."""
    annotations = get_type_hints(type(settings))
    for each in fields(settings):
        value, key = getattr(settings, each.name), f"{prefix}{each.name}"
        if is_dataclass(value):
            yield from setting_rows(value, f"{key}.")
            continue
        limits: SettingLimits = each.metadata[METADATA_KEY]
        kind = describe_type(annotations[each.name])
        is_limited = limits.minimum is not None or limits.maximum is not None
        yield SettingRow(key, f"{kind} {limits}" if is_limited else kind, json.dumps(value), limits.what)


def markdown(title: str, rows: Iterable[SettingRow]) -> str:
    """Return a section of a page, with one table."""
    lines = [f"## {title}", "", "| setting | takes | default | |", "|---|---|---|---|"]
    lines += [f"| `{row.key}` | {row.kind} | `{row.default}` | {row.what} |" for row in rows]
    return "\n".join(lines) + "\n"
