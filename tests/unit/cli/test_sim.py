"""`rose sim`: which seeds it runs, and what it refuses."""

from __future__ import annotations

import pytest

from rose.cli.main import main


def test_every_seed_of_a_range_has_a_line(capsys):
    assert main(["sim", "--seeds", "3..4", "--minutes", "0.02"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:2]] == [["seed", "3", "fine"], ["seed", "4", "fine"]]
    assert "All invariants held for 2 seeds" in lines[3] and lines[-1] == "Next: rose sim --seed 4 --events"


@pytest.mark.parametrize(
    "words, why",
    [
        (["--seeds", "5"], "`5` names no seeds"),
        (["--seeds", "9..3"], "write them as 0..99"),
        (["--seeds", "a..b"], "names no seeds"),
        (["--minutes", "-1"], "cannot be simulated"),
        (["--minutes", "nan"], "cannot be simulated"),
    ],
)
def test_wrong_seeds_and_minutes_are_refused(words, why, capsys):
    assert main(["sim", *words]) == 2
    assert why in capsys.readouterr().err
