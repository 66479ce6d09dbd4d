"""Functions that several commands share: options for typed settings, progress lines and tables."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rose.errors import ConfigError

LABELS_MAX, LABEL_CHARACTERS_MAX = 16, 64  # the limits of a worker's registration (api/worker_messages.py)
Settings = TypeVar("Settings")


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", type=Path, metavar="FILE", help="a YAML file of settings")
    add_override_option(parser)


def add_override_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", dest="overrides", help="one setting; may be repeated"
    )


def settings_of(arguments: argparse.Namespace, settings_type: type[Settings], flags: Mapping[str, str]) -> Settings:
    """Return the settings of the file, under `--set`, under `flags` (option -> setting). Raise ConfigError."""
    from rose.config.loading import load_settings
    from rose.config.yaml_text import as_override

    values = {key: getattr(arguments, flag) for flag, key in flags.items()}
    overrides = [as_override(key, value) for key, value in values.items() if value is not None]
    return load_settings(settings_type, arguments.settings, [*arguments.overrides, *overrides])


def labels_of(given: Sequence[str]) -> dict[str, str]:
    """Return labels written as `key=value`. Raises ConfigError."""
    labels = {}
    for label in given:
        key, equals, value = label.partition("=")
        if not key or not equals or max(len(key), len(value)) > LABEL_CHARACTERS_MAX:
            hint = f"write KEY=VALUE, each at most {LABEL_CHARACTERS_MAX} characters, for example rack=a3"
            raise ConfigError(f"`{label[:80]}` is not a label", hint=hint)
        labels[key] = value
    if len(labels) > LABELS_MAX:
        raise ConfigError(f"{len(labels)} labels are too many", hint=f"give at most {LABELS_MAX}")
    return labels


def say(what: str) -> None:
    """Print a progress line; a closed terminal does not stop the program."""
    with contextlib.suppress(OSError):
        print(what, flush=True)


def print_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "") -> None:
    """Print rows in columns as wide as they need; the columns in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = (
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        )
        print((indent + "  ".join(cells)).rstrip())
