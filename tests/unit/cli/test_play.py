"""`rose play`: a game of a run's model, in the terminal."""

from __future__ import annotations

import pytest

from rose.cli.main import main
from rose.models.presets import write_preset


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of the task, with a checkpoint of a model that has learnt nothing."""
    folder = tmp_path_factory.mktemp("runs")
    run = folder / "first"
    write_preset("frozenlake-1m", run / "checkpoints" / "step-000005", seed=0)
    (run / "settings.yaml").write_text("environment: frozenlake\nseed: 0\nsteps: 5\n")
    return folder


def played(runs, capsys, *arguments):
    assert main(["play", "--runs", str(runs), "--pause", "0", *arguments]) == 0
    return capsys.readouterr().out


def test_every_move_is_shown_with_the_map_and_the_end(runs, capsys):
    said = played(runs, capsys, "first")
    assert said.startswith("first, step-000005: game 0 of frozenlake")
    moves = said.count("\nmove ")
    assert moves >= 1 and f"not won after {moves} turns" in said
    boards = [line.strip() for line in said.splitlines() if line.startswith("    ")]
    assert len(boards) == 4 * (moves + 1) and all(len(line) == 4 for line in boards)
    assert sum("P" in line for line in boards) == moves + 1


def test_the_same_game_is_the_same_again_and_the_newest_run_is_taken(runs, capsys):
    assert played(runs, capsys, "--game", "3") == played(runs, capsys, "first", "--game", "3")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nosuch"], "there is no run 'nosuch'"),
        (["first", "--game", "-1"], "must not be negative"),
        (["empty"], "has no checkpoint"),
        (["agents"], "agent of its own"),
    ],
)
def test_what_cannot_be_played_is_refused_in_words(runs, capsys, arguments, words):
    for name, settings in (("empty", "environment: frozenlake\n"), ("agents", "agent: mine.py:play\n")):
        (runs / name).mkdir(exist_ok=True)
        (runs / name / "settings.yaml").write_text(settings)
    assert main(["play", "--runs", str(runs), *arguments]) != 0
    assert words in capsys.readouterr().err
