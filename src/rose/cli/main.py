"""The `rose` command: finds the command that was typed, imports only that one, and prints errors as sentences.

Every command is a module `rose.cli.NAME` with `SUMMARY`, `configure(parser)` and `run(arguments) -> exit code`. The
table below repeats the summaries, so that `rose --help` answers without importing any of them.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from rose import __version__
from rose.errors import ConfigError, RoseError

COMMANDS = {
    "run": "train a model by reinforcement learning, with rollouts on a device that serves users meanwhile",
    "demo": "start a device on a small random model and watch it answer",
    "serve": "serve a model over HTTP with an OpenAI-compatible interface, and lend its slack to rollouts",
    "lend": "the owner's controls of a lent device: status, pause, resume, drain, dry-run, limits",
    "gateway": "one door for agents, environments and trainers, with all rollout workers behind it",
    "weights": "look into a relay: list, show, verify and compare weight versions, and clean up",
    "relay": "start a relay between a trainer and its rollout workers",
    "load": "send open-loop load from a trace or a generator, and report latencies against a budget",
    "model": "make and inspect model folders",
    "doctor": "say what this machine can run, and how to get what is missing",
    "journal": "read a journal of facts and decisions",
    "runs": "past runs: list them, show one, compare several",
    "sim": "simulate a rollout cluster with crashes, partitions and reclaimed devices, and check what must always hold",
}

EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells expect
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader left, as in `rose journal ... | head`


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; never raises for an error that has a sentence."""
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
        # The interpreter flushes stdout once more on its way out; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"rose {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise ConfigError(f"there is no command `{name}`", hint=_suggestion(name))
    return _run(name, rest)


def _run(name: str, rest: list[str]) -> int:
    command = importlib.import_module(f"rose.cli.{name}")
    parser = argparse.ArgumentParser(prog=f"rose {name}", description=command.SUMMARY, allow_abbrev=False)
    command.configure(parser)
    code = command.run(parser.parse_args(rest))
    assert isinstance(code, int), f"rose.cli.{name}.run returned {code!r}, not an exit code"
    return code


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"did you mean `rose {near[0]}`?" if near else "`rose --help` lists the commands"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rose COMMAND ...",
            "",
            "ROSE runs rollouts of reinforcement learning on devices that serve users, serving first.",
            "",
            "commands:",
            *lines,
            "",
            "`rose COMMAND --help` explains one of them. New here? Type `rose run`.",
        ]
    )
