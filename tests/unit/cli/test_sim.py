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
        (["--seeds", "9..3"], "write them as 0..99"),
        (["--seeds", "a..b"], "names no seeds"),
        (["--minutes", "-1"], "cannot be simulated"),
        (["--minutes", "nan"], "cannot be simulated"),
    ],
)
def test_wrong_seeds_and_minutes_are_refused(words, why, capsys):
    assert main(["sim", *words]) == 2
    assert why in capsys.readouterr().err


def test_one_device_is_forecast_from_its_profiles(capsys):
    words = ["--profile", "cpu", "--rollout-profile", "cpu-frozenlake-1m", "--rate", "3", "--seconds", "3"]
    assert main(["sim", *words]) == 0
    printed = capsys.readouterr().out
    assert "of the time lent" in printed and "TTFT       P50" in printed and "without HTTP" in printed


@pytest.mark.parametrize(
    "words, why",
    [
        (["--profile", "cpu", "--rate", "1"], "runs two models"),
        (["--rate", "1"], "a trace is for one device"),
        (["--profile", "cpu", "--rollout-profile", "cpu"], "either a trace or a rate"),
        (["--profile", "cpu", "--rollout-profile", "cpu", "--rate", "1", "--seconds", "0"], "cannot be forecast"),
        (["--profile", "no.json", "--rollout-profile", "cpu", "--rate", "1"], "no step profile"),
    ],
)
def test_a_forecast_without_its_parts_is_refused(words, why, capsys):
    assert main(["sim", *words]) == 2
    assert why in capsys.readouterr().err
