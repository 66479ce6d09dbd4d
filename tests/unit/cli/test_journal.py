"""`rose journal`: facts and decisions in order, and a check of every line."""

from __future__ import annotations

import subprocess
import sys

from rose.cli import main as cli
from rose.core.facts import Grant, StepFeatures
from rose.observe.journal import Journal


def journal_of(tmp_path, entries):
    with Journal(tmp_path / "journal.jsonl") as journal:
        for number in range(entries):
            grant = Grant(number, 1, 9.0, reason="serving is idle")
            journal.append(float(number), StepFeatures(new_tokens=number), [grant] if number % 2 else [])
    return journal.path


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    path = journal_of(tmp_path, 5000)
    command = [sys.executable, "-m", "rose", "journal", "show", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert b"StepFeatures" in child.stdout.readline()
        child.stdout.close()
        assert child.wait(timeout=60) == 141
        assert child.stderr.read() == b""


def test_a_journal_is_read_aloud(tmp_path, capsys):
    assert cli.main(["journal", "show", str(journal_of(tmp_path, 4))]) == 0
    said = capsys.readouterr().out
    assert "1.000000 s  StepFeatures  new_tokens=1" in said
    assert "-> Grant  tokens=1 sequences=1 until_s=9.0 step_s_max=inf  because serving is idle" in said
    assert said.endswith("4 facts and 2 decisions in 1 file(s); every whole line reads back.\n")


def test_a_journal_can_be_sifted_or_only_checked(tmp_path, capsys):
    path = str(journal_of(tmp_path, 4))
    assert cli.main(["journal", "show", path, "--kind", "Grant"]) == 0
    assert capsys.readouterr().out.count("StepFeatures") == 2
    assert cli.main(["journal", "replay", path, "--quiet"]) == 0  # the former name
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_torn_or_broken_journal_is_told(tmp_path, capsys):
    path = journal_of(tmp_path, 4)
    path.write_bytes(path.read_bytes()[:-5])
    assert cli.main(["journal", "show", str(path), "--quiet"]) == 0
    assert "torn" in capsys.readouterr().out
    path.write_bytes(b"oops\n" + path.read_bytes())
    assert cli.main(["journal", "show", str(path)]) == 1
    assert "line 1 of journal" in capsys.readouterr().err
