"""The `rose` command: imports only the command that was typed, and prints errors as sentences.

Every command is a module `rose.cli.NAME` with `SUMMARY`, `configure(parser)` and `run(arguments) -> exit code`. The
table below repeats the summaries, so that `rose --help` answers without importing any of them. A mistyped command,
action or option is answered with the nearest one.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from rose import __version__
from rose.errors import ConfigError, RoseError

COMMANDS = {
    "run": "train a model, with rollouts on a device that serves users meanwhile",
    "serve": "serve a model like OpenAI's API, and lend idle time to rollouts",
    "lend": "control a lent device: status, pause, resume, drain, dry-run, limits",
    "gateway": "start the one endpoint for agents and trainers, before all workers",
    "pool": "list and control a gateway's workers: pause, resume, drain, limits",
    "weights": "list, show, verify, compare and delete weight versions in a relay",
    "relay": "start a relay between a trainer and its rollout workers",
    "load": "send open-loop load to a server and check latencies against budgets",
    "model": "make and inspect model folders",
    "settings": "list the settings of run, serve, gateway and deploy, with defaults",
    "doctor": "check what this machine can run, and say how to get what is missing",
    "deploy": "write the Kubernetes objects of a deployment as YAML",
    "journal": "print and check a journal of facts and decisions",
    "runs": "list past runs, show one, compare several",
    "play": "watch the model of a run play one game, move by move",
    "verify": "check on one GPU what ROSE promises, and write a report to share",
    "plan": "say what lending would give on your fleet, from a traffic trace",
    "profile": "record step profiles beside a running lent device",
    "sim": "simulate a rollout cluster with faults, and check its invariants",
}
REPLACED = {"demo": "rose serve --demo"}  # former command -> the new one; for one release

EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells expect
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader left, as in `rose journal ... | head`


class CommandParser(argparse.ArgumentParser):
    """An argument parser that names the nearest option or action for a mistyped one."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        hint = None
        if unknown:
            hint = nearest(unknown[1], _options(self))
        elif choice:
            hint = nearest(choice[1], (name.strip("'\"") for name in choice[2].split(", ")))
        super().error(f"{message}\n  try: {hint}" if hint else f"{message}\n  try: {self.prog} --help")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a parser and of all its actions."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)


def nearest(typed: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like the typed one; None if all are far from it."""
    close = difflib.get_close_matches(typed, list(known))
    return max(close, key=lambda name: sorted(name) == sorted(typed), default=None)  # swapped letters come first


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a RoseError becomes a sentence on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except RoseError as error:
        print(f"rose: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it exits; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"rose {__version__}")
        return 0
    name = words[0]
    if name in REPLACED:
        raise ConfigError(f"`rose {name}` is now `{REPLACED[name]}`")
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"did you mean `rose {near}`?" if near else "`rose --help` lists the commands"
        raise ConfigError(f"there is no command `{name}`", hint=hint)
    command = importlib.import_module(f"rose.cli.{name}")
    parser = CommandParser(prog=f"rose {name}", description=command.SUMMARY, allow_abbrev=False)
    command.configure(parser)
    code = command.run(parser.parse_args(words[1:]))
    assert isinstance(code, int), f"rose.cli.{name}.run returned {code!r}, not an exit code"
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return f"""usage: rose COMMAND ...

ROSE runs rollouts of reinforcement learning on devices that serve users, and
puts serving first.

commands:
{lines}

`rose COMMAND --help` explains one of them. New here? Type `rose run`."""
