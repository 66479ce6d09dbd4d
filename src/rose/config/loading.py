"""Loads settings: the defaults, then one YAML file, then dotted overrides; a later layer replaces earlier values.

msgspec checks the types. Every layer is checked when it is applied, so an error names the full key, the value, and the
file or override it came from. Unknown keys are refused at every level: a misspelt key that was ignored would cost the
operator a day.
"""

from __future__ import annotations

import difflib
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rose.config import yaml_text as text
from rose.config.schema import METADATA_KEY, SettingLimits, describe_type
from rose.errors import ConfigError, Unavailable
from rose.private_files import write_durable

Settings = TypeVar("Settings")

RESOLVED_NAME = "settings.yaml"
SHOWN_CHARACTERS_MAX = 60  # of a wrong value in an error, so that the error stays on a screen


def load_settings(
    settings_type: type[Settings], path: str | Path | None = None, overrides: Sequence[str] = ()
) -> Settings:
    """Return the defaults under the file under every `a.b=c` in order; raises ConfigError."""
    settings = settings_type()
    if path is not None:
        settings = apply_layer(settings, text.read_file(Path(path)), f"in {path}")
    for override in overrides:
        keys, value = text.parse_override(override)
        for key in reversed(keys):
            value = {key: value}
        settings = apply_layer(settings, value, f"in --set {override}")
    return settings


def write_resolved(settings: Any, run_folder: str | Path) -> Path:
    """Write the settings in force to the run folder, whole or not at all; `load_settings` reads them back equal.

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
    """Yield every dotted key of a settings class."""
    for name, annotation in typing.get_type_hints(settings_type).items():
        if is_dataclass(annotation):
            yield from (f"{name}.{inner}" for inner in known_keys(typing.cast(type, annotation)))
        else:
            yield name


def apply_layer(settings: Settings, tree: Any, origin: str, prefix: str = "", root: type | None = None) -> Settings:
    """Return the settings with the values of a tree, checked; `origin` says in errors where the tree came from."""
    root, annotations = root or type(settings), typing.get_type_hints(type(settings))
    if tree is None:
        return settings
    if not isinstance(tree, dict):
        name = f"setting `{prefix[:-1]}`" if prefix else "the top level"
        what = f"{name} must be a group of settings, not {_shown(tree)} ({origin})"
        raise ConfigError(what, hint=f"its keys are: {', '.join(annotations)}")
    changes: dict[str, Any] = {}
    for name, value in tree.items():
        key, annotation = f"{prefix}{name}", annotations.get(name)
        if annotation is None:
            nearest = max(known_keys(root), key=lambda known: _similarity(key, known))
            raise ConfigError(f"unknown setting `{key}` ({origin})", hint=f"the nearest known one is `{nearest}`")
        if is_dataclass(annotation):
            changes[name] = apply_layer(getattr(settings, name), value, origin, f"{key}.", root)
            continue
        is_open = typing.get_origin(annotation) is Mapping
        field: Field[Any] = settings.__dataclass_fields__[name]  # type: ignore[attr-defined]
        checked = _check({} if is_open and value is None else value, annotation, field, key, origin)
        changes[name] = {**getattr(settings, name), **checked} if is_open else checked
    return replace(settings, **changes)  # type: ignore[type-var]


def _check(value: Any, annotation: Any, field: Field[Any], key: str, origin: str) -> Any:
    """Return one value in the type of its field, within the field's limits; raises ConfigError."""
    limits: SettingLimits = field.metadata.get(METADATA_KEY) or SettingLimits("")
    try:
        converted = msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        wrong, wanted = value, describe_type(annotation)
    else:
        several = isinstance(converted, dict | tuple)
        items = converted.values() if isinstance(converted, dict) else converted if several else (converted,)
        violations = ((item, _violation(item, limits)) for item in items)
        wrong, wanted = next(((item, limit) for item, limit in violations if limit), (None, ""))
        if not wanted:
            return converted
    default = {} if field.default is MISSING else field.default
    raise ConfigError(
        f"setting `{key}` must be {wanted}, not {_shown(wrong)} ({origin})",
        hint=f"`{key}` is: {limits.what}; the default is {_shown(default)}" if limits.what else None,
    )


def _violation(value: Any, limits: SettingLimits) -> str:
    """Return the limit that a value does not keep; empty if it keeps all of them."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        low = limits.minimum is not None and value < limits.minimum
        high = limits.maximum is not None and value > limits.maximum
        return str(limits) if low or high else "" if math.isfinite(value) else "finite"
    is_odd_text = isinstance(value, str) and limits.pattern and not re.fullmatch(limits.pattern, value)
    return f"like {limits.example}" if is_odd_text else ""


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARACTERS_MAX else f"{shown[: SHOWN_CHARACTERS_MAX - 3]}..."


GROUP_WEIGHT = 0.3  # a mistyped name is more often of the right group than the group is wrong


def _similarity(key: str, known: str) -> float:
    """Return how alike two keys are: as a whole, in their last part, in their group, and by initials (lr)."""
    (group, _, end), (known_group, _, known_end) = key.rpartition("."), known.rpartition(".")
    is_short = end == "".join(word[:1] for word in known_end.split("_"))
    alike = difflib.SequenceMatcher(None, key, known).ratio() + difflib.SequenceMatcher(None, end, known_end).ratio()
    return alike + GROUP_WEIGHT * (group == known_group) + is_short
