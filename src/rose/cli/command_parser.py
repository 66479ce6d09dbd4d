"""The argument parser of every command: argparse, whose errors are one sentence and a next step.

argparse answers a wrong command line with all of its options and a fragment. Here the answer is a sentence about the
one argument that is wrong, and what to type instead: the nearest option or action, or `--set KEY=VALUE` for an option
that is the name of a setting. Options cannot be abbreviated, so that a later option changes no script.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

EXIT_WRONG_USE = 2
KINDS = {"int": "a whole number", "float": "a number", "Path": "a path"}


class CommandParser(argparse.ArgumentParser):
    """A parser that names the nearest option, action or setting for a mistyped one."""

    settings_command: str | None = None  # whose settings `--set` takes: `run`, `serve`, `gateway`, `deploy`

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        keywords.setdefault("allow_abbrev", False)
        super().__init__(*arguments, **keywords)
        self._typed: list[str] = []

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self._typed = list(args or ())
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        sentence, hint = self._explained(message)
        self.exit(EXIT_WRONG_USE, f"rose: {sentence}\n  try: {hint or f'{self.prog} --help'}\n")

    def _explained(self, message: str) -> tuple[str, str | None]:
        """Return what is wrong as a sentence, and what to type instead if that is known."""
        if match := re.match(r"unrecognized arguments: (.*)", message):
            return self._unknown(match[1].split())
        if match := re.match(r"argument (\S+): invalid choice: '?([^']*?)'? \(choose from (.*)\)", message):
            name, typed = match[1].split("/")[0], match[2]
            choices = [word.strip("'\"") for word in match[3].split(", ")]
            what = f"`{self.prog}` has no action `{typed}`" if name == "ACTION" else f"{name} cannot be `{typed}`"
            return f"{what}; there are {', '.join(choices)}", nearest(typed, choices)
        if match := re.match(r"argument ([^:]+): invalid (\S+) value: '(.*)'", message):
            name = match[1].split("/")[0]
            return f"{name} must be {KINDS.get(match[2], f'of the kind {match[2]}')}, not `{match[3]}`", None
        if match := re.match(r"argument ([^:]+): expected (?:one|at least one) argument", message):
            return f"{match[1].split('/')[0]} needs a value, and none was given", None
        if match := re.match(r"the following arguments are required: (.*)", message):
            return f"`{self.prog}` needs {match[1]}", None
        if match := re.match(r"argument ([^:]+): (.*)", message):
            return f"{match[1].split('/')[0]} {match[2]}", None
        return f"`{self.prog}`: {message}", None

    def _unknown(self, words: list[str]) -> tuple[str, str | None]:
        option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if option is None:
            hint = "write it as --set KEY=VALUE, without spaces" if "--set" in self._typed else None
            return f"`{self.prog}` takes no further argument `{words[0]}`", hint
        what = f"`{self.prog}` has no option {option}"
        return what, self._as_setting(option) or nearest(option, options_of(self))

    def _as_setting(self, option: str) -> str | None:
        """Return how to write an option that is the name of a setting."""
        if self.settings_command is None:
            return None
        from rose.cli.settings import settings_by_command
        from rose.config.schema import setting_rows

        keys = [row.key for row in setting_rows(settings_by_command()[self.settings_command])]
        name = option.lstrip("-").replace("-", "_")
        matches = [key for key in keys if name in (key, key.replace(".", "_"), key.rpartition(".")[2])]
        if not matches:
            return None
        key = min(matches, key=lambda match: match.count("."))
        place = next(place for place, word in enumerate(self._typed) if word.partition("=")[0] == option)
        _, equals, value = self._typed[place].partition("=")
        value = value if equals else "".join(self._typed[place + 1 : place + 2])
        return f"--set {key}={'VALUE' if not value or value.startswith('-') else value}"


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a parser and of all its actions."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options_of(inner)


def nearest(typed: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like the typed one; None if all are far from it."""
    close = difflib.get_close_matches(typed, list(known))
    return max(close, key=lambda name: sorted(name) == sorted(typed), default=None)  # swapped letters come first
