"""Both forms of the report say the same, load nothing, escape everything, and the text has 80 columns."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from tests.unit.kit_reports import full_report

from rose.verify.kit_results import KitFigure, KitSettings, StepResult
from rose.verify.verify_report import (
    COLUMNS,
    html_report,
    number,
    opening,
    served_runs,
    text_report,
    value_text,
    write_pages,
)


def test_the_page_loads_nothing_and_escapes_what_it_shows():
    page = html_report(full_report())
    assert "a &lt;GPU&gt;" in page and "a note &amp; more" in page and "<GPU>" not in page
    assert re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*", page) == [] and "http" not in page


def test_every_step_is_in_both_forms_with_its_reason():
    report = full_report()
    for text in (html_report(report), text_report(report)):
        for result in report.results:
            assert result.step in text
        assert "no GPU" in text and "9 of 10; 1 x failed" in text


def test_replays_are_side_by_side():
    runs = served_runs(full_report())
    assert [run.name for run in runs] == ["alone, 1", "alone, 2", "idle"]
    assert runs[2].latencies["TTFT P99"].value == pytest.approx(99.0) and runs[2].rollout_tokens.value == 1234.5
    page = html_report(full_report())
    [plot] = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    ElementTree.fromstring(plot)
    assert plot.count("<circle") == 6


def test_a_report_without_replays_has_no_plot():
    report = full_report(results=(StepResult("machine", "passed"),))
    assert "<svg" not in html_report(report) and "Users" not in text_report(report)


def test_the_text_has_at_most_eighty_columns():
    long = "a-word " * 40 + "/".join(["folder"] * 30)
    report = full_report(results=(StepResult("idle", "failed", long, 1.0, (), (), {"fact": long}, (long,)),))
    for text in (text_report(full_report()), text_report(report)):
        assert max(map(len, text.splitlines())) <= COLUMNS


@pytest.mark.parametrize(
    "figure, text",
    [
        (KitFigure("x", 98.765, "%", 1000, 97.6, 99.3), "98.77 % (97.60 to 99.30), n = 1,000"),
        (KitFigure("x", 1234.0, "us", None), "1,234 us"),
        (KitFigure("x", 3, "", None), "3"),
        (KitFigure("x", 1.5, "ms", 20, 1.0, None), "1.500 ms (1 to ?), n = 20"),
        (KitFigure("x", None, "ms"), "? ms"),
    ],
)
def test_values_are_shown_with_interval_and_count(figure, text):
    assert value_text(figure) == text


@pytest.mark.parametrize(
    "value, text", [(0.0, "0"), (0.0123, "0.012"), (12.345, "12.35"), (123.45, "123.5"), (-7, "-7")]
)
def test_numbers_have_few_digits(value, text):
    assert number(value) == text


def test_the_opening_counts_and_says_what_kind_of_device():
    text = opening(full_report())
    assert "3 passed, 1 failed, 1 not run" in text and "--resume" not in text
    trial = opening(full_report(settings=KitSettings(device="cpu:0"), ended=0.0))
    assert "says nothing about a GPU" in trial and "--resume" in trial


def test_both_files_are_written(tmp_path):
    write_pages(tmp_path, full_report())
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "report.txt").read_text() == text_report(full_report())
