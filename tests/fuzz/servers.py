"""Starts the servers that are fuzzed, as users start them, each process with a heartbeat and its log in a file."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import heartbeat
from tests.integration import devices, gateways, lent

from rose.models.presets import write_preset

SERVING_MODEL, ROLLOUT_MODEL = "qwen3-3m", "frozenlake-1m"
START_S = 120.0
SECRET = b"a-secret-of-the-relay-for-fuzzers"
FRONT = ("slow_reader_s=2", "read_timeout_s=2")
GATEWAY = (
    *FRONT, "wait_s=2", "beat_s=0.2", "lease_s=2", "idle_s=5", "max_trajectories=2000", "max_waiting=64",
    "return_after_s=1", "control.wait_s=2",
)  # fmt: skip


@dataclass
class Usage:
    """What one process holds."""

    rss_mb: float
    descriptors: int
    threads: int


@dataclass
class Server:
    """One or several processes with one or several ports."""

    folder: Path
    process: subprocess.Popen[bytes]
    ports: dict[str, int] = field(default_factory=dict)
    others: list[Server] = field(default_factory=list)

    def pids(self) -> dict[int, str]:
        """Return the processes of this server and of those that work for it, with the moment each started."""
        found = {pid: _started(pid) for pid in _tree(self.process.pid)}
        for other in self.others:
            found |= other.pids()
        return {pid: start for pid, start in found.items() if start}

    def usage(self) -> dict[int, Usage]:
        return {pid: usage for pid in self.pids() if (usage := _usage(pid)) is not None}

    def logs(self) -> dict[Path, str]:
        found = {self.folder: (self.folder / "log").read_text(encoding="utf-8", errors="replace")}
        for other in self.others:
            found |= other.logs()
        return found

    def blocks(self) -> list[heartbeat.Block]:
        """Return the blocks of all loops so far."""
        lines = [json.loads(line) for file in self._beats() for line in file.read_text().splitlines() if line]
        found = [heartbeat.Block(**line["block"]) for line in lines if "block" in line]
        return found + [block for other in self.others for block in other.blocks()]

    def tasks(self) -> int:
        """Return how many tasks the loops have, as they last said."""
        return sum(line["tasks"] for line in self._shown())

    def live_blocks(self) -> dict[int, int]:
        """Return how many blocks of memory Python objects hold in each process, as its loop last said."""
        return {line["pid"]: line["live_blocks"] for line in self._shown()}

    def stop(self) -> None:
        for other in self.others:
            other.stop()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _shown(self) -> list[dict[str, int]]:
        """Return the last line of each loop with its numbers."""
        found = [line for other in self.others for line in other._shown()]
        for file in self._beats():
            lines = [line for line in file.read_text().splitlines()[-50:] if '"tasks"' in line]
            found += [json.loads(line) for line in lines[-1:]]
        return found

    def _beats(self) -> list[Path]:
        return sorted((self.folder / "beats").glob("*.jsonl"))


def start(folder: Path, arguments: list[str], patterns: dict[str, str], block_ms: float, **variables: str) -> Server:
    """Start `python arguments...` and wait until its output has all ports that the patterns look for."""
    (folder / "beats").mkdir(parents=True)
    known = devices.environment()
    path = os.pathsep.join([str(Path(__file__).parent / "site"), known["PYTHONPATH"]])
    beats = {heartbeat.VARIABLE: str(folder / "beats"), heartbeat.BLOCK_VARIABLE: str(block_ms)}
    cache = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": path}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=log,
            stderr=log,
            cwd=devices.ROOT,
            env=known | beats | cache | variables,
        )
    server = Server(folder, process)
    deadline_s = time.monotonic() + START_S
    while len(server.ports) < len(patterns):
        said = server.logs()[folder]
        server.ports = {name: int(match[1]) for name, text in patterns.items() if (match := re.search(text, said))}
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise AssertionError(f"{arguments} did not start:\n{said}")
        time.sleep(0.05)
    return server


@contextmanager
def device(folder: Path, block_ms: float) -> Iterator[Server]:
    """A lent device: the serving port with the owner's routes, and the rollouts' port."""
    serving, rollouts = _models(folder)
    arguments = ["-m", "rose", "serve", str(serving), "--lend", str(rollouts), *lent.ARGUMENTS]
    for part in ("front", "rollout"):
        arguments += [word for text in FRONT for word in ("--set", f"{part}.{text}")]
    patterns = {"serving": r"ready at http://[^:]+:(\d+)", "rollouts": r"lending to \S+ at http://[^:]+:(\d+)"}
    tokens = {"ROSE_ROLLOUT_TOKEN": lent.ROLLOUT_TOKEN, "ROSE_OWNER_TOKEN": lent.OWNER_TOKEN}
    with _stopped(start(folder / "device", arguments, patterns, block_ms, **tokens)) as server:
        yield server


@contextmanager
def gateway(folder: Path, block_ms: float) -> Iterator[Server]:
    """A gateway with a ledger and one worker."""
    model, _ = _models(folder)
    arguments = ["-m", "rose", "gateway", str(model), "--port", "0", "--ledger", str(folder / "ledger.sqlite")]
    arguments += [word for text in GATEWAY for word in ("--set", text)]
    arguments += ["--door", "vllm", "--door-folder", str(folder), "--door-relay", str(folder / "relay")]
    patterns = {"gateway": r"ready at http://[^:]+:(\d+)"}
    variables = gateways.TOKENS | {"ROSE_RELAY_SECRET": SECRET.decode()}
    server = start(folder / "gateway", arguments, patterns, block_ms, **variables)
    with ExitStack() as held:
        held.enter_context(_stopped(server))
        _start_publisher(server.ports["gateway"])
        arguments = ["-m", "rose", "serve", "--lend", str(model), "--rollout-port", "0", "--device", devices.DEVICE]
        arguments += ["--kv-memory-mb", "64", "--set", "engine.max_context_tokens=1024", "--worker-name", "honest"]
        arguments += ["--gateway", f"http://127.0.0.1:{server.ports['gateway']}"]
        ready = {"worker": r"ready at http://[^:]+:(\d+)"}
        server.others.append(start(folder / "worker", arguments, ready, block_ms, **gateways.TOKENS))
        yield server


def _start_publisher(port: int) -> None:
    """Have the gateway start its publisher, which it does for the first folder: later it would be a finding."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    headers = {"Authorization": f"Bearer {gateways.TRAINER}", "Content-Type": "application/json"}
    connection.request("POST", "/areal_update_weights", b'{"model_path": "/"}', headers)
    assert connection.getresponse().status == 400
    connection.close()


@contextmanager
def relay(folder: Path, block_ms: float) -> Iterator[Server]:
    (folder / "secret").write_bytes(SECRET)
    arguments = ["-m", "rose", "relay", "up", "--folder", str(folder / "values"), "--listen", "127.0.0.1:0"]
    arguments += ["--secret-file", str(folder / "secret")]
    patterns = {"relay": r"http://[^:]+:(\d+)"}
    with _stopped(start(folder / "relay", arguments, patterns, block_ms)) as server:
        yield server


@contextmanager
def _stopped(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.stop()


def _models(folder: Path) -> tuple[Path, Path]:
    paths = [folder / "models" / name for name in (SERVING_MODEL, ROLLOUT_MODEL)]
    for path in paths:
        if not path.exists():
            write_preset(path.name, path, seed=0)
    return paths[0], paths[1]


def _tree(pid: int) -> list[int]:
    return [pid, *(below for child in devices.children_of(pid) for below in _tree(child))]


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _usage(pid: int) -> Usage | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    numbers = {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}
    return Usage(numbers.get("VmRSS", 0) / 1024, descriptors, numbers.get("Threads", 0))
