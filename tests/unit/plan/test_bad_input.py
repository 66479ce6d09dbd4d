"""Bad input of `rose plan`: each kind is refused in words, or answered with what was made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.plan_world import CONTEXT_TOKENS, shorten, small_fleet, small_job, steady

from rose.cli.main import main
from rose.plan import planning
from rose.plan.planning import GPU_PRICES, PlanReport, make_plan
from rose.plan.traffic import FleetTraffic, recorded_traffic
from rose.plan.windows import WINDOW_S

HEAD = "arrival_s,prompt_tokens,output_tokens\n"


def csv(*rows: tuple[float, int, int]) -> str:
    return HEAD + "".join(f"{at_s:g},{prompt},{output}\n" for at_s, prompt, output in rows)


STEADY = [(10.0 * n, 100, 10) for n in range(100)]


def read(folder: Path, text: str) -> FleetTraffic:
    (folder / "trace.csv").write_text(text)
    return recorded_traffic(folder / "trace.csv", CONTEXT_TOKENS, 24, WINDOW_S)


@pytest.mark.parametrize(
    "story, rows, words",
    [
        ("gaps", [(0.5, 100, 10), (9000.5, 100, 10)], "1 pauses without a request, the longest 2.5 h: counted as no"),
        ("zero prompts", [*STEADY[:50], (600.5, 0, 10)], "1 of 51 requests have a prompt or an answer of 0 tokens"),
        ("zero answers", [(0.5, 100, 0), *STEADY], "1 of 101 requests have a prompt or an answer of 0 tokens"),
        ("unsorted", [(500.5, 7, 7), *STEADY], "not in order of arrival (1 places): they were sorted"),
        ("one request", [(0.0, 100, 10)], "the trace has only 0 s of a window"),
        ("too long for the model", [(0.5, 10**6, 10), *STEADY], "1 of 101 requests cut to the context"),
    ],
)
def test_what_was_mended_is_told(story: str, rows: list[tuple[float, int, int]], words: str, tmp_path: Path) -> None:
    traffic = read(tmp_path, csv(*rows))
    assert any(words in note for note in traffic.notes), (story, traffic.notes)


def test_an_unsorted_trace_is_the_sorted_one(tmp_path: Path) -> None:
    one, other = read(tmp_path, csv(*STEADY)), read(tmp_path, csv(*reversed(STEADY)))
    assert one.hours == other.hours and one.source.count((0.0, 500.0)) == other.source.count((0.0, 500.0)) == 50


def test_a_short_trace_in_milliseconds_is_asked_about(tmp_path: Path) -> None:
    milliseconds = read(tmp_path, csv(*[(30_000 * n, 100, 10) for n in range(20)]))
    assert "one in 30,000 s (are its arrivals in milliseconds?)" in milliseconds.what
    assert "milliseconds" not in read(tmp_path, csv(*STEADY)).what


@pytest.mark.parametrize(
    "story, text, words",
    [
        ("negative prompt", csv((0, -1, 5)), "line 2: -1 is not a possible number of tokens"),
        ("negative answer", csv((0, 5, -1)), "line 2: -1 is not a possible number of tokens"),
        ("negative time", csv((0, 5, 5), (-3, 5, 5)), "line 3: arrival -3 is not a time from the start"),
        ("no number", HEAD + "now,5,5\n", "arrival `now` is not a number"),
        ("not finite", HEAD + "nan,5,5\n", "arrival nan is not a time from the start"),
        ("half a token", HEAD + "0,5.5,5\n", "`5.5` is not a whole number of tokens"),
        ("hours in milliseconds", csv((0, 5, 5), (3_600_000, 5, 5)), "spans 42 days, more than 14: are its arrivals"),
        ("unix milliseconds", HEAD + "1700000000000,5,5\n1700000600000,5,5\n", "after the year 5000: are its arrivals"),
        ("nothing", HEAD, "has no requests"),
        ("another table", "time,tokens\n1,2\n", "is not the header of a trace"),
        ("binary", "\0\1\2", "is not the header of a trace"),
    ],
)
def test_what_is_no_trace_is_refused_in_words(
    story: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.csv").write_text(text)
    assert main(["plan", "--trace", str(tmp_path / "trace.csv")]) == 2, story
    error = capsys.readouterr().err
    assert words in error and "try:" in error and "Traceback" not in error, (story, error)


@pytest.mark.parametrize(
    "words, why",
    [
        (
            ["--serving", "qwen2.5-72b:tp1"],
            "the models do not fit: 1 x H800 SXM has 65.2 GiB to use; Qwen2.5-72B takes",
        ),
        (["--devices", "4xl40s"], "4 devices are less than one group of 8"),
        (["--devices", "1xh800"], "1 device is less than one group of 4, which both models need"),
        (["--devices", "3xh800"], "3 devices are less than one group of 4"),
        (["--devices", "0xh800"], "0 devices cannot be planned for"),
        (["--tpot-ms", "5"], "serving alone cannot meet --tpot-ms 5: a decode step takes 9."),
        (["--ttft-ms", "8"], "serving alone cannot meet --ttft-ms 8: a prompt of 128 tokens takes 10.8 ms"),
    ],
)
def test_a_fleet_that_cannot_serve_is_refused_with_its_figure(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--rate", "1", *words]) == 2
    error = capsys.readouterr().err
    assert why in error and "try:" in error, error


def planned(monkeypatch: pytest.MonkeyPatch, rate: float, **changes: object) -> PlanReport:
    shorten(monkeypatch)
    monkeypatch.setattr(planning, "phases_of", lambda *_: 2)
    fleet = small_fleet(**changes)
    return make_plan(fleet, steady(rate), small_job(fleet), GPU_PRICES, "decode", 0, lambda *_: None)


def test_without_traffic_the_plan_says_to_borrow_the_devices_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    report = planned(monkeypatch, 0.0)
    assert report.advice.startswith("No request arrived in any window: borrow these devices whole")
    assert report.requests == 0 and report.lent_share.value > 0.9 and report.economics.frontier.lines == ()


def test_one_device_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    report = planned(monkeypatch, 1.0, devices="1xh800")
    assert [point.devices for point in report.points] == [0, 1] and report.advice


def test_budgets_that_serving_alone_misses_are_said_with_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    report = planned(monkeypatch, 60.0, devices="1xh800", ttft_ms=30.0)
    assert report.advice.startswith("Mend serving first: alone it keeps only ")
    assert "within 0.03 s and 450 ms a token" in report.advice
