"""The picture of a run: bins that lose nothing, and an SVG that any reader can open."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.load.driver import Record, RequestOutcome
from rose.load.harvest import Harvest
from rose.load.load_report import LatencyBudget
from rose.load.picture import BINS_MAX, draw, series_of, width_s

BUDGET = LatencyBudget(ttft_s=0.5, tpot_s=0.15)
SVG = "{http://www.w3.org/2000/svg}"


def answered(index: int, scheduled_s: float, ttft_s: float = 0.1, gap_s: float = 0.01, tokens: int = 3) -> Record:
    stamps = [scheduled_s + ttft_s + number * gap_s for number in range(tokens)]
    return Record(
        index,
        scheduled_s,
        prompt_tokens=8,
        wanted_tokens=tokens,
        sent_s=scheduled_s,
        ended_s=stamps[-1],
        token_s=array("d", stamps),
        outcome=RequestOutcome.DONE,
    )


def missed(index: int, scheduled_s: float, outcome: RequestOutcome) -> Record:
    return Record(index, scheduled_s, 8, 3, sent_s=scheduled_s, ended_s=scheduled_s + 1.0, outcome=outcome)


def drawn(records: list[Record], harvest: Harvest | None = None, title: str = "a run") -> ElementTree.Element:
    return ElementTree.fromstring(draw(records, BUDGET, title=title, harvest=harvest or Harvest()))


def words(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


def marks(svg: ElementTree.Element, tag: str, kind: str) -> int:
    return sum(kind in found.get("class", "").split() for found in svg.iter(f"{SVG}{tag}"))


@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 40), st.integers(1, 20)), min_size=1, max_size=40))
def test_bins_lose_no_request_and_no_token(rows):
    records = [answered(number, at_s, ttft_s, tokens=tokens) for number, (at_s, ttft_s, tokens) in enumerate(rows)]
    series = series_of(records, BUDGET, Harvest())
    assert series.requests.sum() * series.bin_s == pytest.approx(len(records))
    assert series.output_tokens.sum() * series.bin_s == pytest.approx(sum(record.tokens for record in records))
    assert np.nanmax(series.ttft_p99_s) == pytest.approx(
        max(record.token_s[0] - record.scheduled_s for record in records)
    )
    assert len(series.requests) <= BINS_MAX and np.all(np.isnan(series.ttft_p99_s) == (series.requests == 0))


@given(st.floats(0, 1e7))
def test_bins_are_at_most_bins_max(duration_s):
    found = width_s(duration_s)
    assert found >= 1 and math.floor(duration_s / found) + 1 <= BINS_MAX


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 500)), min_size=2, max_size=30),
    st.floats(0, 60),
)
def test_harvested_tokens_sum_to_the_growth_of_the_counter(steps, start_s):
    at_s = [start_s + moment_s for moment_s in np.cumsum([gap_s for gap_s, _ in steps]).tolist()]
    tokens = np.cumsum([gained for _, gained in steps]).tolist()
    series = series_of([answered(0, at_s[-1] + 1)], BUDGET, Harvest(at_s, tokens))
    edges_s = np.arange(len(series.requests) + 1) * series.bin_s
    looked_s = np.clip(edges_s[1:], at_s[0], at_s[-1]) - np.clip(edges_s[:-1], at_s[0], at_s[-1])
    assert np.nansum(series.harvested_tokens * looked_s) == pytest.approx(tokens[-1] - tokens[0], abs=1e-6)


def test_a_counter_that_restarted_harvests_nothing_negative():
    series = series_of([answered(0, 9.5)], BUDGET, Harvest([0.0, 2.0, 4.0, 6.0], [100.0, 300.0, 10.0, 50.0]))
    assert series.harvested_tokens[:6].tolist() == pytest.approx([100, 100, 0, 0, 20, 20])
    assert np.all(np.isnan(series.harvested_tokens[6:]))


def test_a_good_run_has_no_red_mark():
    svg = drawn([answered(number, float(number)) for number in range(20)])
    assert "20 of 20 requests in budget (>= 83.8 % at 95 % confidence)" in words(svg)
    assert marks(svg, "circle", "over") == marks(svg, "path", "over") == 0
    assert marks(svg, "line", "budget") == 2 and {"budget 500 ms", "budget 150 ms"} <= set(words(svg))


def test_late_and_unanswered_requests_are_marked():
    records = [answered(0, 0.0), answered(1, 1.0, ttft_s=0.9), answered(2, 2.0, gap_s=0.4), answered(3, 5.0)]
    records += [
        missed(4, 3.0, RequestOutcome.REJECTED),
        missed(5, 3.5, RequestOutcome.FAILED),
        missed(6, 7.0, RequestOutcome.CUT),
    ]
    svg = drawn(records)
    assert marks(svg, "circle", "over") == 2
    assert marks(svg, "path", "over") == 1
    assert any("2 requests without an answer" in text for text in words(svg))


def test_a_time_out_and_a_budget_fit_one_axis():
    svg = drawn([answered(0, 0.0, ttft_s=0.004), answered(1, 1.0, ttft_s=30.0)])
    assert {"1 ms", "100 s"} <= set(words(svg))


def test_a_gap_in_the_traffic_is_a_gap_in_the_line():
    svg = drawn([answered(number, at_s) for number, at_s in enumerate([0.0, 1.0, 2.0, 8.0, 9.0])])
    assert marks(svg, "polyline", "tail") == 4  # two stretches in each of the two latency panels


@pytest.mark.parametrize("has_harvest", [False, True])
def test_the_harvest_has_a_panel_only_if_it_was_seen(has_harvest):
    harvest = Harvest([0.0, 1.0, 2.0], [0.0, 50.0, 100.0]) if has_harvest else Harvest()
    svg = drawn([answered(0, 0.0), answered(1, 2.0)], harvest)
    assert any(text.startswith("Harvested") for text in words(svg)) is has_harvest


@pytest.mark.parametrize(
    "records", [[], [missed(0, 0.0, RequestOutcome.REJECTED)], [answered(0, 0.0, ttft_s=0.0, tokens=1)]]
)
def test_a_run_with_almost_no_data_is_drawn(records):
    assert "Time to first token" in words(drawn(records))


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), max_size=40))
def test_any_title_is_shown_as_it_is(title):
    assert title in words(drawn([answered(0, 0.0)], title=title))


def test_a_day_of_requests_is_a_small_self_contained_file():
    records = [answered(number, number * 43.2, tokens=2) for number in range(2000)]
    text = draw(records, BUDGET, title="a day", harvest=Harvest())
    assert len(text) < 60_000 and "href" not in text and "url(" not in text
    assert "24 h" in text or "12 h" in text
