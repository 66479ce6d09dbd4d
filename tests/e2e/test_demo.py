"""`rose demo` shows a device answering, says plainly when it cannot, and leaves nothing running behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.e2e.devices import children_of, eventually

PATIENCE_S = 100.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One folder, so that the model is made once."""
    return tmp_path_factory.mktemp("runs")


def command(runs, *flags):
    return [sys.executable, "-m", "rose", "demo", "--runs", str(runs), "--tokens", "20", *flags]


def processes_of(runs) -> list[int]:
    """Every process whose command line names the folder: the device's front. Its engine dies with it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(runs).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_a_device_answers_and_is_stopped(runs):
    ended = subprocess.run(command(runs), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^  tokens +20$", ended.stdout, re.MULTILINE)
    assert re.search(r"^  first token +[\d.]+ ms$", ended.stdout, re.MULTILINE)
    assert f"serve {runs}/models/qwen3-3m --port 8000" in ended.stdout
    assert processes_of(runs) == []


def test_a_device_that_cannot_start_says_why(runs):
    flags = ["--device", "cpu:4095"]
    ended = subprocess.run(command(runs, *flags), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("rose: the device stopped while starting:")
    assert "4095" in ended.stderr and "Traceback" not in ended.stderr


def test_killed_it_leaves_neither_the_device_nor_its_engine_running(runs):
    flags = ("--tokens", "4000")
    with subprocess.Popen(command(runs, *flags), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as demo:
        assert demo.stdout is not None
        next(line for line in demo.stdout if line.startswith(b"Ready"))
        device = [found for found in processes_of(runs) if found != demo.pid]
        engines = [engine for found in device for engine in children_of(found)]
        assert len(device) == 1 and engines
        demo.kill()
    eventually(lambda: processes_of(runs) == [])
    eventually(lambda: not any(Path(f"/proc/{engine}").exists() for engine in engines))


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5, 2.5])
def test_interrupted_at_any_moment_it_leaves_nothing_running(runs, signal_number, after_s):
    with subprocess.Popen(command(runs, "--tokens", "4000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        next(line for line in child.stdout if line.startswith(b"Starting"))
        time.sleep(after_s)
        child.send_signal(signal_number)
        _, said = child.communicate(timeout=PATIENCE_S)
        assert b"Traceback" not in said
    assert child.returncode in (128 + signal.SIGINT, 0)  # 0: it was already done
    assert processes_of(runs) == []
