"""What a run shows while it goes."""

from __future__ import annotations

import io

import pytest
from tests.unit.launch_lines import record, step

from rose.run.run_progress import Live, Screen, live_parts


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError("nobody reads")


def said_step(record_of_step, attainment, left_s, stream=None):
    stream = stream or io.StringIO()
    Screen(15, stream).say_step(record_of_step, attainment, left_s)
    return stream.getvalue()


def test_a_step_in_one_line():
    line = said_step(record(step(3, 0.0)), 0.998, 75.0)
    assert line == (
        "step   3/15  success  30%  groups 8/11  rollout 2.0 s  train 1.0 s  "
        "trajectories/s 10.7 dedicated + 21.3 borrowed  serving 99.8% in budget  1 min 15 s left\n"
    )
    none = record(step(3, 0.0, trajectories=0, successes=0, turns=0))
    assert "success    -  groups" in said_step(none, None, 1.0), "none ended since the step before"
    assert "[rolled back]" in said_step(record(step(3, 0.0, verdict="rolled_back")), None, 1.0)


@pytest.mark.parametrize("columns", [50, 80, 100, 120, 200])
def test_no_line_is_wider_than_its_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    live = Live("rollouts", 4, 10, 54, 30.0, 61.0, 1.0, 80.0)
    stream = Terminal()
    screen = Screen(15, stream)
    screen.live = live
    screen.show()
    screen.say_step(record(step(3, 0.0, verdict="rolled_back")), 0.998, 75.0)
    screen.show()
    lines = stream.getvalue().replace("\n", "\r").split("\r")
    assert max(map(len, lines)) < columns
    assert any(line.startswith("step 4 of 15: rollouts") for line in lines)
    assert any(line.startswith("step   3/15  success  30%") and "[rolled" in line for line in lines)


def test_what_is_going_on():
    live = Live("rollouts", 4, 10, 54, 30.0, 61.0, 1.0, 80.0)
    assert " | ".join(part.text for part in live_parts(live, 15)) == (
        "step 4 of 15: rollouts | 10 trajectories done, 54 under way | turns/s: 30 dedicated, 61 borrowed | "
        "serving 100.0% in budget | 1 min 20 s left"
    )
    assert [part.text for part in live_parts(Live(), 15)] == ["starting"]


def test_a_terminal_has_a_line_that_moves_and_lines_that_stay():
    stream = Terminal()
    screen = Screen(15, stream)
    screen.show()
    screen.say("stays")
    shown = stream.getvalue()
    assert shown.startswith("\rstarting") and shown.endswith("\rstays\n")


def test_a_file_gets_lines_that_stay_only():
    stream = io.StringIO()
    screen = Screen(15, stream)
    screen.show()
    screen.say("stays")
    assert stream.getvalue() == "stays\n"


def test_a_reader_who_leaves_does_not_end_the_run():
    screen = Screen(15, Gone())
    screen.say("to nobody")
    assert screen.every_s > 1
