"""The report of a run: one page that holds everything and loads nothing."""

from __future__ import annotations

import re
from dataclasses import asdict
from xml.etree import ElementTree

import pytest
from tests.unit.launch_lines import html_report, run_lines, served, step, summary_of

from rose.config.yaml_text import write
from rose.run.run_report import usd_pair
from rose.run.run_settings import AsynchronySettings, RunSettings

SETTINGS = "serving:\n  lend:\n    ttft_ms: 250.0\n    tpot_ms: 80.0\nname: <b>&\n"


def page(lines, rows=(), settings=SETTINGS):
    return html_report(summary_of(lines, rows) | {"name": "<x>"}, lines, rows, settings)


def text_of(settings):
    return write(asdict(settings))


def pictures(text):
    return re.findall(r"<svg.*?</svg>", text, re.DOTALL)


@pytest.mark.parametrize("steps", [0, 8])
def test_a_run_that_ended_early_says_so(steps):
    lines = run_lines(steps)
    assert "The run" not in page(lines)
    assert "The run was interrupted." in page([*lines, {"kind": "ended", "how": "interrupted", "why": ""}])
    assert "The run failed: a &lt;b&gt;." in page([*lines, {"kind": "ended", "how": "failed", "why": "a <b>"}])


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


def test_a_picture_of_a_long_run_has_no_more_blocks_than_the_eye_can_see():
    lines = []
    for second in range(0, 9000, 2):
        turns = {"dedicated": second, "borrowed": 2 * second}
        lines.append({"kind": "sample", "at_s": 100.0 + second, "turns": turns, "running": {}, "version": "1"})
    lines += [step(number, 100.0 + 4 * number) for number in range(2000)]
    picture = pictures(page(lines))[4]
    for kind in ("dedicated", "borrowed", "trainer", "publishing"):
        assert 200 <= picture.count(f'class="area {kind}"') <= 401
    assert sum(int(turns) for turns in re.findall(r"<title>(\d+) turns</title>", picture)) == 3 * 8998, "all are told"
    assert "<title>step 0 to step 5</title>" in picture


def test_headline_then_pictures_then_tables():
    text = page(run_lines(), [served(100 + second / 2) for second in range(80)])
    places = [
        text.index(part) for part in ('class="tiles"', "<svg", "<h2>Cost per correct", "<h2>Figures", "Settings<")
    ]
    assert places == sorted(places)
    tiles = re.findall(r'<div class="tile[^"]*"><b>(.*?)</b><span>(.*?)</span>', text)
    assert tiles[0] == ("60.0%", "held-out success") and ("0", "lost or doubled") in tiles
    assert ("x 1.65", "whole steps") in tiles and ("17 of 17", "serving in budget") in tiles
    assert "started again" in text and "trouble" not in text.partition("<body>")[2]


def test_it_opens_with_what_was_learnt_and_how():
    text = page(run_lines(8, compare=False), settings=text_of(RunSettings()))
    assert "<p>8 steps of DAPO on frozenlake in 25 s, 512 trajectories.</p>" in text
    asynchronous = RunSettings(environment="alfworld", asynchrony=AsynchronySettings(is_used=True), agent="a.py:play")
    assert "8 steps of asynchronous DAPO on alfworld, with an agent of its own in" in page(
        run_lines(), settings=text_of(asynchronous)
    )
    resumed = [*run_lines(4), {"kind": "resume", "step": 4}]
    assert "it went on after 1 interruption." in page(resumed)


def test_what_no_figure_says_stands_below_the_headline():
    lines = [line for line in run_lines() if line["kind"] != "death"]
    assert 'class="notes"' not in page(lines), "all was well"
    text = page([*lines, {"kind": "closed", "worker": "borrowed", "why": "<late> steps"}])
    assert "<li>worker borrowed took no turns for a while: &lt;late&gt; steps</li>" in text
    assert text.index('class="tiles"') < text.index('class="notes"') < text.index("<svg")
    assert 'class="notes"' in page([{"kind": "death", "role": "gateway", "is_restarted": True}]), "without a step too"


def test_figures_of_weights_devices_and_age():
    lines = [*run_lines(2, compare=False), step(3, 120.0, pause_s=0.012, staleness_max=2)]
    text = page(lines)
    assert "turns stood still for 12 ms" in text and "2 versions old" in text and "no device was" in text
    moments = {"wanted_s": 103.0, "chosen_s": 103.0, "usable_s": 103.21, "returned_s": 106.0, "released_s": 106.0}
    assert "1 time; on its way for 1.00% of the time" in page(
        [*lines, {"kind": "allocation", "number": 1, "name": "a", **moments}]
    )


def test_the_share_of_actions_that_were_not_understood_is_in_the_table():
    text = page([*run_lines(2, compare=False), step(3, 120.0, invalid_turns=15)])
    assert "<tr><td>actions not understood</td><td>5.0%</td></tr>" in text
    compared = re.findall(r"<tr><td>(.*?)</td>", page(run_lines()).partition("<h2>Figures")[2])
    assert compared[3:8] == [
        "actions not understood", "rollout share of a step", "with the borrowed device", "serving in budget",
        "the same, held back",
    ]  # fmt: skip


def test_requests_are_those_that_the_figure_is_of():
    rows = [served(100 + second / 2) for second in range(80)]
    lent = summary_of(run_lines(), rows)["serving_requests_lent"]
    text = page(run_lines(), rows)
    assert f"<b>{lent} of {lent}</b>" in text and "requests of users while the device was lent (" in text


def test_trouble_is_marked():
    lines = [*run_lines(), {"kind": "balance", "begun": 9, "lost": 1, "doubled": 1, "differing": 0}]
    assert '<div class="tile trouble"><b>2</b><span>lost or doubled</span>' in page(lines)


def test_the_cost_is_there_with_its_factors_and_what_it_would_have_been():
    text = page(run_lines())
    for words in ("CPM x R x (1 + rho) / alpha", "as the total over the correct trajectories says", "at the margin"):
        assert words in text
    assert "measured, from the steps without the device" in text
    assert "not measured, and not in the bill" in text, "lines of this run know nothing of bytes"
    assert text.count('class="bar"') == 2


def test_a_sum_that_does_not_add_up_is_said():
    summary = {"name": "x"} | summary_of(run_lines(), [])
    wrong = summary | {"cost": summary["cost"] | {"is_consistent": False}}
    assert "NOT what the total" in html_report(wrong, run_lines(), [], SETTINGS)


def test_counts_that_contradict_each_other_are_said():
    lines = [line | ({"turns": 900, "pool_tokens": 600} if line["kind"] == "step" else {}) for line in run_lines()]
    text = page(lines)
    assert "counts of turns and tokens contradict each other" in text
    assert re.search(r'<div class="tile trouble"><b>[^<]*</b><span>cost</span>', text)


def test_without_a_correct_trajectory_there_is_a_bill():
    lines = [line | ({"successes": 0} if line["kind"] == "step" else {}) for line in run_lines()]
    text = page(lines)
    assert "there is a bill and no cost of a correct answer" in text and "Three prices" in text


def test_every_step_has_a_row_with_what_it_knows():
    lines = run_lines(2, compare=False)
    shares = {"clipped_share": 0.015, "drifted_share": 0.03}
    lines[-3:-3] = [step(3, 120.0, entropy=0.25, staleness_max=2, logprob_gap_mean=0.001, **shares)]
    rows = re.findall(r"<tr><td>(\d+)</td>(.*?)</tr>", page(lines).partition("Every step")[2])
    assert [number for number, _ in rows] == ["1", "2", "3"]
    assert "<td>0.25</td><td>0.001</td>" in rows[2][1] and "<td>1.5%</td><td>3.0%</td><td>2</td>" in rows[2][1]
    assert "<td>-</td>" in rows[0][1], "an older run did not write it"


@pytest.mark.parametrize(
    "value, other, expected",
    [
        (0.5, 0.25, ("0.5", "0.25", "one correct answer")),
        (2e-4, 1e-5, ("0.2", "0.01", "1,000 correct answers")),
        (8.4e-7, 1.116e-6, ("0.84", "1.12", "a million correct answers")),
        (0.0, 0.0, ("0", "0", "a million correct answers")),
    ],
)
def test_money_is_shown_for_as_many_answers_as_make_it_readable(value, other, expected):
    assert usd_pair(value, other) == expected


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
