"""The runner: one failure never stops the rest, a killed kit goes on where it was, and no process is left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.unit import fake_step_worker

from rose.errors import ConfigError
from rose.verify.kit_results import KitSettings, read_report
from rose.verify.kit_runner import KitRunner
from rose.verify.machine_facts import Capabilities
from rose.verify.verification_steps import STEPS, steps_named

NAMES = ("machine", "page-calls", "idle")
EVERYTHING = Capabilities({})
WAIT_S = 30.0


class Kit:
    """A runner with a worker that does what a plan says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, []
        folder.mkdir()

    def runner(self, names=NAMES, settings=None, limit_s=60.0):
        def command(folder):
            return [sys.executable, fake_step_worker.__file__, str(folder)]

        settings = settings or KitSettings(device="cpu:0")
        return KitRunner(
            self.folder, settings, steps_named(names), self.lines.append, command=command, limit_s_min=limit_s
        )

    def plan(self, *words):
        (self.folder / "plan.json").write_text(json.dumps(dict(zip(NAMES, words))))

    def run(self, *words, capabilities=EVERYTHING, is_resumed=False, again=(), **kinds):
        self.plan(*words)
        return self.runner(**kinds).run(capabilities, is_resumed=is_resumed, again=again)

    def started(self):
        return [line.split()[0] for line in (self.folder / "started").read_text().splitlines()]


@pytest.fixture
def kit(tmp_path):
    return Kit(tmp_path / "kit")


def outcomes(report):
    return [result.outcome for result in report.results]


def has_ended(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_all_steps_run_in_one_worker_and_the_report_is_written(kit):
    report = kit.run("pass", "pass", "pass")
    assert outcomes(report) == ["passed"] * 3 and report.ended > 0
    assert read_report(kit.folder / "report.json") == report
    assert {"report.html", "report.txt"} <= {path.name for path in kit.folder.iterdir()}
    assert len({line.split()[1] for line in (kit.folder / "started").read_text().splitlines()}) == 1


def test_progress_lines_name_the_step_and_the_time_left(kit):
    kit.run("pass", "pass", "pass")
    [first] = [line for line in kit.lines if line.startswith("[1/3] machine")]
    assert "left in all" in first and all(len(part) <= 80 for line in kit.lines for part in line.splitlines())


@pytest.mark.parametrize("word, reason", [("fail", ""), ("die", "ended with code 7"), ("hang", "did not end within")])
def test_a_step_that_fails_dies_or_hangs_does_not_stop_the_rest(kit, monkeypatch, word, reason):
    monkeypatch.setattr("rose.verify.kit_runner.LIMIT_FACTOR", 0.0)
    report = kit.run("pass", word, "pass", limit_s=2.0 if word == "hang" else 60.0)
    assert outcomes(report) == ["passed", "failed", "passed"]
    assert reason in report.results[1].reason
    assert kit.started() == list(NAMES)


def test_a_step_that_finds_that_it_cannot_say_anything_is_left_and_tried_again(kit):
    assert outcomes(kit.run("pass", "skip", "pass")) == ["passed", "not run", "passed"]
    assert outcomes(kit.run("die", "pass", "die", is_resumed=True)) == ["passed"] * 3


def test_processes_that_a_dead_worker_left_are_ended(kit):
    report = kit.run("pass", "orphan", "pass")
    assert outcomes(report) == ["passed", "failed", "passed"]
    assert has_ended(int((kit.folder / "orphan").read_text()))


def test_what_is_missing_is_a_reason_and_not_a_failure(kit):
    missing = Capabilities({"vllm": "vllm cannot be imported by <python>", "gpu": "no GPU", "driver": "no driver"})
    report = kit.run("pass", "pass", "pass", capabilities=missing, settings=KitSettings(device="cuda:0"))
    assert outcomes(report) == ["passed", "not run", "not run"]
    assert [result.reason for result in report.results[1:]] == [
        "no GPU",
        "no GPU",
    ]
    assert kit.started() == ["machine"]


def test_a_second_kit_in_the_folder_needs_to_be_asked_for(kit):
    kit.run("pass", "pass", "pass")
    with pytest.raises(ConfigError, match="has the results of a kit already") as refusal:
        kit.run("pass", "pass", "pass")
    assert "--resume" in str(refusal.value)


def test_resume_runs_only_what_has_no_result(kit):
    first = kit.run("pass", "fail", "pass", names=NAMES[:2])
    report = kit.run("die", "die", "pass", is_resumed=True)
    assert outcomes(report) == ["passed", "failed", "passed"] and kit.started() == list(NAMES)
    assert report.began == first.began and report.run_seconds > first.run_seconds


def test_resume_looks_again_at_what_was_not_run(kit):
    kit.run("pass", "pass", "pass", capabilities=Capabilities({"vllm": "no vLLM"}))
    assert outcomes(kit.run("die", "die", "pass", is_resumed=True)) == ["passed"] * 3


def test_a_step_that_is_named_runs_again(kit):
    kit.run("pass", "fail", "pass")
    report = kit.run("die", "pass", "die", names=NAMES[1:2], again=NAMES[1:2])
    assert outcomes(report) == ["passed"] * 3


def test_other_settings_are_refused_when_a_kit_is_resumed(kit):
    kit.run("pass", "pass", "pass")
    with pytest.raises(ConfigError, match="begun with another requests"):
        kit.run("pass", "pass", "pass", is_resumed=True, settings=KitSettings(device="cpu:0", requests=5))


def test_no_step_starts_that_would_end_after_the_budget(kit):
    settings = KitSettings(device="cpu:0", budget_minutes=1.0)
    report = kit.run("pass", "pass", "pass", settings=settings)
    assert outcomes(report) == ["passed", "passed", "not run"] and "used up" in report.results[2].reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_kit_leaves_its_results_and_no_process(kit, number):
    def interrupt():
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s and "page-calls" not in _text(kit.folder / "started"):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        kit.run("pass", "hang", "pass")
    assert signal.getsignal(signal.SIGINT) is before
    report = read_report(kit.folder / "report.json")
    assert outcomes(report) == ["passed"] and report.ended == 0
    folders = {line.split()[1] for line in _text(kit.folder / "started").splitlines()}
    assert [folder for folder in folders if Path(folder).exists()] == []
    assert outcomes(kit.run("die", "pass", "pass", is_resumed=True)) == ["passed"] * 3


def _text(path):
    return path.read_text() if path.exists() else ""


def test_what_a_killed_kit_left_running_is_ended_when_it_is_resumed(kit):
    runner = kit.runner()
    kit.plan("pass", "orphan", "pass")
    runner._prepare(False, ())
    process = runner._start_worker(kit.folder)
    process.communicate(b"page-calls\n", WAIT_S)  # as if the kit were killed now
    orphan = int((kit.folder / "orphan").read_text())
    assert not has_ended(orphan)
    kit.run("pass", "pass", "pass", is_resumed=True)
    assert has_ended(orphan)


def test_the_table_has_the_steps_of_this_test():
    assert set(NAMES) <= {step.name for step in STEPS}
