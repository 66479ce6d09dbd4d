"""Text for a terminal: the progress line and the report."""

from __future__ import annotations

import io

import pytest
from tests.unit.load.test_driver import BUDGET as DEFAULT_BUDGET
from tests.unit.load.test_driver import Scripted, sent, trace_of
from tests.unit.load.test_load_report import BUDGET, record

from rose.load.driver import RequestOutcome
from rose.load.load_report import report_of
from rose.load.terminal import LoadProgress, table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_counts_attainment_and_tails(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = LoadProgress(DEFAULT_BUDGET, stream)
    _, loop = sent(trace_of([0, 1, 2]), Scripted([0.1, 0.1, 0.9]), on_end=progress.add)
    progress.show(loop)
    shown = stream.getvalue()
    assert "3 of 3 sent  0 running  3 done  66.67 % attained  TTFT P95 900 ms  TPOT P95 100" in shown
    progress.clear()
    assert stream.getvalue() == f"{shown}\r{' ' * (len(shown) - 1)}\r"


def test_progress_into_a_file_is_lines_that_stay():
    stream = io.StringIO()
    progress = LoadProgress(DEFAULT_BUDGET, stream)
    _, loop = sent(trace_of([0]), Scripted([0.1]))
    progress.show(loop)
    progress.clear()
    assert stream.getvalue() == "0 s  1 of 1 sent  0 running  0 done\n"
    assert progress.every_s > LoadProgress(DEFAULT_BUDGET, Terminal()).every_s


def test_the_table_warns_of_lateness_and_waits_for_a_place():
    records = [record(1, [0.1], sent_s=1.2, was_held=True), record(2, [0.1], sent_s=2.0)]
    text = table(report_of(records, BUDGET, 4.0), BUDGET)
    assert "raise --running-max" in text and "too busy to measure" in text


def test_the_table_has_a_worst_minute_and_no_budget_for_gaps():
    records = [record(30, [0.1, 0.2]), record(59, [0.1, 0.2, 2.1]), record(90, [0.1, 0.6])]
    text = table(report_of(records, BUDGET, 180.0), BUDGET)
    (row,) = [line.split() for line in text.splitlines() if "ITL" in line]
    assert row[-2:] == ["1,900", "-"]


@pytest.mark.parametrize("count, tail", [(999, "P95"), (1000, "P99")])
def test_the_table_shows_the_tail_that_the_requests_support(count, tail):
    records = [record(number * 0.01, [0.1, 0.2]) for number in range(count)]
    text = table(report_of(records, BUDGET, 10.0), BUDGET)
    assert tail in text.splitlines()[0] and ("P95 and not P99" in text) == (tail == "P95")


def test_the_table_of_no_requests_can_be_shown():
    assert "nothing to judge" in table(report_of([], BUDGET, 0.0), BUDGET)


def test_the_table_counts_misses_by_kind():
    records = [record(0, [0.9, 1.0]), record(0, outcome=RequestOutcome.REJECTED), record(0, [0.1, 0.2])]
    records += [record(0, outcome=RequestOutcome.FAILED, detail="500: oops") for _ in range(2)]
    text = table(report_of(records, BUDGET, 1.0), BUDGET)
    assert "4: 1 rejected, 2 failed, 1 too slow" in text
    assert "2 failed: 500: oops" in text
