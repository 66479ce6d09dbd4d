"""Reads settings: the defaults, then one YAML file, then dotted overrides, each laid over the one before.

Every layer is checked as it is laid, so an error names the full key, the value, and the file or override it came from.
Keys are strict at every level: a misspelt key that was ignored would cost somebody a day.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from rose.config import text
from rose.config.schema import METADATA_KEY, Limits
from rose.errors import ConfigError, Unavailable
from rose.private_files import write_durable

Settings = TypeVar("Settings")

RESOLVED_NAME = "settings.yaml"

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text", types.NoneType: "null"}


def load_settings(
    settings_type: type[Settings], path: str | Path | None = None, overrides: Sequence[str] = ()
) -> Settings:
    """Defaults, then the file, then every `a.b=c` in order; raises ConfigError."""
    settings = settings_type()
    if path is not None:
        settings = _lay(settings, text.read_file(Path(path)), f"in {path}", "")
    for override in overrides:
        keys, value = text.parse_override(override)
        for key in reversed(keys):
            value = {key: value}
        settings = _lay(settings, value, f"in --set {override}", "")
    return settings


def changed(settings: Settings, values: Mapping[str, Any], origin: str) -> Settings:
    """Single values laid over settings that are there, checked as those of a file are; `origin` says whose they are."""
    return _lay(settings, dict(values), origin, "")


def write_resolved(settings: Any, run_folder: str | Path) -> Path:
    """Write what is in force to the run folder, whole or not at all; `load_settings` reads it back equal.

    Raises Unavailable, as on a full disk.
    """
    folder = Path(run_folder)
    path = folder / RESOLVED_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_durable(path, text.write(asdict(settings)).encode())
    except OSError as error:
        hint = "free some space; what was there before is whole"
        raise Unavailable(f"{path} cannot be written: {error.strerror}", hint=hint) from error
    return path


def known_keys(settings_type: type) -> Iterator[str]:
    """Every dotted key of a settings class."""
    for name, annotation in _types_of(settings_type).items():
        if is_dataclass(annotation):
            yield from (f"{name}.{inner}" for inner in known_keys(typing.cast(type, annotation)))
        else:
            yield name


def _lay(settings: Settings, tree: Any, origin: str, prefix: str, root: type | None = None) -> Settings:
    root = root or type(settings)
    if tree is None:
        return settings
    if not isinstance(tree, dict):
        raise _not_a_group(prefix, tree, origin, type(settings))
    annotations = _types_of(type(settings))
    changes: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in annotations:
            raise _unknown(key, origin, root)
        if is_dataclass(annotations[name]):
            changes[name] = _lay(getattr(settings, name), value, origin, f"{key}.", root)
        elif typing.get_origin(annotations[name]) is Mapping:
            given = {} if value is None else value
            checked = _Check(settings, name, key, origin).value(given, annotations[name])
            changes[name] = {**getattr(settings, name), **checked}
        else:
            changes[name] = _Check(settings, name, key, origin).value(value, annotations[name])
    return replace(settings, **changes)  # type: ignore[type-var]


class _Check:
    """One value against the type and the limits of its field."""

    def __init__(self, settings: Any, name: str, key: str, origin: str) -> None:
        found = next(field for field in fields(settings) if field.name == name)
        self.limits: Limits = found.metadata.get(METADATA_KEY) or Limits("")
        self.default: Any = {} if found.default is MISSING else found.default
        self.key, self.origin = key, origin

    def value(self, value: Any, annotation: Any) -> Any:
        if not _fits(value, annotation):
            raise self._wrong(value, _words(annotation))
        if isinstance(value, list):
            value = tuple(value)
        if isinstance(value, int) and annotation is float:
            value = float(value)
        several = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        for item in several:
            self._limit(item)
        return value

    def _limit(self, value: Any) -> None:
        limits = self.limits
        if isinstance(value, int | float) and not isinstance(value, bool):
            low = limits.minimum is not None and value < limits.minimum
            high = limits.maximum is not None and value > limits.maximum
            if low or high or not math.isfinite(value):
                raise self._wrong(value, str(limits) if low or high else "finite")
        if isinstance(value, str) and limits.pattern and not re.fullmatch(limits.pattern, value):
            raise self._wrong(value, f"like {limits.example}")

    def _wrong(self, value: Any, wanted: str) -> ConfigError:
        what = f"setting `{self.key}` must be {wanted}, not {_shown(value)} ({self.origin})"
        hint = f"`{self.key}` is: {self.limits.what}; the default is {_shown(self.default)}"
        return ConfigError(what, hint=hint if self.limits.what else None)


def _fits(value: Any, annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return any(value == argument and type(value) is type(argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is Mapping:
        is_named = isinstance(value, dict) and all(type(name) is str for name in value)
        return is_named and all(_fits(item, arguments[1]) for item in value.values())
    if annotation is float:
        return type(value) in (int, float)
    return type(value) is annotation


def _words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is Literal:
        return "one of " + ", ".join(str(argument) for argument in arguments)
    if origin is tuple:
        return f"a list, each {_words(arguments[0])}"
    if origin is Mapping:
        return f"a group of names, each with {_words(arguments[1])}"
    return _PLAIN[annotation]


def _types_of(settings_type: type) -> dict[str, Any]:
    return typing.get_type_hints(settings_type)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _not_a_group(prefix: str, tree: Any, origin: str, settings_type: type) -> ConfigError:
    name = f"setting `{prefix[:-1]}`" if prefix else "the top level"
    what = f"{name} must be a group of settings, not {_shown(tree)} ({origin})"
    return ConfigError(what, hint=f"its keys are: {', '.join(_types_of(settings_type))}")


def _unknown(key: str, origin: str, root: type) -> ConfigError:
    def nearness(known: str) -> float:
        whole = difflib.SequenceMatcher(None, key, known).ratio()
        last = difflib.SequenceMatcher(None, key.rsplit(".", 1)[-1], known.rsplit(".", 1)[-1]).ratio()
        return whole + last

    nearest = max(known_keys(root), key=nearness)
    return ConfigError(f"unknown setting `{key}` ({origin})", hint=f"the nearest known one is `{nearest}`")
