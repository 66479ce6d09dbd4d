"""The worker: a step that raises has failed, its engines are ended, and what it says is redacted."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from rose.errors import Unavailable
from rose.verify.kit_results import SETTINGS_FILE, KitSettings, StepResult, read_result, result_path, write_json
from rose.verify.step_worker import run_step
from rose.verify.verification_steps import STEPS

WAIT_S = 60.0
MACHINE = STEPS[0]


class FakeLab:
    """Engines that count how often they were ended."""

    def __init__(self, folder) -> None:
        self.folder, self.settings, self.closed = folder, KitSettings(device="cpu:0"), 0
        (folder / "steps").mkdir()

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def lab(tmp_path):
    return FakeLab(tmp_path)


async def fine(context):
    context.findings.check("all is well", True)


async def broken(context):
    context.findings.figure("before it broke", 1.0)
    raise Unavailable(f"nothing at {context.folder}/x with hf_abcdefghijkl")


async def faulty(context):
    return 1 / 0


async def looks_back(context):
    context.findings.check("the earlier step is known", "idle" in context.results)


def run(lab, name, function):
    step = replace(MACHINE, name=name, function=f"{__name__}:{function.__name__}")
    return asyncio.run(run_step(lab, step))


def test_a_step_that_returns_has_its_result_written(lab):
    result = run(lab, "idle", fine)
    assert result.outcome == "passed" and lab.closed == 0
    assert read_result(result_path(lab.folder, "idle")) == result


@pytest.mark.parametrize(
    "function, reason", [(broken, "nothing at <folder>/x with <token>"), (faulty, "ZeroDivisionError")]
)
def test_a_step_that_raises_has_failed_and_its_engines_are_ended(lab, function, reason):
    result = run(lab, "idle", function)
    assert result.outcome == "failed" and result.reason.startswith(reason) and lab.closed == 1


def test_what_was_found_before_an_error_is_kept(lab):
    assert run(lab, "idle", broken).figure("before it broke").value == 1.0


def test_a_step_sees_the_results_of_earlier_ones(lab):
    write_json(result_path(lab.folder, "idle"), StepResult("idle", "passed"))
    assert run(lab, "decode", looks_back).outcome == "passed"


@pytest.fixture
def process(tmp_path):
    (tmp_path / "steps").mkdir()
    write_json(tmp_path / SETTINGS_FILE, KitSettings(device="cpu:0", vllm_python=sys.executable))
    command = [sys.executable, "-m", "rose.verify.step_worker", str(tmp_path)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    yield started
    started.kill()
    started.communicate()


def test_the_process_runs_what_is_named_on_its_input_and_ends_with_it(process, tmp_path):
    process.communicate(b"machine\n", WAIT_S)
    result = read_result(result_path(tmp_path, "machine"))
    assert process.returncode == 0 and result.outcome == "passed" and result.facts["ROSE"]


def test_the_process_ends_in_good_order_when_it_is_asked_to(process, tmp_path):
    process.stdin.write(b"machine\n")
    process.stdin.flush()
    deadline_s = time.monotonic() + WAIT_S
    while read_result(result_path(tmp_path, "machine")) is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
