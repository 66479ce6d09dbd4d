"""Nodes of a Ray cluster on one machine: real `ray start` processes, each in a network namespace of its own.

Such a node has its own addresses and ports, and does not see the folders that a test hides from it, as on machines
without a shared file system. Without permission for namespaces all nodes are on the loopback. Processes are ended by
their ids: `ray stop` would end every Ray process of the machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.integration.devices import ROOT, environment, eventually, process_status
from tests.integration.running import Run, processes_of

MARK = "ROSE_TEST_CLUSTER"
PATIENCE_S = 150.0  # of a busy machine: a node, with all that Ray starts on it, and a device after its node was lost
NETWORK = "10.213.17"


class RayNodes:
    """A head and more nodes; `add` starts one, and `close` ends all that a node has started."""

    def __init__(self, hidden: Sequence[Path] = (), *, has_dashboard: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rr-"))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.has_namespaces = True
        self._hidden, self._has_dashboard = hidden, has_dashboard
        self._bridge, self._name = f"rr{os.getpid()}", f"rose-ray{os.getpid()}-"
        self.variables = {
            MARK: self.folder.name,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_worker_niceness": "0",
            # A killed node is known to be lost after about five seconds; a busy machine is given more.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_initial_delay_ms": "0",
        }

    def open(self) -> None:
        """Make the network, if that is allowed."""
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{NETWORK}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or str(error)
            if not (isinstance(error, FileNotFoundError) or "not permitted" in why or "denied" in why):
                raise
            self.has_namespaces = False

    def address(self, number: int) -> str:
        return f"{NETWORK}.{10 + number}" if self.has_namespaces else "127.0.0.1"

    @property
    def head(self) -> str:
        return f"{self.address(0)}:{self.port}"

    port = 6399

    def add(self, labels: str, *, cpus: int = 2, variables: dict[str, str] | None = None) -> int:
        """Start a node, and return its number; the first is the head."""
        number = len(self.processes)
        if self.has_namespaces:
            self._make_namespace(number)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", self.address(number)]
        if number == 0:
            command += ["--head", "--port", str(self.port), "--temp-dir", str(self.folder)]
            command += ["--include-dashboard", str(self._has_dashboard).lower(), "--dashboard-host", self.address(0)]
        else:
            command += ["--address", self.head]
        command += ["--num-cpus", str(cpus), "--object-store-memory", "80000000", "--disable-usage-stats", "--block"]
        command += ["--labels", labels] if labels else []
        self.processes.append(self.run(number, *command, hides=number > 0, variables=variables))
        log = self.log(number)
        eventually(
            lambda: "runtime started" in log.read_text() or self.processes[number].poll() is not None, PATIENCE_S
        )
        assert self.processes[number].poll() is None, log.read_text()
        return number

    def log(self, number: int) -> Path:
        return self.folder / f"node{number}.log"

    def inside(self, number: int) -> list[str]:
        """Return the beginning of a command that runs on this node."""
        return ["ip", "netns", "exec", f"{self._name}{number}"] if self.has_namespaces else []

    def run(
        self, number: int, *command: str, hides: bool = False, variables: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        before = self.inside(number)
        if hides and self.has_namespaces:
            mounts = "".join(f"mount -t tmpfs none '{path}' && " for path in self._hidden)
            before += ["unshare", "-m", "--propagation", "private", "sh", "-c", f'{mounts}exec "$@"', "-"]
        with self.log(number).open("wb") as log:
            return subprocess.Popen(
                [*before, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=environment() | self.variables | {"PYTHONPATH": str(ROOT / "src")} | (variables or {}),
                start_new_session=True,
            )

    def all(self, words: str = "") -> dict[int, str]:
        """Return every process that a node has started and that still runs, by its command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self._is_ours(entry):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words in command:
                        found[int(entry.name)] = command
        return found

    def _is_ours(self, entry: Path) -> bool:
        """Return whether a process is of this cluster: by its mark, or its folder, since Ray's overwrite their mark."""
        has_mark = f"{MARK}={self.folder.name}".encode() in _variables(entry)
        return has_mark or os.readlink(entry / "cwd").removesuffix(" (deleted)") == str(self.folder)

    def of_rose(self) -> dict[int, str]:
        """Return the processes of a run; their supervisors are Ray's."""
        return self.all(" rose.") | self.all("-m rose ")

    def raylet_of(self, role: str) -> int:
        """Return the raylet whose actor supervises this process."""
        words = {"gateway": "rose gateway"}.get(role, f"rose serve .*--worker-name {role}")
        [process] = processes_of(self.of_rose(), words)
        _, raylet, *_ = ancestors(process)  # first the actor
        assert "raylet" in self.all()[raylet]
        return raylet

    def below(self, raylet: int) -> set[int]:
        """Return the processes of a run on the node of this raylet."""
        return {pid for pid in self.of_rose() if raylet in ancestors(pid)}

    def close(self) -> None:
        for name in (signal.SIGTERM, signal.SIGKILL):
            deadline_s = time.monotonic() + 10
            for pid in self.all():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, name)
            while self.all() and time.monotonic() < deadline_s:
                for process in self.processes:
                    process.poll()
                time.sleep(0.1)
        if self.has_namespaces:
            for number in range(len(self.processes)):
                subprocess.run(["ip", "netns", "del", f"{self._name}{number}"], capture_output=True, timeout=30)
            subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, timeout=30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make_namespace(self, number: int) -> None:
        name, card = f"{self._name}{number}", f"{self._bridge}v{number}"
        _ip("netns", "add", name)
        _ip("link", "add", card, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", card, "master", self._bridge)
        _ip("link", "set", card, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")


def driver_on(nodes: RayNodes) -> type[Run]:
    """Return runs whose driver is on the head's node."""
    variables = {name: value for name, value in nodes.variables.items() if name.startswith("RAY_AUTH")}
    differences = {"before": tuple(nodes.inside(0)), "variables": variables, "patience_s": PATIENCE_S}
    return type("RayRun", (Run,), differences)


def ancestors(pid: int) -> list[int]:
    found = []
    while (status := process_status(pid)) is not None and status[1] > 1:
        pid = status[1]
        found.append(pid)
    return found


def _variables(entry: Path) -> list[bytes]:
    return (entry / "environ").read_bytes().split(b"\0")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)
