"""What commands with typed settings share: their two options, the settings those give, and how they speak to people."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

Settings = TypeVar("Settings")


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", type=Path, metavar="FILE", help="a YAML file of settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", dest="overrides", help="one setting; may be repeated"
    )


def settings_of(arguments: argparse.Namespace, settings_type: type[Settings], flags: Mapping[str, str]) -> Settings:
    """The file, then `--set`, then `flags` (option -> setting) that were given. Raises ConfigError."""
    from rose.config.load import load_settings
    from rose.config.text import as_override

    given = {key: getattr(arguments, flag) for flag, key in flags.items()}
    shorter = [as_override(key, value) for key, value in given.items() if value is not None]
    return load_settings(settings_type, arguments.settings, [*arguments.overrides, *shorter])


def say(what: str) -> None:
    """For whoever watches; a program goes on when nobody does any more."""
    with contextlib.suppress(OSError):
        print(what, flush=True)
