"""`rose load` on a running device: counts and files are right, Ctrl-C leaves a report, trouble is told in words."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from tests.integration import devices

from rose.load.generators import generated
from rose.load.load_run import LoadPlan, run_load

PATIENCE_S = 60.0
SPEC = "gamma:rate=5,cv=2"


def command(source, *flags):
    return [sys.executable, "-m", "rose", "load", source, *map(str, flags)]


def load(source, *flags):
    return subprocess.run(
        command(source, *flags),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=devices.environment(),
    )


def test_a_short_run_is_reported_on_screen_in_json_and_as_a_picture(device, tmp_path):
    json_file, svg_file = tmp_path / "out.json", tmp_path / "out.svg"
    flags = ["--url", device.url, "--duration", 4, "--context", 512, "--json", json_file, "--svg", svg_file]
    before = device.metric("request_success_total", finished_reason="length")
    ended = load(SPEC, *flags)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(json_file.read_text())
    count = len(generated(SPEC, duration_s=4))
    assert found["requests"] == found["done"] == found["trace"]["requests"] == count
    assert found["rejected"] == found["timed_out"] == found["failed"] == found["short"] == found["cut"] == 0
    # The server's own count agrees: every request once, and the one that tried it out.
    assert device.metric("request_success_total", finished_reason="length") - before == count + 1
    rows = found["request_rows"]
    assert rows["attained"].count(1) == found["attained"]
    assert sum(rows["output_tokens"]) == sum(minute["output_tokens"] for minute in found["per_minute"])
    assert min(rows["ttft_ms"]) > 0
    assert found["tail"] == "p95" and found["ttft_p99_ms"] is None
    assert found["server"]["dialect"]["forces_length"] and found["server"]["dialect"]["returns_ids"]
    assert re.search(r"^  TTFT +[\d.,]+ +[\d.,]+ +[\d.,]+", ended.stdout, re.MULTILINE)
    assert ElementTree.fromstring(svg_file.read_text()).tag.endswith("svg")


def test_a_trace_file_is_replayed_as_it_is(device, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,20,3\n0.1,1,1\n0.4,30,7\n")
    json_file = tmp_path / "out.json"
    ended = load(trace, "--url", f"{device.url}/v1", "--json", json_file, "--lengths", "keep", "--rate-scale", 2)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(json_file.read_text())["request_rows"]
    assert rows["scheduled_s"] == [0.0, 0.05, 0.2]
    assert rows["prompt_tokens"] == [20, 1, 30]
    assert rows["output_tokens"] == [3, 1, 7]
    assert rows["outcome"] == ["done"] * 3


def test_a_second_run_of_one_seed_finds_nothing_in_the_prefix_cache(device):
    trace = generated("poisson:rate=50", requests=4)
    hits = device.metric("prefix_cache_hits_total")
    for _ in range(2):
        finished = asyncio.run(run_load(trace, LoadPlan(device.url, context_tokens=2048)))
        assert finished.report()["done"] == 4
    assert device.metric("prefix_cache_hits_total") == hits


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_reports_what_was_done_so_far(device, tmp_path, number):
    json_file = tmp_path / "out.json"
    flags = ["--url", device.url, "--duration", 600, "--context", 512, "--json", json_file]
    before = device.metric("request_success_total", finished_reason="length")
    with subprocess.Popen(
        command("poisson:rate=20", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=devices.environment(),
    ) as child:
        devices.eventually(lambda: device.metric("request_success_total", finished_reason="length") > before + 5)
        child.send_signal(number)
        said, trouble = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert "Traceback" not in trouble
    found = json.loads(json_file.read_text())
    assert found["was_stopped"] and found["done"] >= 4
    assert re.search(r"^  attained +\d+ of \d+ requests \(", said, re.MULTILINE)
    devices.eventually(device.is_idle)


@pytest.mark.parametrize(
    "source, flags, code, what, hint",
    [
        ("poison:rate=2", [], 2, "there is no generator `poison`", "did you mean `poisson:rate=2`?"),
        ("none.csv", [], 2, "trace none.csv cannot be read", "check the path"),
        ("poisson:rate=2", ["--model", "gpt"], 2, "has no model `gpt`", "did you mean `--model qwen3-3m`?"),
        ("poisson:rate=2", ["--vocabulary", 1000], 2, "refuses a plain completion", "--vocabulary N"),
        ("poisson:rate=2", ["--json", "no/such/folder.json"], 2, "there is no folder no/such", "make it first"),
        ("poisson:rate=2", ["--api-key-env", "ROSE_NO_SUCH"], 2, "ROSE_NO_SUCH is empty or not set", "export"),
    ],
)
def test_trouble_is_told_in_words(device, source, flags, code, what, hint):
    ended = load(source, "--url", device.url, *flags)
    assert ended.returncode == code
    assert what in ended.stderr and hint in ended.stderr and "Traceback" not in ended.stderr


def test_an_empty_trace_and_a_server_that_is_not_there_are_told(tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text("arrival_s,prompt_tokens,output_tokens\n")
    assert "empty.csv has no requests" in load(empty, "--url", "http://127.0.0.1:9").stderr
    ended = load("poisson:rate=2", "--url", "http://127.0.0.1:9")
    assert ended.returncode == 1
    assert "nothing answers at http://127.0.0.1:9" in ended.stderr and "rose serve MODEL" in ended.stderr


@pytest.mark.parametrize(
    "flag, value", [("--rate-scale", "0"), ("--requests", "0"), ("--ttft-ms", "nan"), ("--seed", "-1")]
)
def test_a_flag_that_makes_no_sense_is_refused(flag, value):
    ended = load("poisson:rate=2", "--url", "http://127.0.0.1:9", flag, value)
    assert ended.returncode == 2 and f"{flag} `{value}` is not" in ended.stderr
