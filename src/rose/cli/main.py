"""The `rose` command: imports only the command that was typed, and prints errors as sentences.

Every command is a module `rose.cli.NAME` with `SUMMARY`, `configure(parser)` and `run(arguments) -> exit code`. The
table below repeats the summaries, so that `rose --help` answers without importing any of them. A mistyped command,
action or option is answered with the nearest one.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from rose import __version__
from rose.cli.command_parser import CommandParser, nearest
from rose.errors import ConfigError, RoseError

COMMANDS = {
    "run": "train a model, with rollouts on a device that also serves users",
    "serve": "serve a model like OpenAI's API, and lend idle time to rollouts",
    "lend": "control a lent device: status, pause, resume, drain, limits",
    "gateway": "start the one endpoint for agents and trainers, before all workers",
    "pool": "list and control the workers of a gateway: pause, drain, limits",
    "weights": "list, show, verify, compare and delete weight versions in a relay",
    "relay": "start a relay between a trainer and its rollout workers",
    "load": "send open-loop load to a server, check latencies against budgets",
    "model": "make and inspect model folders",
    "settings": "list the settings of run, serve, gateway and deploy, with defaults",
    "completion": "print what completes commands and options in bash or zsh",
    "doctor": "check what this machine can run, and how to get what is missing",
    "deploy": "write the Kubernetes objects of a deployment as YAML",
    "journal": "print and check a journal of facts and decisions",
    "runs": "list past runs, show one, compare several",
    "play": "watch the model of a run play one game, move by move",
    "verify": "check on one GPU what ROSE promises, and write a report to share",
    "plan": "say what lending would give on your fleet, from a traffic trace",
    "profile": "record step profiles of a lent device, for `rose plan` and `sim`",
    "sim": "simulate a rollout cluster with faults, and check its invariants",
}
REPLACED = {"demo": "rose serve --demo"}  # former command -> the new one; for one release
MEANT = {  # what other tools call it -> what it is here
    "status": "rose lend status",
    "pause": "rose lend pause",
    "resume": "rose lend resume",
    "drain": "rose lend drain",
    "ps": "rose runs ls",
    "list": "rose runs ls",
    "logs": "rose runs show",
    "train": "rose run",
    "start": "rose run",
    "compare": "rose runs compare",
    "config": "rose settings",
    "estimate": "rose plan",
    "simulate": "rose sim",
    "bench": "rose load",
    "check": "rose doctor",
}

EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells expect
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader left, as in `rose journal ... | head`


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
    if words[:1] == ["help"] and words[1:]:
        words = [words[1], "--help"]
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
        near = MEANT.get(name) or ((close := nearest(name, COMMANDS)) and f"rose {close}")
        hint = near or "rose --help, which lists the commands"
        raise ConfigError(f"there is no command `{name}`", hint=hint)
    command = importlib.import_module(f"rose.cli.{name}")
    parser = CommandParser(prog=f"rose {name}", description=command.SUMMARY)
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
