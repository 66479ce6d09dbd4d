"""`rose completion`: the script that completes commands, actions and options of `rose` in a shell.

The script is written by shtab from the parsers themselves, so it knows every option of this version and nothing else.
It runs no `rose` while you type.
"""

from __future__ import annotations

import argparse
import importlib

from rose.cli.command_parser import CommandParser
from rose.errors import ConfigError

SUMMARY = "print what completes commands and options in bash or zsh"
EPILOG = """to install it, once:
  rose completion bash > ~/.local/share/bash-completion/completions/rose
  rose completion zsh > ~/.zfunc/_rose    # a folder of zsh's fpath
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")


def run(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        what = "the package shtab, which writes the script, is not installed"
        raise ConfigError(what, hint="pip install 'rose-rl[completion]'") from error
    print(shtab.complete(whole_parser(), arguments.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands at once; `rose` itself imports only the command that was typed."""
    from rose.cli.main import COMMANDS

    parser = CommandParser(prog="rose")
    parser.add_argument("--version", "-V", action="store_true", help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        importlib.import_module(f"rose.cli.{name}").configure(command)
    return parser
