"""The `rose` command: help is light, errors are sentences, exit codes mean something."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import subprocess
import sys
import types

import pytest

from rose import __version__
from rose.cli import main as cli
from rose.errors import ConfigError, Unavailable

COLUMNS = 80
HEAVY = ("numpy", "torch", "numba", "aiohttp", "msgspec", "yaml", "tokenizers", "asyncio", "prometheus_client")


@pytest.fixture
def command(monkeypatch):
    """A command `rose test` whose `run` is what the test says."""

    def install(run):
        module = types.SimpleNamespace(SUMMARY="a test", configure=lambda parser: None, run=run)
        monkeypatch.setitem(cli.COMMANDS, "test", "a test")
        monkeypatch.setitem(sys.modules, "rose.cli.test", module)

    return install


def raising(error):
    def run(arguments):
        raise error

    return run


@pytest.mark.parametrize("word", ["--help", "--version", "nonsense"])
def test_help_imports_nothing_heavy(word):
    program = (
        "import sys\nfrom rose.cli.main import main\n"
        f"main([{word!r}])\nprint('HEAVY', sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command_with_its_summary(words, capsys):
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert all(name in said and summary in said for name, summary in cli.COMMANDS.items())


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rose {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_the_summary_of_the_table_and_explains_itself(name, capsys):
    module = importlib.import_module(f"rose.cli.{name}")
    assert cli.COMMANDS[name] == module.SUMMARY
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: rose {name}" in capsys.readouterr().out


def actions_of(name: str) -> list[list[str]]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"rose.cli.{name}").configure(parser)
    groups = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [[name], *([name, action] for choices in groups for action in choices)]


@pytest.mark.parametrize("words", [[], *(words for name in cli.COMMANDS for words in actions_of(name))])
def test_every_help_text_fits_80_columns(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > COLUMNS] == []


@pytest.mark.parametrize(
    "words, near",
    [
        (["serve", "--prot", "80"], "--port"),
        (["serve", "--prot=80"], "--port"),
        (["journal", "shwo", "file"], "show"),
        (["model", "new", "--preset", "a", "--out", "b", "--sed", "1"], "--seed"),
        (["lend", "puase"], "pause"),
        (["doctor", "--xyzzy"], "rose doctor --help"),
    ],
)
def test_a_mistyped_option_or_action_is_answered_with_the_nearest_one(words, near, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"\n  try: {near}\n")


def test_a_replaced_command_names_the_new_one_in_one_sentence(capsys):
    assert cli.main(["demo", "--tokens", "20"]) == 2
    assert capsys.readouterr().err == "rose: `rose demo` is now `rose serve --demo`\n"


@pytest.mark.parametrize("typed, near", [("srve", "rose serve"), ("docter", "rose doctor"), ("xyzzy", "rose --help")])
def test_an_unknown_command_suggests_one(typed, near, capsys):
    assert cli.main([typed]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rose: there is no command `{typed}`") and near in said


@pytest.mark.parametrize("error, code", [(ConfigError("bad", hint="mend"), 2), (Unavailable("gone", hint="mend"), 1)])
def test_an_error_is_a_sentence_without_a_traceback(command, capsys, error, code):
    command(raising(error))
    assert cli.main(["test"]) == code
    assert capsys.readouterr().err == f"rose: {error.what}\n  try: mend\n"


def test_a_bug_keeps_its_traceback(command):
    command(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["test"])


def test_interrupted(command):
    command(raising(KeyboardInterrupt()))
    assert cli.main(["test"]) == 130


def test_a_command_that_returns_no_exit_code_is_a_bug(command):
    command(lambda arguments: None)
    with pytest.raises(AssertionError, match="exit code"):
        cli.main(["test"])


def test_wrong_flags_exit_with_2(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--no-such-flag"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == "rose: `rose doctor` has no option --no-such-flag\n  try: rose doctor --help\n"
