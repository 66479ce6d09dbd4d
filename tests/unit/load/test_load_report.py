"""Figures: latencies, attainment, bad minutes and misses are what their words say."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.load.driver import Record, RequestOutcome
from rose.load.load_report import LatencyBudget, measure, report_of, request_columns

BUDGET = LatencyBudget(ttft_s=0.5, tpot_s=0.15)


def record(at_s=0.0, tokens=(), outcome=RequestOutcome.DONE, ended_s=None, **known):
    """`tokens` are seconds after the scheduled arrival."""
    stamps = [at_s + after_s for after_s in tokens]
    ended_s = at_s + ended_s if ended_s is not None else (stamps or [at_s])[-1]
    made = Record(0, at_s, 10, len(stamps), sent_s=at_s, ended_s=ended_s, token_s=array("d", stamps), outcome=outcome)
    for name, value in known.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    "story, made, ttft_s, tpot_s, attained",
    [
        ("in budget", record(5, [0.5, 0.6, 0.7]), 0.5, 0.1, 1),
        ("first token late", record(5, [0.51, 0.6]), 0.51, 0.09, 0),
        ("tokens slow", record(5, [0.1, 0.2, 0.5]), 0.1, 0.2, 0),
        ("one token has no TPOT", record(5, [0.1]), 0.1, None, 1),
        ("tokens of one event", record(5, [0.1, 0.1, 0.3, 0.3]), 0.1, 0.2 / 3, 1),
        ("more tokens than events", record(5, [0.1, 0.5], tokens_counted=5), 0.1, 0.1, 1),
        ("rejected", record(5, outcome=RequestOutcome.REJECTED), None, None, 0),
        ("failed half-way", record(5, [0.1, 0.2], RequestOutcome.FAILED), 0.1, None, 0),
        ("timed out before a token", record(5, [], RequestOutcome.TIMED_OUT, 9), 9, None, 0),
        ("timed out in a gap", record(5, [0.1, 0.2], RequestOutcome.TIMED_OUT, 10.1), 0.1, 5.0, 0),
        ("stopped in time", record(5, [], RequestOutcome.CUT, 0.4), None, None, None),
        ("stopped when already late", record(5, [], RequestOutcome.CUT, 0.6), None, None, 0),
        ("stopped after a late first token", record(5, [0.6], RequestOutcome.CUT, 0.7), 0.6, None, 0),
        ("stopped while all was well", record(5, [0.1, 0.2], RequestOutcome.CUT, 0.7), None, None, None),
    ],
)
def test_the_verdict_on_one_request(story, made, ttft_s, tpot_s, attained):
    measures = measure([made], BUDGET)
    found = [column[0] for column in (measures.ttft_s, measures.tpot_s, measures.attained)]
    assert found == pytest.approx([math.nan if x is None else x for x in (ttft_s, tpot_s, attained)], nan_ok=True), (
        story
    )


def test_every_token_but_the_first_has_a_gap():
    records = [record(0, [0.1, 0.2, 0.2, 0.5]), record(9, [1.0], RequestOutcome.TIMED_OUT, 60), record(9, [])]
    assert sorted(measure(records, BUDGET).gap_s) == pytest.approx([0.0, 0.1, 0.3, 59.0])


def test_a_request_under_way_is_not_in_a_report():
    report = report_of([record(0, [0.1, 0.2]), record(0, [0.1], None)], BUDGET, 1.0)
    assert (report["requests"], report["attained"]) == (1, 1)


outcomes = st.sampled_from([*RequestOutcome])
requests = st.builds(
    record,
    at_s=st.floats(0, 300),
    tokens=st.lists(st.floats(0.01, 1.2), min_size=1, max_size=5).map(sorted),
    outcome=outcomes,
    ended_s=st.just(1.3),
)


@given(st.lists(requests, max_size=60))
def test_the_figures_of_a_report_agree(records):
    report = report_of(records, BUDGET, 300.0)
    assert report["requests"] == sum(minute["requests"] for minute in report["per_minute"])
    assert sum(report[str(outcome)] for outcome in RequestOutcome) == len(records)
    assert report["attained"] <= report["done"]
    assert report["requests"] - report["attained"] >= report["rejected"] + report["timed_out"] + report["failed"]
    weighted = sum(minute["requests"] * minute["attainment"] for minute in report["per_minute"])
    assert weighted == pytest.approx(report["attained"], abs=1e-3)
    assert report["violation_minutes"] <= report["minutes"] == len(report["per_minute"])
    if report["ttft_p95_ms"] is not None:
        assert report["worst_minute_ttft_p99_ms"] >= report["ttft_p95_ms"]


def test_a_violation_minute_has_over_one_miss_in_a_hundred():
    good, bad = [0.1, 0.2], [0.9, 1.0]
    records = [record(30, good) for _ in range(99)] + [record(30, bad)]
    records += [record(90, good) for _ in range(98)] + [record(90, bad)]
    records += [record(150, good)]
    report = report_of(records, BUDGET, 180.0)
    assert [minute["is_violation"] for minute in report["per_minute"]] == [False, True, False]
    assert (report["minutes"], report["violation_minutes"]) == (3, 1)
    assert report["worst_minute_ttft_p99_ms"] == 900


def test_a_gap_belongs_to_the_minute_of_its_request():
    records = [record(30, [0.1, 0.2]), record(59, [0.1, 0.2, 2.1]), record(90, [0.1, 0.6])]
    records += [record(150, [0.1]), record(150, [0.1, 9.0], RequestOutcome.CUT, 9.5)]
    report = report_of(records, BUDGET, 180.0)
    assert [minute["itl_p99_ms"] for minute in report["per_minute"]] == [1900, 500, None]
    assert report["worst_minute_itl_p99_ms"] == 1900


@pytest.mark.parametrize("count, tail", [(999, "p95"), (1000, "p99")])
def test_p99_needs_a_thousand_requests(count, tail):
    records = [record(number * 0.01, [0.001 * (number + 1), 2.0]) for number in range(count)]
    report = report_of(records, BUDGET, 10.0)
    assert report["tail"] == tail
    assert report["ttft_p95_ms"] == pytest.approx(math.ceil(0.95 * count))
    assert report["ttft_p99_ms"] == (990 if tail == "p99" else None)
    assert (report["p99_missing_because"] is None) == (tail == "p99")
    assert report["budget_used_ttft"] == pytest.approx(report[f"ttft_{tail}_ms"] / 500)


def test_lateness_and_waits_for_a_place_are_counted():
    records = [
        record(1, [0.1], sent_s=1.2, was_held=True),
        record(2, [0.1], sent_s=2.0),
        record(3, [], sent_s=math.nan),
    ]
    report = report_of(records, BUDGET, 4.0)
    assert (report["late_p50_ms"], report["late_max_ms"], report["held_back"]) == (0.0, 200.0, 1)


def test_a_report_of_no_requests_has_null_figures():
    report = report_of([], BUDGET, 0.0)
    assert report["attainment"] is None and report["ttft_p50_ms"] is None and report["offered_requests_per_s"] is None


def test_offered_load_is_by_arrivals_and_served_load_by_the_run():
    report = report_of([record(at_s, [8.0, 9.0]) for at_s in (0, 1, 2, 3)], BUDGET, 12.0)
    assert report["offered_requests_per_s"] == 1.0
    assert (report["prompt_tok_s"], report["output_tok_s"]) == (
        pytest.approx(40 / 12, abs=0.01),
        pytest.approx(8 / 12, abs=0.01),
    )


def test_request_columns_hold_what_pairing_needs():
    records = [record(0, [0.1, 0.3]), record(1, outcome=RequestOutcome.CUT, ended_s=0.1)]
    rows = request_columns(records, measure(records, BUDGET))
    assert rows["attained"] == [0, None]
    assert rows["ttft_ms"] == [100.0, None]
    assert rows["outcome"] == ["done", "cut"]
