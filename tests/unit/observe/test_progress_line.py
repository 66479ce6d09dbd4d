"""The line that shows work as it goes."""

from __future__ import annotations

import io
import os
import pty
import termios

import pytest

from rose.observe.progress_line import Part, ProgressLine, duration

PARTS = [Part("step 3"), Part("many details", 2), Part("the result", 1)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "columns, line",
    [
        (80, "step 3, many details, the result"),
        (33, "step 3, many details, the result"),
        (32, "step 3, the result"),
        (12, "step 3"),
        (5, "step"),
    ],
)
def test_parts_of_the_highest_rank_are_left_out_first(columns, line, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert ProgressLine(Terminal(), ", ").fitted(PARTS) == line


def test_a_file_gets_whole_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    assert ProgressLine(io.StringIO(), ", ").fitted(PARTS) == "step 3, many details, the result"


def test_a_shorter_line_covers_the_longer_one_before_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    line = ProgressLine(stream, " ")
    line.show([Part("longer")])
    line.show([Part("short")])
    line.say("stays")
    assert stream.getvalue() == "\rlonger\rshort \r     \rstays\n"


def test_the_width_is_that_of_the_stream_and_not_of_the_standard_output(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    parent, child = pty.openpty()
    try:
        termios.tcsetwinsize(child, (24, 20))
        with os.fdopen(child, "w", closefd=False) as stream:
            assert ProgressLine(stream, ", ").fitted(PARTS) == "step 3, the result"
    finally:
        os.close(parent)
        os.close(child)


@pytest.mark.parametrize("seconds, text", [(0, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_durations_for_people(seconds, text):
    assert duration(seconds) == text
