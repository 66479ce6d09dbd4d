"""Starts devices as users do, as processes, and speaks to them."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
PATIENCE_S = 180.0  # finds what never happens; a busy machine takes long
FIRST_CORE = min(os.sched_getaffinity(0))
DEVICE = f"cpu:{FIRST_CORE}"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must have OpenAI's shape."""
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert found["message"]
        return found


class Device:
    """A running device; `port` is known when it is ready."""

    def __init__(self, process: subprocess.Popen[str], lines: list[str], port: int, model: str) -> None:
        self.process = process
        self.lines = lines
        self.port = port
        self.model = model

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def engine_pid(self) -> int:
        [pid] = children_of(self.process.pid)
        return pid

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=PATIENCE_S)
        data = json.dumps(body).encode() if body is not None else raw
        connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.getheaders()), response.read())
        connection.close()
        return answer

    def post(self, path: str, body: Any) -> Answer:
        return self.ask("POST", path, body)

    def complete(self, **body: Any) -> Answer:
        return self.post("/v1/completions", body)

    def metric(self, name: str, **labels: str) -> float:
        text = self.ask("GET", "/metrics").body.decode()
        wanted = "".join(f'(?=[^}}]*{label}="{value}")' for label, value in labels.items())
        [value] = re.findall(rf"^vllm:{name}\{{{wanted}[^}}]*\}} (\S+)$", text, re.MULTILINE)
        return float(value)

    def is_idle(self) -> bool:
        return self.metric("num_requests_running") == self.metric("num_requests_waiting") == 0

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


def start(arguments: list[str], model: Path, variables: dict[str, str] | None = None) -> Device:
    """Start a device and wait until it is ready; its words go to `lines`."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment() | (variables or {}),
    )
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        ready = re.search(r"ready at http://[^:]+:(\d+)", line)
        if ready:
            return Device(process, lines, int(ready[1]), model.name)
    process.wait()
    raise AssertionError(f"the device did not start: {lines}")


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def end(device: Device) -> None:
    """Whatever state a test left it in."""
    device.process.kill()
    device.process.wait()
    if device.process.stdout is not None:
        device.process.stdout.close()


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            status = process_status(int(entry.name))
            if status is not None and status[1] == pid and status[0] != "Z":
                found.append(int(entry.name))
    return found


def process_status(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def is_alive(pid: int) -> bool:
    status = process_status(pid)
    return status is not None and status[0] != "Z"


def eventually(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait for something that happens by itself; how long it takes is not the point."""
    deadline_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.02)
