"""`rose serve --demo` makes a small model and serves it, and leaves nothing running when it is stopped."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.integration.devices import DEVICE, children_of, environment, eventually, is_alive

TIMEOUT_S = 100.0
DEMO = [sys.executable, "-m", "rose", "serve", "--demo", "--port", "0", "--device", DEVICE]


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(DEMO, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment())


def read_until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("try: curl"):
            return lines
    raise AssertionError(f"the device did not start: {lines}")


def test_a_demo_makes_its_model_once_answers_and_stops(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        lines = read_until_ready(process)
        assert lines[0].startswith("Making a qwen3-3m model") and "noise" in lines[1]
        url = re.search(r"curl (\S+) ", lines[-1])
        body = re.search(r"-d '(.*)'", lines[-1])
        assert url is not None and body is not None
        request = urllib.request.Request(url[1], body[1].encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            assert json.load(response)["usage"]["completion_tokens"] > 0
        engines = children_of(process.pid)
        assert engines
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    eventually(lambda: not any(is_alive(engine) for engine in engines))
    with start(tmp_path) as process:
        assert "noise" in read_until_ready(process)[0]  # the model is there already
        engines = children_of(process.pid)
        process.kill()
    eventually(lambda: not any(is_alive(engine) for engine in engines))
