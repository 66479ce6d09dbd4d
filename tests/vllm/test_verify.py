"""`rose verify gpu` on vLLM's CPU build: the kit itself works from end to end, with few requests.

Its figures say nothing here. The step for time slices runs too, on a shared core: the code that only a GPU owner is
offered is not run by them first.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.vllm.engines import CORE, PROJECT, PYTHON, SOURCES

from rose.verify.engine_lab import EngineLab
from rose.verify.kit_results import KitSettings, read_report
from rose.verify.leftovers import processes_of
from rose.verify.step_worker import run_step
from rose.verify.verification_steps import steps_named

KIT_S, STARTED_S, ENDED_S = 880.0, 240.0, 60.0
REQUESTS = 12
STEPS = ("machine", "page-owner-killed", "serving-alone", "idle", "kill-rollouts", "kill-agent", "weight-swap")
BUDGETS = ("--ttft-ms", "10000", "--tpot-ms", "2000")  # that a busy machine keeps too


def command(folder: Path, *steps: str) -> list[str]:
    words = [sys.executable, "-m", "rose", "verify", "gpu", "--device", f"cpu:{CORE}", "--vllm-python", PYTHON]
    words += ["--out", str(folder), "--requests", str(REQUESTS), "--rate", "4", "--minutes", "120", *BUDGETS]
    return words + [word for step in steps for word in ("--only", step)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCES, str(PROJECT)]), "OMP_NUM_THREADS": "1"}


def leftovers(folder: Path) -> set[int]:
    return processes_of((folder / "processes").read_text())


def test_the_kit_runs_its_steps_and_leaves_a_report_and_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "kit"
    done = subprocess.run(
        command(folder, *STEPS), env=environment(), capture_output=True, text=True, timeout=KIT_S, check=False
    )
    report = read_report(folder / "report.json")
    assert report is not None, done.stdout + done.stderr
    outcomes = {result.step: (result.outcome, result.reason) for result in report.results}
    assert outcomes == dict.fromkeys(STEPS, ("passed", "")), done.stdout
    assert done.returncode == 0 and leftovers(folder) == set()
    idle = report.result("idle")
    assert idle is not None
    assert idle.figure("attainment").n == REQUESTS and idle.figure("attainment, alone less lent") is not None
    text = (folder / "report.json").read_text()
    assert str(tmp_path) not in text and str(Path.home()) + "/" not in text and json.loads(text)["layout"]


def test_an_interrupted_kit_ends_its_engines(tmp_path: Path) -> None:
    folder = tmp_path / "kit"
    kit = subprocess.Popen(command(folder, "serving-alone"), env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        deadline_s, log = time.monotonic() + STARTED_S, folder / "logs" / "serving.log"
        while time.monotonic() < deadline_s and not (log.exists() and "Started server process" in log.read_text()):
            time.sleep(0.2)
        assert len(leftovers(folder)) >= 3  # the worker, vLLM's server and its engine
        kit.send_signal(signal.SIGINT)
        assert kit.wait(ENDED_S) == 130
        assert leftovers(folder) == set()
    finally:
        kit.kill()
        kit.communicate()


def test_steps_that_are_not_for_a_cpu_run_here_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCES)
    (tmp_path / "steps").mkdir()
    settings = KitSettings(device=f"cpu:{CORE}", vllm_python=PYTHON, requests=4 * REQUESTS, rate_rps=4.0)
    usable = os.sched_getaffinity(0)

    async def run() -> None:
        lab = EngineLab(settings, tmp_path, print)
        try:
            plain, ungated = [await run_step(lab, step) for step in steps_named(["plain", "time-slices"])]
        finally:
            await lab.close()
        assert (plain.outcome, plain.reason, ungated.outcome, ungated.reason) == ("passed", "", "passed", "")
        assert plain.figure("TTFT P50").n == 4 * REQUESTS and ungated.figure("TTFT P50").n == REQUESTS
        assert ungated.figure("rollout tokens per second").value > 0 and "ends it alone" in ungated.notes[0]

    try:
        asyncio.run(run())
    finally:
        os.sched_setaffinity(0, usable)
