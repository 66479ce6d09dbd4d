"""The folder of a run, and what is read back from it."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rose.core.groups import MemberEnded
from rose.errors import ConfigError, Unavailable
from rose.launch.folder import Lines, RunFolder
from rose.launch.serving import ServingLog
from rose.launch.settings import RunSettings, load_run_settings
from rose.launch.summing_up import read_lines, sum_up
from rose.launch.traffic import Served, served_of
from rose.load.records import Outcome, Record
from rose.load.report import Budget
from rose.observe.journal import read


@pytest.fixture
def settings(tmp_path) -> RunSettings:
    return replace(load_run_settings(), runs=str(tmp_path), name="it")


def test_a_folder_holds_its_settings_and_is_never_shared(settings):
    folder = RunFolder(settings)
    assert load_run_settings(folder.path / "settings.yaml") == settings
    with pytest.raises(ConfigError, match="already"):
        RunFolder(settings)
    folder.close()


def test_without_a_name_one_is_made(settings):
    folder = RunFolder(replace(settings, name=None))
    assert folder.path.is_dir() and folder.name.startswith("20")
    folder.close()


def test_a_folder_that_cannot_be_made_is_told(settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="runs=FOLDER"):
        RunFolder(replace(settings, runs=str(tmp_path / "file")))


def test_lines_facts_and_files(settings):
    folder = RunFolder(settings)
    folder.record("step", step=1)
    folder.decided(MemberEnded("it/0/0", 0, 0, 1.0, True, 4), [])
    folder.served(b'{"at_s": 1}')
    folder.write("summary.json", "{}")
    folder.close()
    assert read_lines(folder.path / "metrics.jsonl") == [{"kind": "step", "step": 1}]
    assert read_lines(folder.path / "serving.jsonl") == [{"at_s": 1}]
    [entry] = read(folder.path / "journal.jsonl")  # as `rose journal replay` does
    assert entry.fact == MemberEnded("it/0/0", 0, 0, 1.0, True, 4) and entry.decisions == ()
    assert [path.name for path in folder.path.iterdir() if path.name.startswith(".")] == []


def test_only_the_newest_stay(settings):
    folder = RunFolder(settings)
    for number in range(5):
        (folder.weights / f"{number:06d}").mkdir()
    folder.prune(folder.weights, 2)
    assert sorted(path.name for path in folder.weights.iterdir()) == ["000003", "000004"]
    folder.close()


def test_a_run_that_was_stopped_at_once_is_summed_up(settings):
    folder = RunFolder(settings)
    words = list(sum_up(folder))
    folder.close()
    assert words[0] == "no step was finished" and "report.html" in words[-1]
    assert json.loads((folder.path / "summary.json").read_text())["steps"] == 0


def test_a_torn_line_is_skipped(tmp_path):
    (tmp_path / "x").write_bytes(b'{"a": 1}\n{"b": ')
    assert read_lines(tmp_path / "x") == [{"a": 1}]


FULL = """
import resource, sys
from pathlib import Path
from rose.errors import Unavailable
from rose.launch.folder import Lines
lines = Lines(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (25, 25))
for _ in range(5):
    try:
        lines.append(b'{"a": 12345}')
    except Unavailable as error:
        print(error)
"""


def test_a_full_disk_leaves_whole_lines_only(tmp_path):
    path = tmp_path / "lines"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=60)
    assert "cannot be written" in done.stdout and "free some space" in done.stdout, done.stderr
    assert path.read_bytes() == b'{"a": 12345}\n'
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 25


def test_a_file_that_cannot_be_written_is_told(settings, monkeypatch):
    folder = RunFolder(settings)
    (folder.path / "report.html").mkdir()
    with pytest.raises(Unavailable, match=r"report\.html cannot be written"):
        folder.write("report.html", "x")
    folder.close()


def test_lines_can_be_closed_twice(tmp_path):
    lines = Lines(tmp_path / "x")
    lines.close()
    lines.close()
    assert (tmp_path / "x").exists()


def test_what_a_user_got_in_one_line():
    record = Record(3, scheduled_s=10.0, prompt_tokens=50, wanted_tokens=3, sent_s=10.001, ended_s=10.3)
    for moment_s in (10.1, 10.2, 10.3):
        record.saw(1, moment_s)
    record.outcome = Outcome.DONE
    served = served_of(record, Budget(), began_s=1000.0)
    assert (served.at_s, served.outcome, served.attained, served.output_tokens) == (1010.0, "done", True, 3)
    assert served.ttft_ms == pytest.approx(100) and served.tpot_ms == pytest.approx(100)
    assert served.late_ms == pytest.approx(1)


def test_the_running_figure_leaves_out_what_the_run_itself_cut_off():
    written: list[bytes] = []
    log = ServingLog(written.append)
    assert log.attainment() is None
    for outcome, attained in (("done", True), ("timed_out", False), ("cut", False)):
        log.heard(msgspec.json.encode(Served(1.0, outcome, 1.0, 1.0, attained, 1, 1, 0.0)))
    assert log.attainment() == 0.5 and log.requests == len(written) == 2


def test_only_its_user_may_enter_the_folder_and_read_the_secret(settings):
    before = os.umask(0)
    try:
        folder = RunFolder(settings)
        folder.write("weights.secret", "x", mode=0o600)
        folder.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "weights.secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["settings.yaml", "summary.json", "weights.secret"])
def test_a_file_of_the_run_is_synced_before_it_is_renamed(settings, monkeypatch, name):
    calls = []
    fsync, replaced = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append(Path(new).name), replaced(old, new)))
    folder = RunFolder(settings)
    folder.write("summary.json", "{}")
    folder.write("weights.secret", "x", mode=0o600)
    folder.close()
    place = calls.index(name)
    assert calls[place - 1 : place + 2] == ["fsync", name, "fsync"]


def test_requests_of_users_take_bounded_space_and_the_newest_are_kept(settings, monkeypatch):
    monkeypatch.setattr("rose.launch.folder.SERVING_BYTES_MAX", 100)
    folder = RunFolder(settings)
    for number in range(100):
        folder.served(b'{"at_s": %d}' % number)
    folder.close()
    parts = sorted(folder.path.glob("serving*.jsonl"))
    assert sum(part.stat().st_size for part in parts) <= 200
    kept = [line["at_s"] for line in read_lines(folder.path / "serving.jsonl")]
    assert len(kept) >= 7 and kept == list(range(100 - len(kept), 100))


def test_full_metrics_keep_steps_and_drop_samples(settings, monkeypatch):
    monkeypatch.setattr("rose.launch.folder.METRICS_BYTES_MAX", 100)
    folder = RunFolder(settings)
    for number in range(50):
        folder.record("sample", at_s=number)
        folder.record("step", step=number)
    folder.close()
    kinds = [line["kind"] for line in read_lines(folder.path / "metrics.jsonl")]
    assert kinds.count("step") == 50 and 0 < kinds.count("sample") < 5
