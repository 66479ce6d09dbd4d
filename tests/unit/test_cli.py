"""The `rose` command: help is light, errors are sentences, exit codes mean something."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest

from rose import __version__
from rose.cli import main as cli
from rose.core.decisions import Grant
from rose.core.facts import StepFeatures
from rose.errors import ConfigError, Unavailable
from rose.observe.journal import Journal

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
    assert "usage: rose doctor" in capsys.readouterr().err


def journal_of(tmp_path, entries):
    with Journal(tmp_path / "journal.jsonl") as journal:
        for number in range(entries):
            grant = Grant(number, 1, 9.0, reason="serving is idle")
            journal.append(float(number), StepFeatures(new_tokens=number), [grant] if number % 2 else [])
    return journal.path


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    path = journal_of(tmp_path, 5000)
    command = [sys.executable, "-m", "rose", "journal", "replay", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert b"StepFeatures" in child.stdout.readline()
        child.stdout.close()
        assert child.wait(timeout=60) == 141
        assert child.stderr.read() == b""


def test_a_journal_is_read_aloud(tmp_path, capsys):
    assert cli.main(["journal", "replay", str(journal_of(tmp_path, 4))]) == 0
    said = capsys.readouterr().out
    assert "1.000000 s  StepFeatures  new_tokens=1" in said
    assert "-> Grant  tokens=1 sequences=1 until_s=9.0 step_s_max=inf  because serving is idle" in said
    assert said.endswith("4 facts and 2 decisions in 1 file(s); every whole line reads back.\n")


def test_a_journal_can_be_sifted_or_only_checked(tmp_path, capsys):
    path = str(journal_of(tmp_path, 4))
    assert cli.main(["journal", "replay", path, "--kind", "Grant"]) == 0
    assert capsys.readouterr().out.count("StepFeatures") == 2
    assert cli.main(["journal", "replay", path, "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_torn_or_broken_journal_is_told(tmp_path, capsys):
    path = journal_of(tmp_path, 4)
    path.write_bytes(path.read_bytes()[:-5])
    assert cli.main(["journal", "replay", str(path), "--quiet"]) == 0
    assert "torn" in capsys.readouterr().out
    path.write_bytes(b"oops\n" + path.read_bytes())
    assert cli.main(["journal", "replay", str(path)]) == 1
    assert "line 1 of journal" in capsys.readouterr().err
