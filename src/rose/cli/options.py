"""Functions that several commands share: options for typed settings, JSON, files, progress lines and tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rose.cli.command_parser import CommandParser
from rose.errors import ConfigError

LABELS_MAX, LABEL_CHARACTERS_MAX = 16, 64  # the limits of a worker's registration (api/worker_messages.py)
Settings = TypeVar("Settings")


JSON_FILE = Path("-")  # of commands whose `--json` names a file: standard output


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_json(value: Any) -> None:
    """Print plain values as JSON, indented; NaN and infinities, which JSON has not, as null."""
    print(json.dumps(_finite(value), indent=1, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def write_file(path: Path, text: str) -> None:
    """Write what a command was asked to write, or print it for `-`. Raises ConfigError."""
    if path == JSON_FILE:
        print(text, end="")
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="name another file") from error
    say(f"written to {path}")


def check_folders(*paths: Path | None) -> None:
    """Raise ConfigError for a file to write whose folder is missing, before any work is done."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}", hint="make it first")


def add_log_option(parser: argparse.ArgumentParser) -> None:
    what = "log lines as plain text or as JSON (plain; or ROSE_LOG_FORMAT)"
    parser.add_argument("--log-format", choices=("plain", "json"), help=what)


def add_settings_options(parser: argparse.ArgumentParser, command: str | None = None) -> None:
    parser.add_argument("--settings", type=Path, metavar="FILE", help="a YAML file of settings")
    add_override_option(parser, command)


def add_override_option(parser: argparse.ArgumentParser, command: str | None = None) -> None:
    """Add `--set` for the settings of this command, which an unknown option is then compared with."""
    if isinstance(parser, CommandParser):
        parser.settings_command = command
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
