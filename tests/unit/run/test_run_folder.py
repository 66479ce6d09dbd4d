"""The folder of a run, and what is read back from it."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from tests.unit.launch_lines import read_lines, requests, served

from rose.core.groups import MemberEnded
from rose.errors import ConfigError, Unavailable
from rose.observe.journal import read
from rose.run.run_folder import Lines, RunFolder, RunLock
from rose.run.run_records import (
    BalanceRecord,
    FinishedRecord,
    SampleRecord,
    read_served,
)
from rose.run.run_settings import RunSettings, load_run_settings


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


def test_a_folder_that_cannot_be_made_is_refused(settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="runs=FOLDER"):
        RunFolder(replace(settings, runs=str(tmp_path / "file")))


def test_lines_facts_and_files(settings):
    folder = RunFolder(settings)
    folder.record(FinishedRecord(step=1))
    folder.decided(MemberEnded("it/0/0", 0, 0, 1.0, True, 4), [])
    folder.served(b'{"at_s": 1}')
    folder.write("summary.json", "{}")
    folder.close()
    for name, fields in (("metrics.jsonl", {"kind": "finished", "step": 1}), ("serving.jsonl", {"at_s": 1})):
        [line] = read_lines(folder.path / name)
        assert datetime.fromisoformat(line.pop("utc")).tzinfo == UTC and line == fields
    [entry] = read(folder.path / "journal.jsonl")  # as `rose journal show` does
    assert entry.fact == MemberEnded("it/0/0", 0, 0, 1.0, True, 4) and entry.decisions == ()
    assert [path.name for path in folder.path.iterdir() if path.name.startswith(".")] == []


def test_pruning_keeps_the_newest_folders(settings):
    folder = RunFolder(settings)
    for number in range(5):
        (folder.weights / f"{number:06d}").mkdir()
    folder.prune(folder.weights, 2)
    assert sorted(path.name for path in folder.weights.iterdir()) == ["000003", "000004"]
    folder.close()


FULL = """
import resource, sys
from pathlib import Path
from rose.errors import Unavailable
from rose.run.run_folder import Lines
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


def test_a_file_that_cannot_be_written_is_unavailable(settings, monkeypatch):
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


def test_the_newest_requests_are_kept_in_bounded_space(settings, monkeypatch):
    lines = [msgspec.json.encode(request) for request in requests(served(number) for number in range(100))]
    bytes_max = 8 * len(lines[-1])
    monkeypatch.setattr("rose.run.run_folder.SERVING_BYTES_MAX", bytes_max)
    folder = RunFolder(settings)
    for line in lines:
        folder.served(line)
    folder.close()
    parts = sorted(folder.path.glob("serving*.jsonl"))
    assert sum(part.stat().st_size for part in parts) <= 2 * bytes_max
    kept = [request.at_s for request in read_served(folder.path / "serving.jsonl")]
    assert len(kept) >= 7 and kept == list(range(100 - len(kept), 100))


def test_full_metrics_keep_steps_and_drop_samples(settings, monkeypatch):
    monkeypatch.setattr("rose.run.run_folder.METRICS_BYTES_MAX", 100)
    folder = RunFolder(settings)
    for number in range(50):
        folder.record(SampleRecord(at_s=number, turns={}, running={}))
        folder.record(BalanceRecord(step=number))
    folder.close()
    kinds = [line["kind"] for line in read_lines(folder.path / "metrics.jsonl")]
    assert kinds.count("balance") == 50 and 0 < kinds.count("sample") < 5


HOLDER = "import sys; from pathlib import Path; from rose.run.run_folder import RunLock; \
lock = RunLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_the_lock_is_released_when_its_process_dies(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in process {holder.pid}"):
            RunLock(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    RunLock(tmp_path).close()
    assert (tmp_path / "run.lock").exists()


def test_lines_are_appended_and_a_torn_one_is_cut(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"b": ')
    lines = Lines(path)
    lines.append(b'{"c": 3}')
    lines.close()
    assert path.read_bytes() == b'{"a": 1}\n{"c": 3}\n'
