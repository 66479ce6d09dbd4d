"""`rose plan`: what is refused in words before anything is simulated, and its screen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.plan.test_plan_page import REPORT

from rose.cli.main import main
from rose.cli.plan import WIDTH, bars, screen

RATE = ["--rate", "1"]


@pytest.mark.parametrize(
    "words, why",
    [
        ([], "no traffic is given"),
        ([*RATE, "--trace", "a.csv"], "either a trace or a rate"),
        (["--trace", "missing.csv"], "missing.csv"),
        (["--rate", "-1"], "-1 requests a second"),
        (["--rate", "nan"], "nan requests a second"),
        (["--rate", "1e9"], "requests a second cannot be planned for"),
        ([*RATE, "--prompt-tokens", "0"], "--prompt-tokens 0 is no mean length"),
        ([*RATE, "--output-tokens", "99999"], "--output-tokens 99999 is no mean length"),
        ([*RATE, "--devices", "64"], "there is no device `64`"),
        ([*RATE, "--devices", "64 h800"], "names no devices"),
        ([*RATE, "--devices", "64xtpu"], "there is no device `tpu`"),
        ([*RATE, "--serving", "gpt-5"], "there is no model `gpt-5`"),
        ([*RATE, "--serving", "qwen2.5-72b:tp1"], "GiB to use"),
        ([*RATE, "--rollout", "qwen3-32b:tp3"], "no tensor-parallel degree"),
        ([*RATE, "--tpot-ms", "1"], "serving alone cannot meet --tpot-ms 1"),
        ([*RATE, "--ttft-ms", "0"], "ttft_ms"),
        ([*RATE, "--dedicated", "-1"], "dedicated"),
        ([*RATE, "--train-gpus", "0"], "without --train-gpus"),
        ([*RATE, "--job", "ppo:1x1"], "this is no job"),
        ([*RATE, "--job", "grpo:16x4,turns=go"], "no trajectory lengths for `go`"),
        ([*RATE, "--job", "grpo:65536x16"], "too many to simulate"),
        ([*RATE, "--hours", "25"], "25 hours cannot be planned for"),
        ([*RATE, "--profile", "missing.json"], "no step profile"),
        ([*RATE, "--prices", "missing.yaml"], "missing.yaml"),
        ([*RATE, "--html", "no/such/folder/plan.html"], "there is no folder"),
    ],
)
def test_bad_input_is_refused_in_words(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert why in error and "try:" in error and "Traceback" not in error


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "has no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n", "has no requests"),
        ("a,b\n1,2\n", "not the header of a trace"),
        ("arrival_s,prompt_tokens,output_tokens\n0,-5,10\n", "line 2: -5 is not a possible number of tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n-1,5,10\n", "line 2: arrival -1 is not a time from the start"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5\n", "line 2: 2 columns where the header has 3"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,5\n3600000,5,5\n", "in milliseconds"),
        ('{"status": "success"}', "no export of Prometheus"),
    ],
)
def test_a_bad_trace_is_refused_in_words(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    assert main(["plan", "--trace", str(path)]) == 2
    assert why in capsys.readouterr().err


def test_the_screen_has_eighty_columns() -> None:
    lines = screen(REPORT).splitlines()
    assert max(map(len, lines)) <= WIDTH and len(lines) <= 45
    assert any("Borrow <all>." in line for line in lines)
    assert "not measured" in screen(replace(REPORT, held_back={}))


def test_bars_are_fuller_the_more_is_lent() -> None:
    assert bars([0.0, 0.5, 1.0, 7.0]) == " ▄██"


def test_a_report_is_json() -> None:
    import msgspec

    assert json.loads(msgspec.json.encode(REPORT))["points"][0]["step_s"] is None
