"""The report of a run: one page that holds everything and loads nothing."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.unit.launch_lines import run_lines, served

from rose.launch.drawing import Picture, powers, round_up, steps
from rose.launch.figures import summary_of
from rose.launch.report import html_report

SETTINGS = "serving:\n  lend:\n    ttft_ms: 250.0\n    tpot_ms: 80.0\nname: <b>&\n"


def page(lines, rows=()):
    return html_report({"name": "<x>"} | summary_of(lines, rows), lines, rows, SETTINGS)


def pictures(text):
    return re.findall(r"<svg.*?</svg>", text, re.DOTALL)


def test_all_pictures_are_there_and_well_formed():
    text = page(run_lines(), [served(100 + second / 2) for second in range(80)])
    found = pictures(text)
    assert [re.search('aria-label="([^"]*)"', picture)[1] for picture in found] == [
        "Learning curve",
        "Throughput by pool",
        "Time to first token, ms",
        "Time per token, ms",
        "Who ran what when",
    ]
    for picture in found:
        ElementTree.fromstring(picture)
    assert "budget 250 ms" in found[2] and "budget 80 ms" in found[3]
    assert "dedicated died" in found[4]


def test_nothing_is_loaded_from_elsewhere_and_nothing_is_taken_for_markup():
    text = page(run_lines(), [served(101.0)])
    assert not re.search(r"https?://|<script|src=|@import|url\(", text)
    assert "<x>" not in text and "&lt;x&gt;" in text and "&lt;b&gt;&amp;" in text


def test_no_number_in_it_is_no_number():
    text = page(run_lines(), [served(101.0, ttft_ms=0.0), served(102.0, ttft_ms=9000.0)])
    assert not re.search(r"\b(nan|inf)\b", text)


def test_a_run_without_steps_or_users_has_a_page_too():
    assert "No step was finished" in page([])
    assert len(pictures(page(run_lines(1, compare=False)))) == 5


def test_axes_have_round_numbers():
    assert steps(0, 15) == [0, 5, 10, 15]
    assert steps(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert steps(3, 3) == [3]
    assert powers(0.1, 1000) == [0.1, 1, 10, 100, 1000]
    assert (round_up(0), round_up(7.1), round_up(230)) == (1.0, 8.0, 300.0)


def test_what_is_out_of_range_stays_in_the_frame():
    picture = Picture("x", (0, 1), (0, 1), "s")
    assert picture.up(-5) == picture.up(0) and picture.up(5) == picture.up(1)
