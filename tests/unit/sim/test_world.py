"""The command `rose sim`: worlds, events, violations, and options."""

from __future__ import annotations

from rose.cli.main import main
from rose.sim import world


def test_the_command_prints_a_world(capsys):
    assert main(["sim", "--seed", "12", "--minutes", "0.05"]) == 0
    shown = capsys.readouterr().out
    assert "seed     12  fine" in shown and "Next: rose sim --seed 12 --events" in shown


def test_the_command_prints_all_events(capsys):
    assert main(["sim", "--seeds", "12..12", "--minutes", "0.05", "--events"]) == 0
    assert "published version 1" in capsys.readouterr().out


def test_the_command_reports_a_violation_and_how_to_repeat_it(capsys, monkeypatch):
    class Blind(world.InvariantChecker):
        def check_all_done(self) -> None:
            raise world.Violation("the checker raised")

    monkeypatch.setattr(world, "InvariantChecker", Blind)
    assert main(["sim", "--seed", "12", "--minutes", "0.05"]) == 1
    shown = capsys.readouterr().out
    assert "violated: the checker raised" in shown
    assert "the last events before it" in shown
    assert "try: rose sim --seed 12 --minutes 0.05 --events" in shown
